"""What rank 0 says comes to the driver once and in order, however slow the mailbox is; its death. No cluster here."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train import ControllerError
from torch.distributed import DistNetworkError

from shoal.errors import NotFinite, RankLost, RunError, TrainError
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from waiting import wait_for

ENDED = TrainResult("r", "steps", "9 steps", 9, 9, 1.0)
INTERRUPTED = TrainResult("r", "interrupted", "interrupted at step 3", 3, 3, 1.0)


class Handle:
    """A mailbox as its handle shows it. `troubles` befall the next calls, the first one first:

    late (it is heard, the answer does not come in time), unheard (it has not arrived), dead (from then on)
    """

    def __init__(self) -> None:
        from shoal.runs.ray_event_channel import Mailbox

        self.mailbox = Mailbox()
        self.troubles: list[str] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *args: lambda: self._called(name, args))

    def _called(self, name: str, args: tuple[Any, ...]) -> Any:
        from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

        troubles = self.troubles
        trouble = troubles[0] if troubles else ""
        if trouble == "dead":
            raise ActorDiedError
        answer = getattr(self.mailbox, name)(*args) if trouble != "unheard" else None
        if trouble:
            troubles.pop(0)
            raise GetTimeoutError("late") if trouble == "late" else ActorUnavailableError("unheard", None)
        return answer


class FakeTrainer:
    """Fulfils what a Fit asks of a TorchTrainer: ends when it is let go, as it was told to."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.end: TrainResult | Exception = ENDED

    def fit(self) -> SimpleNamespace:
        assert self.let_go.wait(120)
        if isinstance(self.end, Exception):
            raise self.end
        return SimpleNamespace(return_value=self.end)


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    import ray

    from shoal.runs import ray_event_channel

    monkeypatch.setattr(ray, "get", lambda call, timeout: call())
    monkeypatch.setattr(ray_event_channel, "DELIVERY_INTERVAL_S", 0.001)
    return Handle()


@pytest.fixture
def trainer() -> FakeTrainer:
    return FakeTrainer()


@pytest.fixture
def fit(handle: Handle, trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch) -> Any:
    from shoal.train.launch import ray_train

    monkeypatch.setattr(ray_train, "start_mailbox", lambda: handle)
    monkeypatch.setattr(ray_train, "GuardedTrainer", lambda *args, **kwargs: trainer)
    spec = TrainSpec.parse({"task": "Toy", "stop": {"steps": 9}})
    return ray_train.RayTrainAttempt(ray_train.WorkerSetup(spec, "r", Path("r"), Path.cwd()))


@pytest.mark.parametrize(
    ("device", "named", "backend"),
    [("cuda", None, "cpu:gloo,cuda:nccl"), ("cuda", "nccl", "nccl"), ("cpu", None, None), ("cpu", "gloo", "gloo")],
)
def test_ranks_with_a_device_speak_on_their_host_too(
    handle: Handle,
    trainer: FakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    named: str | None,
    backend: str | None,
) -> None:
    from ray.train.torch.config import _is_backend_nccl
    from ray.train.v2._internal.constants import get_env_vars_to_propagate

    from shoal.train.launch import ray_train

    told: dict[str, Any] = {}
    monkeypatch.setattr(ray_train, "start_mailbox", lambda: handle)
    monkeypatch.setattr(ray_train, "GuardedTrainer", lambda *args, **kwargs: told.update(kwargs) or trainer)
    words = {"task": "Toy", "stop": {"steps": 9}, "workers": 2, "device": device, "parallel": {"backend": named}}
    trainer.let_go.set()
    heard(ray_train.RayTrainAttempt(ray_train.WorkerSetup(TrainSpec.parse(words), "r", Path("r"), Path.cwd())))
    assert told["torch_config"].backend == backend
    assert get_env_vars_to_propagate()["RAY_TRAIN_ENABLE_PRINT_PATCH"] == "0"  # a Task's print is in its log once
    assert backend is None or _is_backend_nccl(backend) == (device == "cuda")  # for which Ray sets what NCCL needs


def test_a_task_that_ends_the_program_has_failed_and_no_worker_was_lost(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.train.launch import ray_train

    monkeypatch.setattr(ray_train, "get_context", lambda: SimpleNamespace(get_world_rank=int, get_local_rank=int))
    monkeypatch.setattr(
        ray_train.World, "from_process_group", lambda *_: sys.exit("no data")
    )  # whatever is first of a Trainer's
    spec = TrainSpec.parse({"task": "Toy", "stop": {"steps": 9}})
    setting = ray_train.WorkerSetup(spec, "r", Path("r"), Path.cwd())
    with pytest.raises(SystemExit):
        ray_train._run_worker({"setting": setting, "mailbox": handle})
    _, (error,) = handle.mailbox.poll(0)
    assert str(error).endswith("SystemExit: no data")


def heard(fit: Any) -> list[Any]:
    """All that the driver hears until the attempt is over."""
    messages: list[Any] = []

    def is_over() -> bool:
        new, over = fit.poll(0.001)
        messages.extend(new)
        return bool(over)

    wait_for(is_over, what="the end of the attempt")
    return messages


def test_a_mailbox_that_does_not_answer_stops_nobody_and_loses_nothing(handle: Handle) -> None:
    from shoal.runs.ray_event_channel import RayLog

    handle.troubles = ["late", "unheard", "late"]
    posted = RayLog(handle)
    for step in range(100):
        posted.log(step, {"loss": 1.0})
    wait_for(lambda: not handle.troubles, what="three calls without an answer")
    posted.record_event("stopped", reason="steps")
    posted.close()
    messages, _ = handle.mailbox.poll(0)
    assert [arguments[0] for _, arguments, _ in messages] == [*range(100), "stopped"]
    assert not posted.stop_requested.is_set()


def test_who_is_refused_hears_it_before_a_checkpoint_and_is_to_end(handle: Handle) -> None:
    from shoal.runs.ray_event_channel import RayLog

    posted = RayLog(handle)
    posted.flush()
    handle.mailbox.abort("run 'r' was resumed by another process")
    assert posted.stop_requested.wait(120)
    with pytest.raises(RunError, match="run 'r' was resumed by another process"):
        posted.flush()
    posted.close()


def test_what_is_flushed_is_in_the_mailbox(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.runs import ray_event_channel

    monkeypatch.setattr(ray_event_channel, "DELIVERY_INTERVAL_S", 3600.0)
    posted = ray_event_channel.RayLog(handle)
    posted.flush()  # of nothing
    for step in range(3):
        posted.log(step, {"loss": 1.0})
        posted.flush()
        messages, _ = handle.mailbox.poll(0)
        assert [arguments[0] for _, arguments, _ in messages] == list(range(step + 1))
    posted.close()
    posted.flush()


def test_a_flush_asks_again_and_not_for_ever(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.runs import ray_event_channel

    handle.troubles = ["unheard", "late", "unheard"]
    posted = ray_event_channel.RayLog(handle)
    posted.log(0, {"loss": 1.0})
    posted.flush()
    assert len(handle.mailbox.poll(0)[0]) == 1
    monkeypatch.setattr(ray_event_channel, "FLUSH_TIMEOUT_S", 0.01)
    handle.troubles = ["unheard"] * 100_000  # more than there is time for
    posted.log(1, {"loss": 1.0})
    posted.flush()
    handle.troubles = []
    posted.close()
    assert len(handle.mailbox.poll(0)[0]) == 2


def test_the_death_of_the_mailbox_lets_rank_0_save_and_end(handle: Handle) -> None:
    from shoal.runs.ray_event_channel import RayLog

    handle.troubles = ["late", "dead"]
    posted = RayLog(handle)
    assert posted.stop_requested.wait(120)
    posted.close()


def test_the_driver_hears_everything_once_however_often_it_must_ask(
    fit: Any, handle: Handle, trainer: FakeTrainer
) -> None:
    said: list[Any] = [("log", (step, {}), {}) for step in range(6)]
    handle.troubles = ["unheard", "late"]
    handle.mailbox.deliver(0, said[:3])
    assert [fit.poll(0.001) for _ in range(3)] == [([], False), ([], False), (said[:3], False)]
    handle.mailbox.deliver(3, said[3:])
    handle.troubles = ["late"]
    trainer.let_go.set()
    assert heard(fit) == said[3:]  # what was said last, too
    assert fit.get_outcome() is ENDED


def test_an_attempt_that_the_death_of_the_mailbox_has_cut_short_is_lost(
    fit: Any, handle: Handle, trainer: FakeTrainer
) -> None:
    handle.troubles = ["dead"]
    assert fit.poll(0.001) == ([], False)  # its workers save and end before there is another attempt
    fit.stop()
    trainer.end = INTERRUPTED
    trainer.let_go.set()
    assert heard(fit) == []
    with pytest.raises(RankLost, match="the mailbox of the workers died"):
        fit.get_outcome()


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (ValueError("no GPUs found"), TrainError),
        (DistNetworkError("The server socket has failed to listen: EADDRINUSE"), RankLost),
        (ActorDiedError(), RankLost),
    ],
    ids=["its own", "a port", "a death"],
)
def test_what_workers_raise_while_they_start_would_recur(
    fit: Any, trainer: FakeTrainer, cause: Exception, kind: type[TrainError]
) -> None:
    is_raised = not isinstance(cause, ActorDiedError)
    failure = RayTaskError("start", f"{type(cause).__name__}: {cause}", cause).as_instanceof_cause()
    trainer.end = ControllerError(failure if is_raised else RankLost("a worker is gone"))
    trainer.let_go.set()
    heard(fit)
    with pytest.raises(TrainError, match=str(cause) if is_raised else "a worker is gone") as raised:
        fit.get_outcome()
    assert type(raised.value) is kind


def test_a_group_that_fails_while_it_starts_is_shut_down_and_a_death_there_is_a_loss() -> None:
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
    from ray.train.v2._internal.execution.controller import state

    from shoal.train.launch.ray_train import _StartGuard

    guard = _StartGuard()
    starting = state.SchedulingState(None)
    ended = []
    group = SimpleNamespace(has_started=lambda: True, shutdown=lambda: ended.append(True))
    guard.after_worker_group_start(group)
    guard.after_controller_state_update(starting, state.RunningState())
    assert ended == []
    late = ControllerError(WorkerGroupStartupTimeoutError(2))
    guard.after_controller_state_update(starting, state.ReschedulingState(late))  # for its places
    assert ended == [True]
    guard.after_worker_group_start(group)
    dead = ControllerError(WorkerGroupStartupFailedError("a worker has died"))
    with pytest.raises(RankLost, match="a worker has died"):
        guard.after_controller_state_update(starting, state.ReschedulingState(dead))
    assert ended == [True, True]


@pytest.mark.parametrize("error", [None, NotFinite("the loss", 7, None, None)], ids=["the outcome", "the error"])
def test_what_is_known_already_counts_more_than_the_death_of_the_mailbox(
    fit: Any, handle: Handle, trainer: FakeTrainer, error: NotFinite | None
) -> None:
    if error is not None:
        from ray.train import TrainingFailedError

        trainer.end = TrainingFailedError("a worker has raised")
        handle.mailbox.report_failure(error)
        fit.poll(0.001)
    handle.troubles = ["dead"]
    trainer.let_go.set()
    heard(fit)
    if error is None:
        assert fit.get_outcome() is ENDED
        return
    with pytest.raises(NotFinite) as raised:
        fit.get_outcome()
    assert raised.value is error


def test_the_mailbox_is_on_the_drivers_node(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from shoal.runs.ray_event_channel import start_mailbox

    asked: dict[str, Any] = {}
    here = "0a" * 28  # as many digits as Ray's have

    class Worker:
        @staticmethod
        def options(**options: Any) -> SimpleNamespace:
            asked.update(options)
            return SimpleNamespace(remote=lambda: "a handle")

    made: Callable[..., Any] = lambda **options: lambda cls: Worker  # noqa: E731 - as ray.remote is called
    monkeypatch.setattr(ray, "remote", made)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: here))
    assert start_mailbox() == "a handle"
    strategy = asked["scheduling_strategy"]
    assert isinstance(strategy, NodeAffinitySchedulingStrategy)
    assert (strategy.node_id, strategy.soft) == (here, False)
