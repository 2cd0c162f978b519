"""What the loop's flow makes of trials and of workers that do not start. No cluster here."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_setting import EXPERIENCE
from shoal.errors import (
    ClusterError,
    ConnectionLost,
    InferenceError,
    RecordUnwritable,
    RunError,
    ShoalError,
    SpecMismatch,
)
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.policy_evaluation import ActionAnswer, Evaluation, evaluate, hold_trial
from shoal.weights import WeightSnapshot

SNAPSHOT = WeightSnapshot.of(7, {"w": np.zeros(1, np.float32)})


class FakeFlow:
    """What a trial needs of its flow; `outcome` is what playing brings."""

    def __init__(self, outcome: Evaluation | ShoalError, time_is_up: bool = False) -> None:
        from shoal.flows.actor_learner import _ActorLearnerRun

        self.spec = ActorLearnerSpec(env="CartPole-v1", target_return=475.0)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.recorder = SimpleNamespace(record_event=lambda kind, **details: self.events.append((kind, details)))
        self._outcome, self._is_up = outcome, time_is_up
        self._note = self.recorder.record_event
        self._was_not_tried = lambda *words: _ActorLearnerRun._was_not_tried(self, *words)  # type: ignore[arg-type]
        self.passes: Callable[[], bool] = lambda: _ActorLearnerRun._passes(self, SNAPSHOT)  # type: ignore[arg-type]

    def _play(self, snapshot: WeightSnapshot, play: Callable[..., Evaluation]) -> Evaluation:
        assert play is hold_trial
        if isinstance(self._outcome, ShoalError):
            raise self._outcome
        return self._outcome

    def _time_is_up(self) -> bool:
        return self._is_up


def played(mean: float, *versions: int) -> Evaluation:
    return Evaluation([mean] * 20, 500, set(versions), 1.0)


def test_a_version_that_returns_the_target_passes() -> None:
    assert FakeFlow(played(480.0, 7)).passes()
    assert not FakeFlow(played(470.0, 7)).passes()


def test_what_other_versions_answered_speaks_for_none() -> None:
    flow = FakeFlow(played(500.0, 7, 8))
    assert not flow.passes()
    assert flow.events == [("trial_failed", {"version": 7, "error": "versions [7, 8] answered"})]


@pytest.mark.parametrize("error", [ConnectionLost("the endpoint did not answer"), InferenceError(503, "no replica")])
def test_an_endpoint_that_is_away_for_a_while_costs_a_trial_and_not_the_run(error: ShoalError) -> None:
    flow = FakeFlow(error)
    assert not flow.passes()
    assert [kind for kind, _ in flow.events] == ["trial_failed"]
    with pytest.raises(type(error)):
        FakeFlow(error, time_is_up=True).passes()


def test_episodes_are_played_in_pieces_of_what_the_endpoint_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.flows import actor_learner

    num_rows: list[int] = []

    class Connection:
        def __init__(self, url: str, model: str, token: str, *, state_size: int) -> None:
            assert state_size == 0

        def insist(
            self, observations: np.ndarray, patience_s: float = 60.0, masks: np.ndarray | None = None
        ) -> ActionAnswer:
            num_rows.append(len(observations))
            return ActionAnswer({"action": np.zeros(len(observations), np.int64)}, SNAPSHOT.version)

        def close(self) -> None:
            pass

    monkeypatch.setattr(actor_learner, "InferenceConnection", Connection)
    spec = ActorLearnerSpec(env="CartPole-v1", eval_episodes=5).override(["endpoint.model.max_batch_size=2"])
    flow: Any = SimpleNamespace(
        spec=spec,
        token="",
        experience=EXPERIENCE,
        _endpoint=SimpleNamespace(url="http://h"),
        _first_observation=np.zeros(4, np.float32),
    )
    assert len(actor_learner._ActorLearnerRun._play(flow, SNAPSHOT, evaluate).returns) == 5
    assert (
        len(actor_learner._ActorLearnerRun._play(flow, SNAPSHOT, hold_trial).returns) == 4
    )  # two for each connection: hopeless
    assert max(num_rows) == 2


def test_a_run_that_is_stopped_while_it_starts_settles_before_ray_kills_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.flows import actor_learner

    clock = SimpleNamespace(now=0.0)

    def not_there(timeout_s: float) -> None:
        clock.now += timeout_s

    monkeypatch.setattr(actor_learner, "time", SimpleNamespace(monotonic=lambda: clock.now))
    workers = SimpleNamespace(
        finish_learner=lambda timeout_s: not_there(timeout_s + 0.2),
        close_gateway=lambda finished, timeout_s: not_there(timeout_s),
    )
    flow: Any = SimpleNamespace(_workers=workers, _endpoint=None, _addresses={})
    actor_learner._ActorLearnerRun.shut_down(flow)
    assert clock.now == actor_learner.SHUTDOWN_TIMEOUT_S < 15.0


def sent_nothing_valid(monkeypatch: pytest.MonkeyPatch, record: Callable[..., None]) -> Any:
    """The flow of a run whose actors send what is dropped; `record` stands for each word to the record."""
    from shoal.flows import actor_learner
    from shoal.flows.rl_metrics import ActorLearnerMetrics, HistorySampler

    monkeypatch.setattr(actor_learner, "record_changes", lambda *_: None)
    stats: dict[str, Any] = {
        "mean_return": float("nan"), "steps": 0, "episodes": 0, "weights_version": 1, "queue_depth": 0, "pid": 7,
        "counted_at": 1.0, "first_segment_at": None, "solved_s": None, "address": "tcp://h:1",
        "actors": [{"actor_id": "a", "connected": True, "lag": 0, "steps": 0, "invalid": {"non_finite": 7682}}],
        "segments": {"received": 7682, "consumed": 0, "queued": 0, "dropped": {"non_finite": 7682}},
    }  # fmt: skip
    flow: Any = object.__new__(actor_learner._ActorLearnerRun)
    flow.spec = ActorLearnerSpec(max_wall_s=1e-9)
    flow.recorder = SimpleNamespace(id="one", log=record, log_group=record, record_event=record, record_endpoint=record)
    flow._workers = SimpleNamespace(stats=lambda: (stats, {}), take_events=list, take_published=list)
    flow._endpoint = SimpleNamespace(stats=list)
    flow._addresses, flow._pids = {"gateway": ("gateway", "tcp://h:1")}, {}
    flow._gateway_stats, flow._learner_stats = {}, {}
    flow._learning_since, flow._printed_at, flow._tried_at, flow._solved = None, 0.0, 0, False
    flow._metrics, flow._history_sampler = ActorLearnerMetrics(), HistorySampler(0.0)
    flow._server_key, flow._replica_pids = "", set()
    return flow


def test_a_run_that_is_sent_nothing_valid_shows_what_is_dropped_and_ends_when_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[dict[str, float]] = []
    flow = sent_nothing_valid(monkeypatch, lambda *said, **_: logged.append(said[-1]))
    flow._poll()
    assert logged[0]["drops/non_finite"] == 7682
    assert logged[1] == {"a": 0.0}
    assert "| dropped 7,682" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"every segment was dropped \(non_finite 7,682\): mend the actors"):
        flow._require_reachable_target()


def test_a_run_whose_trials_did_not_pass_ends_with_what_the_last_one_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors' mean is above the target: without the trial the error would contradict itself."""
    noted: dict[str, dict[str, Any]] = {}
    flow = sent_nothing_valid(monkeypatch, lambda *said, **details: noted.update({str(said[0]): details}))
    flow._poll()
    flow._gateway_stats |= {"mean_return": 480.0, "steps": 9}
    trial = Evaluation([400.0, 560.0] * 10, 1, {7}, 1.0)
    flow._play = lambda *_: trial
    assert not flow._passes(SNAPSHOT)
    tried = (
        r"\(version 7 returned 480 over 20 episodes of a trial, and would miss 475 in others with a probability"
        r" of 0.41, where 0.001 is allowed\)"
    )
    assert 0.4 < noted["tried"]["miss_probability"] < 0.42
    assert (noted["tried"]["allowed"], noted["tried"]["target"], noted["tried"]["passes"]) == (0.001, 475.0, False)
    assert re.fullmatch(tried, f"({noted['tried']['reason']})")
    with pytest.raises(RunError, match=rf"mean return 480 after 0 s, the target is 475.0 {tried}: .*eval_episodes"):
        flow._require_reachable_target()


def test_a_record_that_cannot_be_written_for_now_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RecordUnwritable("the run record cannot be written: database or disk is full")

    flow = sent_nothing_valid(monkeypatch, full)
    flow._poll()
    flow._gateway_stats |= {"address": "tcp://h:2", "solved_s": 1.0, "solved_steps": 9}  # it comes back elsewhere
    flow._poll()
    assert not flow._trial_is_due()
    assert flow._addresses["gateway"] == ("gateway", "tcp://h:2")
    assert not flow._was_not_tried(SNAPSHOT, "no replica")


class FakeWorker:
    """Its methods' results stand for what Ray would fetch."""

    def __init__(self, result: object) -> None:
        self.stats = self.address = self.version = SimpleNamespace(remote=lambda: result)


def fake_get(result: object, timeout: float) -> object:
    if isinstance(result, list):
        result = result.pop(0)
    if isinstance(result, Exception):
        raise result
    return result


def workers(monkeypatch: pytest.MonkeyPatch, learner: object, gateway: object) -> Any:
    import ray

    from shoal.rl.ray_workers import ActorLearnerWorkers

    monkeypatch.setattr(ray, "get", fake_get)
    made: Any = object.__new__(ActorLearnerWorkers)
    made._learner, made._gateway = FakeWorker(learner), FakeWorker(gateway)
    return made


def test_why_the_learner_did_not_start_is_said_and_not_what_followed_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

    mismatch = SpecMismatch("hidden", [128], "does not fit the checkpoint of this run")
    traceback = f"ray::LearnerWorker.__init__()\n  File ...\nshoal.errors.SpecMismatch: {mismatch}"
    died = ActorDiedError(RayTaskError("LearnerWorker.__init__", traceback, mismatch, "", 1, ""))
    with pytest.raises(ClusterError, match=r"^the learner did not start: \S*SpecMismatch: hidden = \[128\]"):
        workers(monkeypatch, died, "tcp://here").wait_for_gateway()
    with pytest.raises(ClusterError, match="the gateway did not start in time"):
        workers(monkeypatch, {}, GetTimeoutError("later")).wait_for_gateway()
    assert workers(monkeypatch, {}, "tcp://here").wait_for_gateway() == "tcp://here"


def test_a_store_that_is_on_its_way_back_is_asked_again_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ActorUnavailableError

    from shoal import ray_call
    from shoal.weights import ray_weight_store

    monkeypatch.setattr(ray, "get", fake_get)
    monkeypatch.setattr(ray_call, "RETRY_S", 0.0)
    away = ActorUnavailableError("restarting", b"x" * 16)
    assert ray_weight_store.get_stored_version(FakeWorker([away, away, 5])) == 5  # type: ignore[arg-type]
    assert ray_weight_store.get_stored_version(FakeWorker(away), timeout_s=0.0) == 0  # type: ignore[arg-type]


def test_whatever_keeps_the_store_from_answering_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ObjectStoreFullError

    from shoal.weights import ray_weight_store

    monkeypatch.setattr(ray, "get", fake_get)
    with pytest.raises(ConnectionLost, match="did not answer"):
        ray_weight_store._call(FakeWorker(ObjectStoreFullError("full")).version)
