"""A controller that is started again, or has lost its file, and replicas that die or come while it changes versions."""

import asyncio
import errno
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.cli.display.serve_display import format_plain_lines
from shoal.client.endpoint_status import EndpointStatus
from shoal.errors import RegistryError
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.rollout import Goal, Phase
from shoal.serve.controller.state import ControllerState, Deployment, StateFile
from shoal.serve.controller.status import StatusReporter
from shoal.serve.messages.counts import Histogram, LibraryMetric, ModelCounts
from shoal.serve.messages.desired_state import TrafficShares
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.spec.model_options import GuardOptions, ModelOptions
from shoal.weights import WeightSnapshot
from unit.serve.controller_setting import LEASE_S, OPTIONS, Cluster, FakeReplica


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    made = Cluster(tmp_path)
    for _ in range(3):
        made.add()
    made.settle()
    yield made
    made.close()


def steps(cluster: Cluster) -> list[str]:
    return [event.kind for event in cluster.controller.state.events]


@pytest.mark.parametrize("restart_before", range(8))
def test_a_controller_that_is_started_again_goes_on_at_every_step(cluster: Cluster, restart_before: int) -> None:
    """From staging to the flip on the last replica; whichever life it is in, the end is the same."""
    replicas = list(cluster.replicas.values())

    def all_do(do: Callable[[FakeReplica], None]) -> None:
        for each in replicas:
            do(each)

    script = [
        lambda: cluster.ask("deploy", version=2),
        lambda: all_do(cluster.poll),
        lambda: all_do(FakeReplica.stage_one),
        lambda: cluster.tell(replicas[0]),
        lambda: all_do(cluster.tell),
        lambda: all_do(cluster.poll),
        lambda: all_do(cluster.tell),
        lambda: None,
    ]
    for number, step in enumerate(script):
        if number == restart_before:
            cluster.start_controller()
        step()
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 2)
    assert {replica.stable for replica in replicas} == {2}
    assert steps(cluster) == ["deploy", "deploy"]


def test_a_state_file_of_another_deployment_or_a_damaged_one_is_not_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StateFile(tmp_path / "endpoint.json")
    EndpointController("endpoint", [Deployment("a", "", "", OPTIONS)], deployment_id="1", state_file=file)
    again = EndpointController("endpoint", [Deployment("b", "", "", OPTIONS)], deployment_id="1", state_file=file)
    other = EndpointController("endpoint", [Deployment("b", "", "", OPTIONS)], deployment_id="2", state_file=file)
    assert [list(each.state.models) for each in (again, other)] == [["a"], ["b"]]
    (tmp_path / "endpoint.json").write_text("{")
    damaged = EndpointController("endpoint", [Deployment("c", "", "", OPTIONS)], deployment_id="2", state_file=file)
    assert list(damaged.state.models) == ["c"]
    assert "cannot be read" in caplog.text


def test_a_lost_state_file_does_not_let_replicas_believe_that_they_know_the_plan(cluster: Cluster) -> None:
    cluster.open_canary(2)
    known = cluster.controller.plan.generation
    cluster.file.remove()
    cluster.start_controller()
    cluster.tell_all()
    assert cluster.controller.plan.generation > known
    assert cluster.rollout.phase is Phase.FLIPPING  # of the first version, again: nobody has heard of it
    cluster.settle()
    assert {replica.candidate for replica in cluster.replicas.values()} == {0}


@pytest.mark.parametrize("pad_value", [float("-inf"), float("nan")])
def test_options_that_json_has_no_number_for_outlive_the_controller(cluster: Cluster, pad_value: float) -> None:
    options = ModelOptions(ragged="pad", pad_value=pad_value).model_dump(mode="json")
    cluster.controller.redeploy(Deployment("m", "/registry", "champion", options))
    cluster.open_canary(2)
    cluster.start_controller()
    cluster.settle()
    assert cluster.rollout.phase is Phase.CANARY
    (planned,) = cluster.controller.plan.models
    assert str(ModelOptions.parse(planned.options).pad_value) == str(pad_value)
    assert ModelOptions.parse(planned.options).model_dump(mode="json") == options  # and so no other options


def test_a_model_that_comes_back_under_its_name_is_staged_anew(cluster: Cluster) -> None:
    """What a replica reported of its last life, and reports still, says nothing about this one."""
    for attempt in (1, 2, 3):
        cluster.controller.add_model(Deployment("n", "/registry", "2", OPTIONS))
        cluster.controller.begin_rollout("n", 2, Goal.FLIP, kind="deploy", by="me", why="")
        assert cluster.controller.state.models["n"].rollout.attempt == attempt
        cluster.controller.remove_model("n", "me", "")
        cluster.start_controller()


def test_what_replicas_had_of_a_candidate_that_was_dropped_does_not_count_when_it_is_wanted_again(
    cluster: Cluster,
) -> None:
    cluster.open_canary(2)
    cluster.controller.drop_candidate("m", "guard", "slow")
    cluster.ask("promote", version=2)
    for replica in cluster.replicas.values():
        cluster.tell(replica)  # before it has heard of either
    assert cluster.rollout.phase is Phase.STAGING


def test_many_replicas_that_die_with_a_candidate_roll_it_back(cluster: Cluster) -> None:
    cluster.open_canary(2)
    assert cluster.rollout.phase is Phase.CANARY
    for name in list(cluster.replicas):
        del cluster.replicas[name]
        cluster.add()
        cluster.settle()
        cluster.now_s += LEASE_S + 1.0
        cluster.tell_all()
        cluster.controller.tick()
    cluster.settle()
    assert cluster.rollout.phase is Phase.STEADY
    assert "replicas died" in cluster.rollout.reason


@pytest.mark.parametrize("dies", ["silently", "in order"])
def test_a_version_that_kills_every_replica_that_loads_it_is_given_up(cluster: Cluster, dies: str) -> None:
    """Serve starts others all the time, which load it too: nobody would ever answer again."""
    cluster.ask("canary", version=2, percent=10)
    for _ in range(3):
        for name in list(cluster.replicas):
            del cluster.replicas[name]
            replica = cluster.add()
            cluster.tell(replica)  # it is there, and has nothing yet
            if dies == "in order":  # its health check fails as it loads, and Serve stops it
                cluster.controller.leave(name)
        cluster.now_s += LEASE_S + 1
        cluster.tell_all()
        cluster.controller.tick()
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable, cluster.rollout.refused) == (Phase.STEADY, 1, 2)
    assert "replicas died while version 2 was loaded" in cluster.rollout.reason


def test_replicas_that_leave_in_order_do_not_count_as_dead(cluster: Cluster) -> None:
    """Not even when they leave while the controller still has a question of theirs: it ends later than they do."""
    cluster.open_canary(2)
    before = steps(cluster)

    async def leave_while_following() -> None:
        generation = cluster.controller.plan.generation
        following = [asyncio.create_task(cluster.controller.follow(name, generation, 0.01)) for name in ("r1", "r2")]
        await asyncio.sleep(0)
        for name in ("r1", "r2"):
            cluster.controller.leave(name)
            del cluster.replicas[name]
        assert await asyncio.gather(*following) == [None, None]

    cluster.loop.run_until_complete(leave_while_following())
    assert list(cluster.controller.reports) == cluster.controller.state.replicas == ["r3"]
    cluster.now_s += LEASE_S + 1.0
    cluster.tell(cluster.replicas["r3"])
    cluster.controller.tick()
    assert (steps(cluster), cluster.rollout.lost_replicas) == (before, 0)


def test_a_promotion_waits_for_replicas_that_came_after_the_canary_was_opened(cluster: Cluster) -> None:
    cluster.open_canary(2)
    late = cluster.add()
    late.stage_one()
    cluster.tell(late)
    assert (late.is_ready, late.staged) == (True, {1})
    cluster.ask("promote")
    cluster.catalogue.promote("m", 2, "champion")  # nor does the alias go ahead
    cluster.controller.tick()
    assert cluster.rollout.phase is Phase.CANARY
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 2)


def test_a_canary_that_a_later_replica_cannot_have_is_rolled_back(cluster: Cluster) -> None:
    cluster.open_canary(2)
    cluster.add().bad.add(2)
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 1)
    assert "cannot stage version 2: the file is gone" in cluster.rollout.reason


def test_a_promotion_whose_alias_cannot_be_moved_does_not_happen(cluster: Cluster) -> None:
    cluster.open_canary(2)
    cluster.catalogue.away = True
    assert "cannot be moved" in str(cluster.refusal("promote", timeout_s=1.0))
    assert cluster.position == (Phase.CANARY, 1)


def test_a_registry_that_goes_while_a_moved_alias_is_followed_is_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.open_canary(2)
    cluster.catalogue.promote("m", 2, "champion")
    looks = iter([2])

    def meant_once(name: str, word: str) -> int:
        for version in looks:
            return version
        raise RegistryError("the registry is gone")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.catalogue, "resolve", meant_once)
        cluster.controller.tick()
        assert cluster.rollout.phase is Phase.CANARY
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 2)


@pytest.mark.parametrize("phase", [Phase.CANARY, Phase.STAGING])
def test_a_rollback_that_says_what_it_leaves_does_not_go_back_further_when_it_comes_again(
    cluster: Cluster, phase: Phase
) -> None:
    """Its answer was lost, say: without the version, the second would go back from what had been stable."""
    cluster.change("promote", version=2)
    cluster.ask("canary", version=3, percent=10)
    if phase is Phase.CANARY:
        cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable, cluster.rollout.candidate) == (phase, 2, 3)
    cluster.change("rollback", from_version=3)
    refused = cluster.refusal("rollback", from_version=3)
    assert (refused.status, str(refused)) == (409, "a rollback of 'm' would leave version 2, not 3: see its status")
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable, cluster.catalogue.stack) == (Phase.STEADY, 2, [1, 2])
    cluster.change("rollback", from_version=2)
    assert (cluster.rollout.stable, cluster.refusal("rollback", from_version=2).status) == (1, 409)
    assert cluster.refusal("promote", version=3, from_version=1).status == 400


@pytest.mark.parametrize(
    ("looked_at", "words"),
    [
        ("accuracy", "the guard of 'm' uses 'accuracy', not 'acuracy'"),
        ("", "the guard of 'm' uses no metric: set guard.metric"),
    ],
)
def test_a_metric_that_the_guard_does_not_look_at_is_refused(cluster: Cluster, looked_at: str, words: str) -> None:
    options = ModelOptions(guard=GuardOptions(metric=looked_at)).model_dump(mode="json")
    cluster.controller.redeploy(Deployment("m", "/registry", "champion", options))
    cluster.open_canary(2)
    refusal = cluster.refusal("metric", metric="acuracy", value=0.1)
    assert (refusal.status, refusal.message) == (400, words)
    assert cluster.rollout.phase is Phase.CANARY


def test_status_says_how_many_replicas_there_are_to_be_where_each_is_and_which_forward_hangs(cluster: Cluster) -> None:
    first, *others = cluster.replicas.values()
    cluster.controller.report(replace(first.report(), host="node-7", computing_s=12.3))
    reporter = StatusReporter(cluster.controller, num_replicas=5)
    reporter.wanted = "3 more replicas wanted, waiting for nodes"
    status = reporter.describe_endpoint()
    assert (status["num_replicas"], status["wanted"]) == (5, "3 more replicas wanted, waiting for nodes")
    said = {replica["id"]: (replica["host"], replica["error"]) for replica in status["replicas"]}
    assert said == {first.name: ("node-7", "a forward has taken 12 s")} | {other.name: ("", "") for other in others}


def test_rates_are_of_what_was_counted_meanwhile_whoever_comes_and_goes(cluster: Cluster) -> None:
    """Replicas that have answered for long are heard of one after the other by a controller that was started again."""
    counted = {name: ModelStatistics("m") for name in cluster.replicas}

    def answer(name: str, times: int) -> None:
        for _ in range(times):
            counted[name].count_request(1, 200, 0.01)

    def report(name: str) -> None:
        cluster.tell(cluster.replicas[name], counted[name].snapshot())

    def rate() -> float:
        (model,) = book.describe_endpoint()["models"]
        return {each["version"]: each["requests_per_s"] for each in model["versions"]}[1]

    for name in counted:
        answer(name, 1000)
    cluster.start_controller()
    book = StatusReporter(cluster.controller, clock=lambda: cluster.now_s)
    first, second, third = counted
    report(first)
    book.sample()
    cluster.now_s += 1.0
    report(second)
    assert rate() == 0.0
    book.sample()
    cluster.now_s += 1.0
    answer(first, 10)
    answer(second, 6)
    for name in counted:
        report(name)
    assert rate() == 8.0  # 16 in two seconds, and of the third one nothing yet
    book.sample()
    cluster.now_s += 2.0
    answer(third, 4)
    report(third)
    assert rate() == 5.0
    answer(first, 1)
    report(first)
    cluster.controller.leave(first)
    assert rate() == 2.5
    (model,) = book.describe_endpoint()["models"]
    assert (model["requests"], model["errors"]) == (3021, 0)  # those of the first, too, up to its last report
    book.sample()
    cluster.now_s += 60.0
    answer(second, 30)
    report(second)
    book.sample()
    (model,) = book.describe_endpoint()["models"]
    ((_, version, per_s, _),) = model["history"]
    assert (version, per_s) == (1, 40 / 64)  # of the minute and a bit that this controller has seen, of who is there
    assert model["requests"] == 3051
    report(first)  # which was taken for lost
    assert book.describe_endpoint()["models"][0]["requests"] == 3051


def test_a_shadow_of_no_requests_ends_it_and_one_of_a_candidate_that_answers_stays(cluster: Cluster) -> None:
    cluster.change("shadow", version=2, percent=20)
    assert cluster.rollout.phase is Phase.CANARY
    cluster.change("shadow", version=2, percent=0)
    assert (cluster.rollout.phase, cluster.rollout.stable, cluster.rollout.candidate) == (Phase.STEADY, 1, 0)
    cluster.open_canary(3)
    for percent in (20, 0):
        cluster.change("shadow", percent=percent)
        assert cluster.rollout.shares == TrafficShares(10, percent)


def test_what_the_registry_said_goes_with_what_was_followed(cluster: Cluster) -> None:
    cluster.catalogue.away = True
    cluster.controller.tick()
    (model,) = StatusReporter(cluster.controller).describe_endpoint()["models"]
    assert model["reason"] == "the registry is gone"
    cluster.redeploy("1")
    cluster.controller.tick()
    (model,) = StatusReporter(cluster.controller).describe_endpoint()["models"]
    assert model["reason"] == ""


def test_closed_it_wakes_who_waits(cluster: Cluster) -> None:
    async def body() -> None:
        waiting = asyncio.create_task(cluster.controller.follow("r1", cluster.controller.plan.generation, 60.0))
        await asyncio.sleep(0)
        cluster.controller.close(forget=True)
        cluster.controller.close()
        assert await waiting is None

    cluster.loop.run_until_complete(body())
    assert cluster.file.load("") is None


# -- the file


def full(path: Path, content: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_was_removed_is_not_kept_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "endpoint.json")
    file.save(ControllerState(deployment="a", generation=3))
    found = file.load("a")
    assert found is not None
    assert found.generation == 3
    file.remove()
    file.save(ControllerState(deployment="a", generation=4))  # the last report of a replica that is on its way out
    file.remove()
    assert [*tmp_path.iterdir()] == []
    assert StateFile(tmp_path / "endpoint.json").load("a") is None


def test_what_a_full_disk_refuses_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = WeightSnapshot.of(7, {"w": np.zeros(1, np.float32)})
    file = StateFile(tmp_path / "endpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for generation in (3, 4):
            file.save(ControllerState(deployment="a", generation=generation))
        file.store_weights("m", weights)
        file.retry_writes()
        assert file.load_weights("m", 7) == weights
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [
        str(tmp_path / "endpoint.json"),
        str(tmp_path / "endpoint.weights" / "m"),
    ]
    assert StateFile(tmp_path / "endpoint.json").load("a") is None
    file.retry_writes()
    written = StateFile(tmp_path / "endpoint.json")
    found = written.load("a")
    assert found is not None
    assert found.generation == 4
    assert written.load_weights("m", 7) == weights


def test_a_controller_on_a_full_disk_goes_on_and_its_state_is_written_at_the_next_tick(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        cluster.change("promote", version=2)
        assert (cluster.rollout.stable, {replica.stable for replica in cluster.replicas.values()}) == (2, {2})
    cluster.controller.tick()
    cluster.start_controller()
    assert cluster.rollout.stable == 2


def test_what_a_full_disk_refused_is_forgotten_with_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path / "endpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        file.save(ControllerState(deployment="a"))
        file.remove()
    file.retry_writes()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", ["", "[]", "7", "{}", '{"models": []}', '{"models": {"m": {}}}', "\udce9"])
def test_what_is_no_state_is_refused_and_the_endpoint_starts_from_what_it_was_deployed_with(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoint.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert StateFile(path).load("d") is None
    [record] = caplog.records
    assert record.getMessage().startswith(f"{path} cannot be read, the endpoint starts from its deployment")


def test_status_has_what_libraries_count_over_all_replicas(cluster: Cluster) -> None:
    book = StatusReporter(cluster.controller, clock=lambda: cluster.now_s)
    bounds = [0.01, 0.1]

    def report(num_tokens: int, counts: list[int]) -> None:
        others = {
            "tokens_total": LibraryMetric("counter", "Tokens", num_tokens),
            "between_seconds": LibraryMetric("histogram", "Between", Histogram(bounds, counts)),
            "used_ratio": LibraryMetric("gauge", "A share", 0.5),
        }
        for replica in cluster.replicas.values():
            cluster.tell(replica, ModelCounts(others=others))

    report(100, [50, 0, 0])
    book.sample()
    cluster.now_s += 2.0
    report(120, [50, 100, 0])
    (model,) = book.describe_endpoint()["models"]
    assert model["metrics"] == {
        "tokens_total": {"help": "Tokens", "per_s": 30.0, "p50_s": None, "p99_s": None},
        "between_seconds": {
            "help": "Between",
            "per_s": None,
            "p50_s": pytest.approx(0.055),
            "p99_s": pytest.approx(0.0991),
        },
    }
    status = msgspec.convert(book.describe_endpoint(), EndpointStatus)
    assert "m: tokens 30/s, between 55 ms (p99 99.1 ms)" in format_plain_lines(status, "")


def test_the_last_replica_that_was_lost_is_in_the_status(cluster: Cluster) -> None:
    cluster.now_s += LEASE_S + 1.0
    cluster.controller.tick()
    status = msgspec.convert(StatusReporter(cluster.controller).describe_endpoint(), EndpointStatus)
    assert any(
        re.fullmatch("a replica was lost at .*: .* did not report for .*", each)
        for each in format_plain_lines(status, "")
    )
