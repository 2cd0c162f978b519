"""The flow of a training run: what it tries again and what not, how it stops, what it writes down. No cluster here."""

from __future__ import annotations

import dataclasses
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import shoal.runs
from fake_cluster import FakeEntries, FakeRequest, replace_cluster
from shoal.cluster import admission as run_admission
from shoal.cluster.admission import RunAdmission
from shoal.cluster.growth import Growth, NodeType
from shoal.errors import (
    ClusterError,
    DataError,
    NoCapacity,
    NotFinite,
    PlanError,
    RankLost,
    RunError,
    TrainError,
)
from shoal.home import home
from shoal.registry import Registry
from shoal.runs import Run, Status
from shoal.runs.event_messages import describe_wait
from shoal.train.launch.predicted_cost import predict_cost_details
from shoal.train.launch.ray_task import change_to_task_folder
from shoal.train.launch.validate import validate_task
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.weights import WeightSnapshot

TASK = Path(__file__).parents[1] / "train_task.py"
Said = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


def logged(step: int) -> Said:
    return [("log", (step, {"train/step": float(step), "train/loss": 1.0 / step}), {})]


class FakeFit:
    """Fulfils what the flow asks of a Fit: says one thing at each poll, and ends as it was told to.

    Of each attempt, `script` has what rank 0 says, and the Outcome or the error with which it ends.
    """

    script: list[tuple[list[Said], TrainResult | Exception]]
    made: list[FakeFit]
    on_poll: Callable[[], None]

    def __init__(self, setting: Any) -> None:
        self.setting = setting
        self.was_stopped = False
        self.was_closed = False
        self.refusal = ""
        said, self._end = self.script[len(self.made)]
        self._said = list(said)
        self.made.append(self)

    def poll(self, timeout_s: float) -> tuple[Said, bool]:
        self.on_poll()
        said = self._said.pop(0) if self._said else []
        return said, not self._said

    def stop(self) -> None:
        self.was_stopped = True

    def abort(self, why: str) -> None:
        self.refusal, self._said = why, self._said[-2:]

    def get_outcome(self) -> TrainResult:
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    def close(self) -> None:
        self.was_closed = True


class FakeGroup:
    """Fulfils what the flow asks of a Group: is in one of these states at each look, then in the last."""

    states: tuple[str, ...] = ()

    def get_state(self) -> str:
        if len(self.states) > 1:
            type(self).states, state = self.states[1:], self.states[0]
            return state
        return self.states[0] if self.states else "CREATED"


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeFit]:
    import ray

    made = type("Fit", (FakeFit,), {"script": [], "made": [], "on_poll": staticmethod(lambda: None)})
    monkeypatch.setattr("shoal.train.launch.ray_train.RayTrainAttempt", made)
    monkeypatch.setattr("shoal.flows.training.WorkerPlacement", FakeGroup)
    monkeypatch.setattr("shoal.flows.training.check_on_worker", lambda spec, *_: validate_task(spec))
    monkeypatch.setattr("shoal.flows.training.predict_on_worker", predict_cost_details)
    monkeypatch.setattr(FakeGroup, "states", ())
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 4.0})
    replace_cluster(monkeypatch)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return made


def spec_of(**changes: Any) -> TrainSpec:
    base = {"task": f"{TASK}:Toy", "batch_size": 32, "stop": {"steps": 9}, "workers": 2, "name": "toy-flow"}
    return TrainSpec.parse({**base, **changes})


def ended(tmp_path: Path) -> TrainResult:
    import numpy as np

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(WeightSnapshot.of(1, {"0.weight": np.zeros((1, 1), np.float32)}).payload)
    return TrainResult("r", "steps", "9 steps", 9, 9, 1.0, {"loss": 0.5}, weights)


def run(spec: TrainSpec) -> Run:
    from shoal.flows.training import run_training

    return shoal.runs.load(run_training(spec, "train"))


def test_lost_workers_are_replaced_as_long_as_there_is_progress(fit: type[FakeFit], tmp_path: Path) -> None:
    lost = RankLost("a worker died")
    # After every loss a step more was done, but for two in a row: never three without progress.
    fit.script = [([logged(1)], lost), ([logged(2)], lost), ([], lost), ([logged(3)], lost), ([], lost), ([], lost)]
    fit.script[-1] = ([logged(4)], ended(tmp_path))
    found = run(spec_of())
    assert found.status is Status.FINISHED
    assert found.events()["kind"].tolist().count("workers_lost") == 5
    assert all(each.was_closed for each in fit.made)
    assert found.metrics()["train/loss"].tolist() == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert Registry().get("toy-flow@champion").manifest.run_id == found.id
    assert (found.folder / "report.html").exists()


def test_attempts_of_replicas_that_have_progressed_may_be_more_than_three(
    fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = iter(range(1, 6))

    def fit_replicas(spec: TrainSpec, run_id: str, folder: Path, log: Any, *_: object, **__: object) -> TrainResult:
        log.log(step := next(steps), {"train/loss": 1.0 / step})
        if step < 5:
            raise RankLost("a server died with its disk")
        return ended(tmp_path)

    monkeypatch.setattr("shoal.flows.training.find_launcher", lambda _: fit_replicas)
    found = run(spec_of(sync={"kind": "parameter_server"}))
    lost = found.events().query("kind == 'workers_lost'")["details"]
    assert [each["step"] for each in lost] == [1, 2, 3, 4]


def test_lost_workers_are_not_replaced_for_ever(fit: type[FakeFit]) -> None:
    from shoal.train.launch.training_run import ATTEMPTS_WITHOUT_PROGRESS

    fit.script = [([logged(5)], RankLost("first"))] + [([logged(4)], RankLost(f"again {n}")) for n in range(10)]
    with pytest.raises(RankLost, match="again 1"):
        run(spec_of())
    assert len(fit.made) == ATTEMPTS_WITHOUT_PROGRESS
    found = shoal.runs.load("latest")
    assert (found.status, found.error) == (Status.FAILED, "RankLost: again 1")


@pytest.mark.parametrize(
    "error",
    [
        TrainError("Traceback ...\nValueError: a fault of the user's own"),
        NotFinite("the loss", 7, [1, 2], "step-000000006"),
        DataError("data", "mine.h5", "is truncated", "copy it again"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_happen_again_is_not_tried_again(fit: type[FakeFit], error: Exception) -> None:
    fit.script = [([logged(1)], error)]
    with pytest.raises(type(error)) as raised:
        run(spec_of())
    assert raised.value is error
    assert len(fit.made) == 1
    found = shoal.runs.load("latest")
    assert (found.status, found.error) == (Status.FAILED, f"{type(error).__name__}: {error}")


def test_workers_that_are_lost_for_the_same_reason_before_the_first_step_are_started_twice(
    fit: type[FakeFit], tmp_path: Path
) -> None:
    fit.script = [([], RankLost(f"a worker died: process {number} on 10.0.0.{number} is gone")) for number in (17, 234)]
    with pytest.raises(RankLost, match="process 234 on"):
        run(spec_of())
    assert len(fit.made) == 2
    fit.made.clear()
    fit.script = [([], RankLost("first")), ([], RankLost("second")), ([logged(1)], ended(tmp_path))]
    assert run(spec_of()).status is Status.FINISHED


def test_an_interruption_lets_the_workers_save(fit: type[FakeFit]) -> None:
    polls = iter(range(100))

    def interrupt() -> None:
        if next(polls) == 1:
            signal.raise_signal(signal.SIGTERM)

    fit.on_poll = staticmethod(interrupt)
    stopped = TrainResult("r", "interrupted", "interrupted at step 3", 3, 3, 1.0)
    fit.script = [([logged(1), logged(2), logged(3)], stopped)]
    with pytest.raises(KeyboardInterrupt):
        run(spec_of())
    assert fit.made[0].was_stopped
    found = shoal.runs.load("latest")
    assert found.status is Status.STOPPED
    assert found.latest()["train/step"] == 3  # what was said on the way out is in the record
    assert found.models().empty


def test_workers_that_do_not_end_are_left(fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.flows import training

    monkeypatch.setattr(training, "STOP_TIMEOUT_S", 0.0)
    polls = iter(range(100))

    def interrupt() -> None:
        if next(polls) == 0:
            signal.raise_signal(signal.SIGINT)

    fit.on_poll = staticmethod(interrupt)
    fit.script = [([[]] * 50, RankLost("never asked"))]
    with pytest.raises(KeyboardInterrupt):
        run(spec_of())
    assert fit.made[0].was_closed
    assert shoal.runs.load("latest").status is Status.STOPPED


def test_workers_that_die_while_they_save_are_not_replaced(fit: type[FakeFit]) -> None:
    fit.on_poll = staticmethod(lambda: signal.raise_signal(signal.SIGINT))
    fit.script = [([logged(1)], RankLost("a worker died"))]
    with pytest.raises(KeyboardInterrupt):
        run(spec_of())
    assert len(fit.made) == 1
    assert shoal.runs.load("latest").status is Status.STOPPED


def test_a_resumed_run_is_the_same_run(fit: type[FakeFit], tmp_path: Path) -> None:
    from shoal.train.launch.overrides import spec_from_overrides

    fit.script = [([logged(1)], NotFinite("the loss", 7, None, None)), ([logged(8)], ended(tmp_path))]
    with pytest.raises(NotFinite):
        run(spec_of())
    first = shoal.runs.load("latest")
    again = run(spec_from_overrides([f"resume={first.id}", "clip_norm=1.0"]))
    assert (again.id, again.status, again.incarnation) == (first.id, Status.FINISHED, 2)
    assert fit.made[1].setting.folder == fit.made[0].setting.folder
    assert (fit.made[1].setting.spec.clip_norm, fit.made[1].setting.spec.batch_size) == (1.0, 32)


def test_a_run_that_another_process_has_resumed_is_left_to_it(
    fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.flows import training

    monkeypatch.setattr(training, "HEARTBEAT_S", 0.0)
    polls = iter(range(100))

    def take_over() -> None:
        if next(polls) == 1:
            with closing(sqlite3.connect(home() / "runs.sqlite")) as connection, connection:
                connection.execute("UPDATE runs SET incarnation = incarnation + 1")

    fit.on_poll = staticmethod(take_over)
    fit.script = [([[]] * 50, RankLost("never asked"))]
    with pytest.raises(RunError, match="was resumed by another process"):
        run(spec_of())
    assert next(polls) == 4  # until the workers had ended
    assert "was resumed by another process" in fit.made[0].refusal
    assert fit.made[0].was_closed


def test_more_workers_than_the_cluster_has(fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    with pytest.raises(PlanError) as raised:
        run(spec_of(workers=8, parallel="ddp"))
    assert (raised.value.field, raised.value.value) == ("workers", 8)
    assert (raised.value.problem, raised.value.remedy) == (
        "the cluster has 4 CPUs",
        "use workers=4, or a larger cluster",
    )
    with pytest.raises(PlanError, match="start a cluster with GPUs"):
        run(spec_of(device="cuda"))
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    with pytest.raises(ClusterError, match="1 of 4 CPUs free"):
        run(spec_of(wait=0))
    assert not fit.made


@pytest.mark.parametrize("known", ["what is known", None])
def test_a_job_leaves_its_task_to_a_worker_unless_all_is_known(
    monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    from shoal.flows import training

    spec, validated = spec_of(), list[TrainSpec]()
    ran: list[tuple[object, ...]] = []

    def as_job(given: Any, run: Any, job: str, check: Any, *arguments: Any, **more: Any) -> None:
        check(spec)
        run(spec, job)

    monkeypatch.setattr(training, "job_main", as_job)
    monkeypatch.setattr(training, "find_check", lambda spec: known)
    monkeypatch.setattr(training, "validate_spec", validated.append)
    monkeypatch.setattr(training, "run_training", lambda *given: ran.append(given) or "run")
    training.train_main()
    assert validated == ([] if known else [spec])
    assert ran == [(spec, "train", known)]


def test_a_place_that_becomes_free_is_waited_for(fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from shoal.train.launch.ray_capacity import require_capacity

    recorded: list[object] = []
    free = iter([{"CPU": 1.0}, {}])
    monkeypatch.setattr(ray, "available_resources", lambda: next(free, {"CPU": 2.0}))
    require_capacity(spec_of(), recorded.append, RunAdmission("waits"))
    assert next(free, None) is None
    assert not recorded, "a run that has just ended is worth no event"


def test_a_busy_cluster_is_waited_for_and_the_run_says_so(
    fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    free = iter([{"CPU": 1.0}] * 3)
    monkeypatch.setattr(ray, "available_resources", lambda: next(free, {"CPU": 4.0}))
    monkeypatch.setattr(run_admission, "QUIET_S", 0.0)
    begun = [("record_event", ("training",), {"step": 0})]
    fit.script = [([begun, logged(1)], ended(tmp_path))]
    found = run(spec_of(wait="30m", priority=3))
    first, last = [details for kind, details in found.list_events("waiting")]
    reason = "2 workers need a CPU each: 1 of 4 CPUs free; other work has 3 CPU"
    assert first["reason"], first["wait_s"] == (reason, 1800.0)
    assert (first["position"], first["priority"], first["needs"]) == (1, 3, {"CPU": 2.0})
    assert last == {"reason": "", "wait_s": 1800.0}
    assert describe_wait({"waiting": first}) == f"{reason} (up to 30 min)"
    assert not describe_wait(found.last_events())
    assert [each.state for each in FakeEntries.seen] == ["waiting", "starting", "running"]
    assert not FakeEntries.present, "a run that has ended is in no queue"


def test_workers_that_the_autoscaler_may_add_nodes_for_are_waited_for(
    fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_cluster(monkeypatch, Growth({"CPU": 4.0}, (NodeType("big", {"CPU": 4.0}, 2),)))
    fit.script = [([logged(1)], ended(tmp_path))]
    monkeypatch.setattr(FakeRequest, "answers", [False, True])
    assert run(spec_of(workers=8)).status is Status.FINISHED
    with pytest.raises(
        NoCapacity, match="8 workers need a CPU each, and has waited 0 s: no nodes came; 4 of 4 CPUs free"
    ):
        run(spec_of(workers=8, wait="0s"))
    assert FakeRequest.asked == [[{"CPU": 1.0}] * 8] * 2
    with pytest.raises(
        PlanError, match=r"the cluster has 4 CPUs, and its autoscaler may add no more than 2 big \(4 CPU\)"
    ):
        run(spec_of(workers=16, batch_size=32))


def _lose_hosts(fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first group is lost, the cluster is smaller."""
    import ray

    fit.script = [([logged(1)], RankLost("its host"))]
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0 if len(fit.made) == 2 else 4.0})


def _take_room(fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch) -> None:
    """One place is free once the workers are to begin. Ray Train makes the group anew each minute: between, none."""
    import ray

    from shoal.flows import training

    told_at_once = dataclasses.replace(training.OCCUPIED_CAPACITY, report_after_s=0.0)
    monkeypatch.setattr(training, "OCCUPIED_CAPACITY", told_at_once)
    monkeypatch.setattr(FakeGroup, "states", ("", "PENDING", "PENDING", "", "PENDING", "CREATED"))
    free = iter([{"CPU": 4.0}] * 2)  # it looks again when it has taken them
    monkeypatch.setattr(ray, "available_resources", lambda: next(free, {"CPU": 1.0}))


@pytest.mark.parametrize(
    ("prepare", "kind", "remedy"),
    [
        (_lose_hosts, "hosts_missing", r"on the hosts that are left: go on with resume=.* workers=1"),
        (_take_room, "room_taken", r"beside what runs: go on with resume=.* that has ended.* workers=1"),
    ],
)
@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_group_without_room_is_told_of_once_and_given_up_in_time(
    fit: type[FakeFit],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prepare: Callable[..., None],
    kind: str,
    remedy: str,
    is_given_up: bool,
) -> None:
    monkeypatch.setattr("shoal.flows.training.HEARTBEAT_S", 0.0)
    prepare(fit, monkeypatch)
    if is_given_up:
        monkeypatch.setattr("shoal.flows.training.SHORTAGE_TIMEOUT_S", 0.0)
        fit.script.append(([[]] * 6, RankLost("never asked")))
        with pytest.raises(ClusterError, match=f"2 workers have no room {remedy}"):
            run(spec_of())
        assert all(each.was_closed for each in fit.made)
        return
    fit.script.append(([*[[]] * 6, logged(2), []], ended(tmp_path)))
    found = run(spec_of())
    assert found.events()["kind"].tolist().count(kind) == 1
    assert found.last_events()[kind] | {"wait_s": 0} == {"workers": 2, "fit": 1, "wait_s": 0}


def test_workers_get_gpus_where_there_are_enough(fit: type[FakeFit], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from shoal.train.launch.ray_capacity import resolve_device

    assert resolve_device(spec_of()).device == "cpu"
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    assert resolve_device(spec_of()).device == "cuda"
    assert resolve_device(spec_of(workers=4)).device == "cpu"
    assert resolve_device(spec_of(device="cpu")).device == "cpu"


def test_the_files_of_a_recipe_are_in_the_drivers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker").mkdir()
    monkeypatch.chdir(tmp_path / "worker")  # as Ray Train does
    monkeypatch.setattr(sys, "path", [])
    change_to_task_folder("table", tmp_path)
    assert Path.cwd() == tmp_path
    change_to_task_folder("table", tmp_path / "of another host")
    assert Path.cwd() == tmp_path
