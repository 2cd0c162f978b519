"""What the loop's flow makes of its workers' counts, and of workers that do not start. No cluster here."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_cluster import FakeRequest, replace_cluster
from loop_flow import SNAPSHOT, attach_republishing, attach_workers, make_flow, make_stats, sent_nothing_valid
from shoal.cluster import admission as run_admission
from shoal.cluster.admission import RunAdmission
from shoal.cluster.growth import Growth, NodeType
from shoal.errors import ClusterError, ConnectionLost, NoCapacity, RecordUnwritable, RunError, SpecMismatch
from shoal.flows import actor_learner, loop_policy
from shoal.flows.actor_learner import LoopRun
from shoal.flows.actor_learner_spec import ActorLearnerSpec, PoliciesSpec
from shoal.serve.on_ray.ownership import EndpointOwnership
from shoal.weights import WeightSnapshot


@pytest.mark.parametrize(
    ("mean_return", "solved_s", "best", "updates", "may"),
    [
        (480.0, 1.0, None, 200, True),
        (480.0, None, None, 200, False),  # of fewer than 100 episodes
        (300.0, None, 480.0, 200, True),  # as it explores
        (300.0, 1.0, 470.0, 200, False),
        (480.0, 1.0, 480.0, 199, False),
    ],
)
def test_a_version_may_be_tried_at_the_target_of_its_actors_or_of_best_actions(
    mean_return: float, solved_s: float | None, best: float | None, updates: int, may: bool
) -> None:
    (policy,) = make_flow(ActorLearnerSpec(), SimpleNamespace()).policies
    policy.gateway = {"mean_return": mean_return, "episodes": 100}
    policy.solved_s = solved_s
    policy.tried_at = 0
    policy.learner = {"updates": updates}
    policy.played = {} if best is None else {"return/best_actions": best}
    assert policy.may_be_tried == may
    assert policy.may_be_probed
    policy.gateway["episodes"] = 99
    assert not policy.may_be_probed


def test_a_run_that_is_stopped_while_it_starts_settles_before_ray_kills_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)

    def not_there(timeout_s: float) -> None:
        clock.now += timeout_s

    for module in (actor_learner, loop_policy):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    flow = make_flow(ActorLearnerSpec(), SimpleNamespace())
    flow.policies[0]._workers = SimpleNamespace(
        finish_learner=lambda timeout_s: not_there(timeout_s + 0.2),
        close_gateway=lambda timeout_s: not_there(timeout_s),
    )
    flow.shut_down()
    assert clock.now == actor_learner.SHUTDOWN_TIMEOUT_S < 15.0


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
        flow._has_missed_targets()
    flow.policies[0].spec = flow.spec.update({"target_return": None})
    with pytest.raises(RunError, match="nothing to learn from"):
        flow._is_done()  # there would be nothing to register


@pytest.mark.parametrize(
    ("env", "lacks"),
    [
        ({"observation": [4], "action": 2}, "the run has no environment to play"),
        ("CartPole-v1", "no library that plays episodes is installed"),
    ],
)
def test_a_run_that_cannot_be_evaluated_registers_the_version_of_its_actors_best_returns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], env: object, lacks: str
) -> None:
    monkeypatch.setattr(actor_learner, "record_changes", lambda *_: None)
    spec = ActorLearnerSpec.parse({"env": env})
    nothing: Any = lambda *_, **__: None  # noqa: E731
    recorder = SimpleNamespace(
        id="one", log=nothing, log_group=nothing, record_event=nothing, record_endpoint=nothing, record_model=nothing
    )
    flow = make_flow(spec, recorder)
    attach_workers(flow, {"": make_stats(steps=64, mean_return=480.0, solved_s=1.0, solved_steps=60)})
    flow._announce_gateways = nothing
    policy = flow.policies[0]
    policy.store_address = lambda: "tcp://h:1"
    policy.retained = best = WeightSnapshot(5, SNAPSHOT.payload, SNAPSHOT.sha256, 0.0)
    policy._retained_return = 490.0
    policy.workers.republish = lambda each: each
    flow.learn()
    assert flow._candidates == [best]
    model = SimpleNamespace(ref="game@1", name="game", version=1, aliases=["champion"], decision="")
    policy.register = lambda snapshot, recorder, action: model
    flow.finish()
    LoopRun._announce_gateways(flow)
    said = capsys.readouterr().out
    assert f"game@1 (champion): not evaluated, for {lacks}\n" in said
    assert ("run one: games join at tcp://h:1\n" in said) == bool(spec.given)


def test_a_run_that_is_stopped_registers_what_it_has_learnt_and_champion_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = sent_nothing_valid(monkeypatch, lambda *_, **__: None)
    flow.recorder.record_model = lambda *_: None
    policy, registered = flow.policies[0], list[int]()
    policy._workers.make_weight_source = lambda: SimpleNamespace(latest=lambda: SNAPSHOT)

    def register(spec: ActorLearnerSpec, experience: object, snapshot: WeightSnapshot, *_: object) -> Any:
        assert spec.aliases == ()
        registered.append(snapshot.version)
        return SimpleNamespace(ref="cartpole@2", name="cartpole", version=2, aliases=(), decision="")

    monkeypatch.setattr(loop_policy, "register_policy", register)
    policy.learner = {"updates": 9}
    policy.register_learnt(flow.recorder)
    assert registered == [], "no episode has ended"
    policy.gateway = make_stats(mean_return=90.0, episodes=100)
    policy.register_learnt(flow.recorder)
    policy.register_learnt(flow.recorder)  # as of one that is stopped while its version is evaluated
    assert registered == [7]
    assert "registered cartpole@2, as it was stopped" in capsys.readouterr().out
    policy._is_registered, policy._retained_return = False, 200.0
    policy.retained = WeightSnapshot.of(3, {"w": np.ones(1, np.float32)})
    policy.register_learnt(flow.recorder)
    assert registered == [7, 3], "the one of its best returns"


def test_a_record_that_cannot_be_written_for_now_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RecordUnwritable("the run record cannot be written: database or disk is full")

    flow = sent_nothing_valid(monkeypatch, full)
    flow._poll()
    flow.policies[0].workers.stats()[0].update(address="tcp://h:2", solved_s=1.0, solved_steps=9)  # it is elsewhere now
    flow._poll()
    assert not flow._is_done()
    assert flow._addresses["gateway"] == ("gateway", "tcp://h:2")
    assert not flow._was_not_tried(SNAPSHOT, "no replica")


def test_learners_and_replicas_wait_for_nodes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    replace_cluster(monkeypatch, Growth({"CPU": 3.0}, (NodeType("small", {"CPU": 2.0}, 1),)))
    abandoned: dict[str, str] = {}
    monkeypatch.setattr(loop_policy, "list_driver_endpoints", lambda: EndpointOwnership(abandoned=abandoned))
    monkeypatch.setattr(loop_policy, "gpus_by_host", lambda: [0.0])
    monkeypatch.setattr("shoal.cluster.capacity.find_growth", run_admission.find_growth)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": 3.0})
    spec = ActorLearnerSpec.parse({"learner": {"num_cpus": 2}, "endpoint": {"num_cpus": 0.5, "wait": "2m"}})
    admission = RunAdmission("loop")

    def require(spec: ActorLearnerSpec) -> None:
        flow = make_flow(spec, SimpleNamespace(record_event=lambda *_, **__: None))
        loop_policy.require_capacity(flow.policies, spec, admission, flow._note)

    require(spec)
    assert FakeRequest.asked == [], "there is room for them"
    larger = spec.update({"endpoint": {"num_replicas": 3}})
    monkeypatch.setattr(FakeRequest, "answers", [True, False])
    require(larger)
    assert FakeRequest.asked == [[{"CPU": 2.0}, *[{"CPU": 0.5}] * 3]]
    with pytest.raises(NoCapacity, match=r"learners and replicas need 3.5 CPU, and has waited 0 s"):
        require(larger.update({"wait": 0}))
    abandoned["old"] = "controller"
    require(larger.update({"wait": 0}))
    assert len(FakeRequest.asked) == 2, "what the endpoint of a dead driver has becomes free"


def make_policies_flow(monkeypatch: pytest.MonkeyPatch, **stats: dict[str, Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    """The flow of a run of two policies, one of which has a target; and what it records."""
    recorded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(actor_learner, "record_changes", lambda *_: None)

    def record(*said: Any, **details: Any) -> None:
        recorded.append((*said, details))

    spec = PoliciesSpec.parse(
        {
            "env": "shoal.libs.games.tag:Tag",
            "max_wall_s": 1e-9,
            "policies": {"hunters": {"agents": ["left"], "target_return": 2.0}, "prey": {"agents": ["prey"]}},
        }
    )
    recorder = SimpleNamespace(id="one", log=record, log_group=record, record_event=record, record_endpoint=record)
    flow = make_flow(spec, recorder)
    attach_workers(flow, stats)
    return flow, recorded


def test_the_record_of_a_run_that_has_failed_says_what_became_of_the_queued_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = {"received": 60, "consumed": 12, "queued": 48, "dropped": {}}
    before = make_stats(steps=600, queue_depth=40, segments=queued)
    flow, recorded = make_policies_flow(monkeypatch, hunters=before, prey={**before, "address": "tcp://h:2"})
    flow._poll()
    gone = {"received": 60, "consumed": 12, "queued": 0, "dropped": {"learner_crash": 8, "shutdown": 40}}
    for each in flow.policies:
        each._workers.finish_learner = lambda timeout_s: False
        each._workers.close_gateway = lambda timeout_s: {**before, "queue_depth": 0, "segments": gone}
    flow.shut_down()
    assert ("accounting", {"policy": "prey", **gone}) in recorded
    [*_, metrics] = [each[1] for each in recorded if each[0] == 1202]
    assert (metrics["segments/queued"], metrics["queue/depth"], metrics["drops/shutdown"]) == (0, 0, 80)


def test_several_policies_are_followed_as_one_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_stats(steps=64, mean_return=1.5, solved_s=3.0, solved_steps=32, opponents={4: {"win_rate": 0.75}})
    good["opponents"][4]["mean_return"] = 1.0
    flow, recorded = make_policies_flow(
        monkeypatch, hunters=good, prey={**good, "address": "tcp://h:2", "opponents": {}}
    )
    flow._follow_until_done()
    assert capsys.readouterr().out.count("mean return hunters 1.5, prey 1.5 |       128 steps") == 1
    metrics = next(each[1] for each in recorded if each[0] == 128)
    assert (metrics["steps/total"], metrics["return/prey"], metrics["hunters/self_play/win_rate_min"]) == (
        128,
        1.5,
        0.75,
    )
    assert (128, "win_rate", {"hunters 4": 0.75}, {}) in recorded
    assert ("solved", {"seconds": 3.0, "steps": 64}) in recorded
    good["pid"] = 8
    flow._poll()
    assert ("gateway_restarted", {"policy": "hunters", "pid": 8, "damaged_checkpoints": []}) in recorded
    flow.learn()  # several policies have no trial
    assert flow._candidates == [SNAPSHOT, SNAPSHOT]


def test_several_policies_whose_time_is_up_miss_their_targets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    some = make_stats(steps=64, mean_return=1.5)
    flow, _ = make_policies_flow(monkeypatch, hunters=some, prey=some)
    flow.policies[0].retained = best = WeightSnapshot(5, SNAPSHOT.payload, SNAPSHOT.sha256, 0.0)
    flow.policies[0]._retained_return = 1.9
    flow.policies[0].workers.republish = lambda each: each
    flow.learn()
    assert "hunters 1.5, prey 1.5 after 0 s, the target is hunters 2.0: lower policies" in flow.missed
    assert flow._candidates == [best, SNAPSHOT]  # of each the best
    flow, _ = make_policies_flow(monkeypatch, hunters=some, prey=make_stats())
    with pytest.raises(RunError, match=r"prey has nothing to learn from .* \(non_finite"):
        flow._follow_until_done()


def test_a_learner_that_fails_as_the_last_target_is_reached_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = make_stats(steps=64, mean_return=2.5, solved_s=3.0, solved_steps=32)
    flow, recorded = make_policies_flow(monkeypatch, hunters=solved, prey=solved)
    flow.policies[1]._workers.stats = lambda: (solved, {"failure": "NonFiniteLoss: lower it", "pid": 7})
    with pytest.raises(RunError, match="the learner of prey failed: NonFiniteLoss: lower it"):
        flow._follow_until_done()
    assert "solved" not in [each[0] for each in recorded]


class FakeWorker:
    """Its methods' results stand for what Ray would fetch."""

    def __init__(self, result: object) -> None:
        self.stats = self.addresses = self.version = SimpleNamespace(remote=lambda: result)


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
    made._learner = FakeWorker(learner)
    made._gateways = [FakeWorker(gateway)]
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
    here = {"address": "tcp://here"}
    assert workers(monkeypatch, {}, here).wait_for_gateway() == here


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


def test_games_are_told_one_address_with_a_path_for_each_policy_also_when_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = make_stats(websocket_address="ws://h:8765", pid=7)
    prey = make_stats(websocket_address="ws://h:1", bound_websocket="ws://bound:1")
    flow, recorded = make_policies_flow(monkeypatch, hunters=stats, prey=prey)
    relayed = list[dict[str, str]]()
    flow.policies[0]._workers.relay_websockets = relayed.append
    flow._poll()
    address = "ws://h:8765/hunters,ws://h:8765/prey"
    assert ("websocket", "websocket", address, "ready", {}) in recorded
    assert [each[-1]["websocket"] for each in recorded if each[0] == "gateway_ready"] == [address]
    assert "\n    ws://h:8765/hunters\n    ws://h:8765/prey\n" in capsys.readouterr().out
    stats["pid"] = 8  # what a gateway passes on is not in its ledger
    flow._poll()
    stats["websocket_address"] = "ws://h:9000"
    flow._poll()
    assert relayed == [{"prey": "ws://bound:1"}] * 3
    assert "ws://h:9000/prey" in capsys.readouterr().out


@pytest.mark.parametrize(("mean_return", "version"), [(4.7, 7), (-2.6, 3)])
def test_without_a_trial_the_version_of_the_best_returns_is_registered(mean_return: float, version: int) -> None:
    flow = make_flow(ActorLearnerSpec.parse({"env": "ask", "target_return": 4.5}), SimpleNamespace())
    (policy,) = flow.policies
    attach_republishing(flow, SimpleNamespace(latest=lambda: WeightSnapshot.of(3, {"w": np.ones(1, np.float32)})))
    policy.gateway = make_stats(mean_return=-2.5, episodes=100)
    policy.keep_best()
    policy.gateway = make_stats(mean_return=mean_return, episodes=200)
    policy.keep_best()  # a moment later
    assert policy.choose_best(SNAPSHOT).version == version
