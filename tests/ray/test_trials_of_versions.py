"""What the loop's flow makes of trials and probes, which the library `evaluation` plays. No cluster here."""

import re
import threading
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loop_flow import SNAPSHOT, attach_republishing, make_flow, make_stats, sent_nothing_valid
from rl_setting import EXPERIENCE
from shoal.client import Answer
from shoal.errors import ConnectionLost, InferenceError, ShoalError
from shoal.flows.actor_learner import LoopRun
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.evaluation import Evaluation, EvaluationSite
from shoal.libs.evaluation import episode_player
from shoal.libs.evaluation.connection import InferenceConnection
from shoal.libs.evaluation.episode_player import EpisodePlayer, evaluate_policies, hold_trial
from shoal.weights import WeightSnapshot


def make_player(flow: Any, url: str = "http://h") -> EpisodePlayer:
    return EpisodePlayer(EvaluationSite(flow.spec, flow.policies, url, "token"))


class FakeFlow(LoopRun):
    """The flow of one policy without a cluster; `outcome` is what playing brings, or what sampled actions bring."""

    def __init__(
        self,
        outcome: Evaluation | ShoalError,
        time_is_up: bool = False,
        sampled: Evaluation | None = None,
        **fields: object,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        recorder: Any = SimpleNamespace(record_event=lambda kind, **details: self.events.append((kind, details)))
        spec = ActorLearnerSpec.parse({"env": "CartPole-v1", "target_return": 475.0, **fields})
        super().__init__(spec, recorder, {"": (EXPERIENCE, np.zeros(4, np.float32))})
        self._evaluator = make_player(self)
        self._outcome = outcome
        self._is_up = time_is_up
        self._sampled = sampled
        self.tried = list[str]()

    def _hold_trial(self, action: str, snapshot: WeightSnapshot) -> Evaluation:
        self.tried.append(action)
        if isinstance(self._outcome, ShoalError):
            raise self._outcome
        return self._sampled if action == "sampled" and self._sampled else self._outcome

    def _time_is_up(self) -> bool:
        return self._is_up

    def passes(self) -> bool:
        return self._passes(SNAPSHOT)


def played(mean: float, *versions: int) -> Evaluation:
    return Evaluation([mean] * 20, 500, set(versions), 1.0)


def test_a_version_that_returns_the_target_passes() -> None:
    assert FakeFlow(played(480.0, 7)).passes()
    flow = FakeFlow(played(470.0, 7), action="best")
    assert not any(flow.passes() for _ in range(53))
    reasons = [details["reason"] for _, details in flow.events]
    assert "the nearest trial returned 470, and would pass target_return=470: lower it, or raise max_w" in reasons[2]
    assert reasons[3] == "version 7 returned 470"
    assert reasons[52] == reasons[2]


def test_a_version_that_reaches_the_target_by_sampled_actions_alone_passes_with_those() -> None:
    flow = FakeFlow(played(300.0, 7), sampled=played(480.0, 7))
    assert flow.passes()
    assert (flow.tried, flow._action) == (["best", "sampled"], "sampled")
    assert [(details["action"], details["passes"]) for _, details in flow.events] == [
        ("best", False),
        ("sampled", True),
    ]


def test_a_run_tries_no_other_actions_than_it_says() -> None:
    sampled = FakeFlow(played(300.0, 7), sampled=played(480.0, 7), action="sampled")
    assert sampled.passes()
    best = FakeFlow(played(300.0, 7), sampled=played(480.0, 7), action="best")
    assert not best.passes()
    assert (sampled.tried, best.tried) == (["sampled"], ["best"])


def test_without_a_target_the_better_actions_are_registered() -> None:
    for sampled, action in ((0.9, "sampled"), (0.3, "best")):
        flow = FakeFlow(played(0.66, 7), sampled=played(sampled, 7), target_return=None)
        assert flow.passes()
        assert flow._action == action


@pytest.mark.parametrize(("mean_return", "passes"), [(480.0, True), (470.0, False)])
def test_a_run_learns_on_while_the_endpoint_holds_the_version_of_a_trial(
    monkeypatch: pytest.MonkeyPatch, mean_return: float, passes: bool
) -> None:
    called: list[tuple[str, int]] = []
    has_polled = threading.Event()

    def call(name: str, snapshot: WeightSnapshot | None = None) -> WeightSnapshot:
        called.append((name, snapshot.version if snapshot else 0))
        return snapshot or SNAPSHOT

    def hold_trial(connections: object, spec: ActorLearnerSpec) -> Evaluation:
        assert has_polled.wait(60.0), "the run is polled during its trial"
        return played(mean_return, 7)

    events: list[tuple[str, dict[str, Any]]] = []
    recorder = SimpleNamespace(record_event=lambda kind, **details: events.append((kind, details)))
    flow = make_flow(ActorLearnerSpec.parse({"action": "best", "target_return": 475.0}), recorder)
    names = {"pause_learner": "pause", "resume_learner": "resume", "hold": "hold", "republish": "republish"}
    flow.policies[0]._workers = SimpleNamespace(**{name: partial(call, word) for name, word in names.items()})
    flow.policies[0].learner, flow.policies[0].gateway = {"updates": 9}, {"elapsed_s": 4.0, "steps": 80}
    flow._poll = lambda: (called.append(("poll", 0)), has_polled.set())
    monkeypatch.setattr(InferenceConnection, "infer", lambda *_: Answer({}, SNAPSHOT.version, "cartpole"))
    flow._evaluator = make_player(flow)
    monkeypatch.setattr(episode_player, "hold_trial", hold_trial)
    assert flow._try(flow.policies[0], SNAPSHOT) == passes
    assert flow.policies[0].played == {"return/trial": mean_return, "return/best_actions": mean_return}
    assert not flow.policies[0].may_be_tried, "the learner has to move on"
    done = [each for each in called if each[0] != "poll"]
    if passes:
        assert done == [("hold", 7), ("resume", 0), ("pause", 0), ("republish", 7), ("hold", 0)]
        assert events[1:] == [("solved", {"seconds": 4.0, "steps": 80, "action": "best"})], "not before it has passed"
    else:
        assert done == [("hold", 7), ("resume", 0), ("hold", 0)]
        assert [kind for kind, _ in events] == ["tried"]
    flow._evaluator.close()


def test_a_probe_of_best_actions_takes_a_twentieth_of_the_time_and_gives_way_to_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(episode_player, "time", SimpleNamespace(monotonic=lambda: clock.now))
    outcomes: list[object] = [played(300.0, 3), ConnectionLost("no replica"), None, played(480.0, 9)]
    begun = threading.Semaphore(0)

    def probe_policy(connections: Any, spec: ActorLearnerSpec) -> Evaluation:
        begun.release()
        clock.now += 2.0
        outcome = outcomes.pop(0)
        if outcome is None:  # until it is cancelled
            assert connections.wait(60.0)
            raise ConnectionLost("it was cancelled")
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Evaluation)
        return outcome

    monkeypatch.setattr(episode_player, "probe_policy", probe_policy)
    player = make_player(make_flow(ActorLearnerSpec(), SimpleNamespace()))
    monkeypatch.setattr(player, "_connect", lambda action, candidates, cancelled: nullcontext(cancelled))

    def probe() -> float | None:
        assert player.probe() is None
        assert player._probe is not None
        assert begun.acquire(timeout=60.0)
        wait([player._probe])
        return player.probe()

    assert probe() == 300.0
    clock.now += 19 * 2.0 - 0.1
    assert player.probe() is None
    assert player._probe is None, "not yet"
    clock.now += 0.1
    assert probe() is None  # it has failed
    clock.now += 19 * 2.0
    assert player.probe() is None
    assert begun.acquire(timeout=60.0)
    monkeypatch.setattr(episode_player, "hold_trial", lambda *_: played(400.0, 5))
    assert player.start_trial("best", SNAPSHOT).result(60.0).mean_return == 400.0
    assert player.probe() is None  # it was given up
    clock.now += 19 * 2.0
    assert probe() == 480.0
    player.close()


def test_a_run_that_is_stopped_while_its_trial_cannot_reach_the_endpoint_ends_the_trial_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_asked = threading.Event()

    def infer(connection: InferenceConnection, *inputs: object) -> Answer:
        has_asked.set()
        raise ConnectionLost("the endpoint did not answer")

    monkeypatch.setattr(InferenceConnection, "infer", infer)
    player = make_player(make_flow(ActorLearnerSpec(), SimpleNamespace()))
    trial = player.start_trial("best", SNAPSHOT)
    assert has_asked.wait(60.0)
    player.close()
    assert isinstance(trial.exception(10.0), ConnectionLost)


@pytest.mark.parametrize(("kept_return", "is_registered"), [(500.0, True), (9.0, False)])
def test_a_run_that_has_collapsed_registers_the_version_of_its_best_returns(
    monkeypatch: pytest.MonkeyPatch, kept_return: float, is_registered: bool
) -> None:
    flow = FakeFlow(played(9.0, 7), target_return=None, action="best")
    kept = WeightSnapshot.of(3, {"w": np.ones(1, np.float32)})
    published = attach_republishing(flow, SimpleNamespace(latest=lambda: kept))
    flow.policies[0].gateway = make_stats(mean_return=480.0, episodes=100)
    flow.policies[0].keep_best()
    monkeypatch.setattr(flow, "_hold_trial", lambda *_: played(kept_return if published else 9.0, 7))
    flow._candidates = [SNAPSHOT]
    assert flow._passes(SNAPSHOT)
    assert published == [3] if is_registered else [3, 7]
    assert flow._candidates[0].version == (3 if is_registered else 7)
    assert ("kept_version" in [kind for kind, _ in flow.events]) == is_registered


def test_a_run_registers_its_newest_version_if_the_one_of_its_best_returns_cannot_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = FakeFlow(played(9.0, 7), target_return=None, action="best")
    published = attach_republishing(flow)

    def hold(action: str, snapshot: WeightSnapshot) -> Evaluation:
        if published:
            raise ConnectionLost("the endpoint did not answer")
        return played(9.0, 7)

    flow.policies[0].retained = WeightSnapshot.of(3, {"w": np.ones(1, np.float32)})
    monkeypatch.setattr(flow, "_hold_trial", hold)
    flow._candidates = [SNAPSHOT]
    assert flow._passes(SNAPSHOT)
    assert published == [3, 7]
    assert flow._candidates == [SNAPSHOT]
    assert ("trial_failed", {"version": 3, "error": "the endpoint did not answer"}) in flow.events


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
    num_rows: list[int] = []

    def infer(connection: InferenceConnection, observations: np.ndarray, *_: object) -> Answer:
        num_rows.append(len(observations))
        return Answer({"action": np.zeros(len(observations), np.int64)}, SNAPSHOT.version, "cartpole")

    monkeypatch.setattr(InferenceConnection, "infer", infer)
    spec = ActorLearnerSpec(env="CartPole-v1", eval_episodes=5).override(["endpoint.model.max_batch_size=2"])
    with make_player(make_flow(spec, SimpleNamespace()))._connect("best") as connections:
        assert len(evaluate_policies(connections, spec)[""].returns) == 5
        assert len(hold_trial(connections, spec).returns) == 4  # two for each connection: hopeless
    assert max(num_rows) == 2


def test_a_run_whose_trials_did_not_pass_ends_with_what_the_last_one_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors' mean is above the target: without the trial the error would contradict itself."""
    noted: dict[str, dict[str, Any]] = {}
    flow = sent_nothing_valid(monkeypatch, lambda *said, **details: noted.update({str(said[0]): details}))
    flow._poll()
    flow.policies[0].gateway |= {"mean_return": 480.0, "steps": 9}
    flow._evaluator = make_player(flow)
    trial = Evaluation([400.0, 560.0] * 10, 1, {7}, 1.0)
    flow._hold_trial = lambda *_: trial
    assert not flow._passes(SNAPSHOT)
    assert flow.policies[0].compute_metrics(0)["return/trial"] == 480.0
    tried = (
        r"\(version 7 returned 480 over 20 episodes of a trial with action=sampled, and would miss 475 in others with"
        r" a probability of 0.41, where 0.001 is allowed\)"
    )
    assert 0.4 < noted["tried"]["miss_probability"] < 0.42
    assert (noted["tried"]["allowed"], noted["tried"]["target"], noted["tried"]["passes"]) == (0.001, 475.0, False)
    assert re.fullmatch(tried, f"({noted['tried']['reason']})")
    assert flow._has_missed_targets()
    assert re.match(rf"mean return 480 after 0 s, the target is 475.0 {tried}: .*eval_episodes", flow.missed)
