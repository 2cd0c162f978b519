"""What an alias is followed to, also in a bucket that fails, and when what failed once is tried again."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from refusals import refused
from shoal.errors import ConfigError, RegistryError, StoreError
from shoal.registry import ModelFactory, Registry, Signature
from shoal.serve.controller.change_request import parse_change
from shoal.serve.controller.rollout import Phase
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.spec import model_source
from shoal.serve.spec.model_source import RegistryCatalogue
from shoal.store import Store
from shoal.weights import WeightSnapshot
from unit.serve.controller_setting import OPTIONS, STAGE_TIMEOUT_S, Cluster
from waiting import wait_for


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    made = Cluster(tmp_path)
    for _ in range(2):
        made.add()
    made.settle()
    yield made
    made.close()


def test_a_version_that_was_rolled_back_is_served_once_the_alias_means_it(cluster: Cluster) -> None:
    cluster.open_canary(4)
    cluster.change("rollback")
    assert (cluster.rollout.phase, cluster.rollout.stable, cluster.rollout.refused) == (Phase.STEADY, 1, 4)
    cluster.catalogue.stack.append(4)
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 4)


def test_a_rollback_ends_when_what_the_alias_means_meanwhile_answers(cluster: Cluster) -> None:
    cluster.open_canary(4)
    cluster.catalogue.stack.append(3)  # which waits for the canary's end
    cluster.settle()
    assert cluster.position == (Phase.CANARY, 1)
    cluster.ask("rollback", from_version=4)
    for replica in cluster.replicas.values():
        cluster.poll(replica)
        cluster.tell(replica)
    cluster.spin()
    assert len(cluster.asked) == 1  # all have heard of the canary's end, and what comes now is not there yet
    cluster.settle()
    assert not cluster.asked
    assert cluster.position == (Phase.STEADY, 3)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_could_not_be_staged_is_tried_again_when_the_alias_comes_back_to_it_and_not_before(
    cluster: Cluster, restarted: bool
) -> None:
    cluster.spoil(4)
    cluster.catalogue.stack = [4]
    cluster.settle()
    attempts = cluster.rollout.attempt
    if restarted:
        cluster.start_controller()
    cluster.settle()
    assert (cluster.rollout.stable, cluster.rollout.refused, cluster.rollout.attempt) == (1, 4, attempts)
    cluster.spoil()
    cluster.catalogue.stack = [1]
    cluster.settle()
    cluster.catalogue.stack = [4]
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 4)


def test_the_latest_is_followed_where_it_is_deployed_and_else_the_newest_of_now(cluster: Cluster) -> None:
    assert parse_change({"action": "deploy", "model": "m", "version": "latest"}).version_ref == "latest"
    assert parse_change({"action": "deploy", "model": "m"}).version_ref == ""
    assert parse_change({"action": "promote", "model": "m@latest"}).version_ref == ""
    assert parse_change({"action": "deploy", "model": "m@3", "version": "latest"}).version_ref == "3"
    for version in ("Champion", -1, "a@b"):
        with refused(400):
            parse_change({"action": "canary", "model": "m", "version": version, "percent": 1})


def test_a_version_that_is_followed_as_a_canary_takes_over_once_the_guard_has_seen_enough_of_it(
    cluster: Cluster,
) -> None:
    options = {**OPTIONS, "follow": "canary"}
    cluster.redeploy("champion", options)
    counted = {name: ModelStatistics("m") for name in cluster.replicas}

    def follow(version: int) -> tuple[Phase, int, int]:
        cluster.catalogue.stack.append(version)
        cluster.settle()
        return cluster.rollout.phase, cluster.rollout.stable, cluster.rollout.candidate

    def answer(version: int, num_requests: int, status: int = 200) -> tuple[Phase, int]:
        for name, replica in cluster.replicas.items():
            for _ in range(num_requests):
                counted[name].count_request(version, status, 0.01)
            cluster.tell(replica, counted[name].snapshot())
        cluster.now_s += 1.0
        for replica in cluster.replicas.values():
            cluster.poll(replica)
            cluster.controller.report(replica.report())
        return cluster.position

    assert follow(2) == (Phase.CANARY, 1, 2)
    assert cluster.rollout.shares.percent == 10.0
    assert answer(2, 0) == (Phase.CANARY, 1)  # what was counted before
    assert answer(2, 24) == (Phase.CANARY, 1)
    answer(2, 1)
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable, cluster.catalogue.stack) == (Phase.STEADY, 2, [1, 2])
    assert follow(3) == (Phase.CANARY, 2, 3)
    assert follow(2) == (Phase.STEADY, 2, 0)  # the alias has gone back
    assert follow(4) == (Phase.CANARY, 2, 4)
    answer(4, 0)
    answer(4, 60, 500)
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable, cluster.rollout.refused) == (Phase.STEADY, 2, 4)


def test_an_alias_that_the_registry_takes_for_none_ends_a_promotion(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise ConfigError("alias", "latest", "is taken", "choose another")

    monkeypatch.setattr(cluster.catalogue, "promote", refuse)
    cluster.change("promote", version=2)
    assert cluster.position == (Phase.STEADY, 1)
    assert "cannot be moved" in cluster.rollout.reason


def test_a_model_that_could_not_be_added_goes_though_nobody_waits_for_it_any_more(cluster: Cluster) -> None:
    """Else no replica that starts could say that it is ready."""
    cluster.spoil(2)
    cluster.controller.remove_model("m", "me", "")
    cluster.ask("deploy", version=2)
    cluster.asked.pop().cancel()
    cluster.start_controller()
    assert [*cluster.controller.state.models] == ["m"]
    for replica in cluster.replicas.values():
        cluster.poll(replica)
        replica.stage_one()
        cluster.tell(replica)
    assert cluster.rollout.phase is Phase.VACANT
    cluster.controller.tick()
    assert not cluster.controller.state.models
    assert "it could not be loaded: replica r1 cannot stage version 2" in cluster.controller.state.events[-1].reason


def kinds(cluster: Cluster) -> list[tuple[str, int | None]]:
    return [(event.kind, event.version) for event in cluster.controller.state.events]


def test_a_rollback_does_not_go_back_to_another_version_when_the_alias_is_moved_meanwhile(cluster: Cluster) -> None:
    cluster.catalogue.stack = [2, 4]
    cluster.settle()
    cluster.ask("rollback", from_version=4)
    assert (cluster.rollout.phase, cluster.rollout.candidate) == (Phase.STAGING, 2)
    cluster.catalogue.promote("m", 3, "champion")
    cluster.settle()
    assert cluster.catalogue.stack == [2, 4, 3]
    assert cluster.rollout.stable == 3


def test_a_version_that_was_withdrawn_while_it_was_loaded_never_answers(cluster: Cluster) -> None:
    cluster.catalogue.promote("m", 2, "champion")
    cluster.controller.tick()
    assert (cluster.rollout.phase, cluster.rollout.candidate) == (Phase.STAGING, 2)
    cluster.catalogue.rollback("m", "champion")
    cluster.controller.tick()
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 1)
    assert ("follow", 2) not in kinds(cluster)
    assert cluster.rollout.reason == "m@champion is version 1 now"


def test_what_was_refused_is_not_tried_again_when_another_canary_ends(cluster: Cluster) -> None:
    cluster.catalogue.promote("m", 4, "champion")
    cluster.controller.tick()
    cluster.ask("rollback", from_version=4)
    cluster.open_canary(2)
    cluster.controller.drop_candidate("m", "guard", "bad")
    cluster.settle()
    assert cluster.position == (Phase.STEADY, 1)
    cluster.catalogue.promote("m", 3, "champion")
    cluster.settle()
    cluster.catalogue.promote("m", 4, "champion")
    cluster.settle()
    assert cluster.rollout.stable == 4, "the alias has moved since"


def test_a_deploy_that_nobody_waits_for_any_more_leaves_what_is_followed_when_it_fails(cluster: Cluster) -> None:
    for replica in cluster.replicas.values():
        replica.bad = {4}
    cluster.ask("deploy", version=4, timeout_s=0.001)
    cluster.loop.run_until_complete(asyncio.sleep(0.02))
    cluster.settle()
    assert cluster.controller.state.models["m"].deployment.version == "champion"
    cluster.catalogue.promote("m", 2, "champion")
    cluster.settle()
    assert cluster.rollout.stable == 2


def test_a_deploy_that_had_nothing_to_load_stays_when_something_else_is_abandoned(cluster: Cluster) -> None:
    cluster.change("deploy", version=1)
    for replica in cluster.replicas.values():
        replica.bad = {2}
    cluster.open_canary(2)
    assert cluster.rollout.refused == 2
    assert cluster.controller.state.models["m"].deployment.version == "1"


@pytest.mark.parametrize("action", ["deploy", "promote"])
def test_who_waits_for_a_model_that_is_deleted_hears_of_it(cluster: Cluster, action: str) -> None:
    if action == "promote":
        cluster.open_canary(2)
        cluster.add()  # which has to load the candidate first
    change = {"action": action, "model": "m"} | ({"version": 2} if action == "deploy" else {})
    waiting = cluster.loop.create_task(cluster.administration.administer(change, "me"))
    cluster.spin()
    cluster.controller.remove_model("m", "other", "deleted")
    with refused(409, "was deleted meanwhile"):
        cluster.loop.run_until_complete(asyncio.wait_for(waiting, 5.0))


def test_a_deployment_of_which_nothing_was_begun_before_the_controller_died_is_not_followed(cluster: Cluster) -> None:
    """It is written down before the version is staged: between the two it may die, or the disk be full."""
    cluster.redeploy("3", is_on_trial=True)
    cluster.start_controller()
    assert cluster.controller.state.models["m"].deployment.version == "champion"
    cluster.catalogue.promote("m", 2, "champion")
    cluster.settle()
    assert cluster.rollout.stable == 2


def test_replicas_that_are_stopped_while_a_model_is_added_are_none_that_died(cluster: Cluster) -> None:
    """None of them is ready until it has the new model too; an endpoint that scales down stops them in order."""
    cluster.open_canary(2)
    for name, replica in list(cluster.replicas.items()):
        replica.is_ready = False
        cluster.tell(replica)
        del cluster.replicas[name]
        cluster.add()
        cluster.controller.leave(name)
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.lost_replicas) == (Phase.CANARY, 0)


def test_where_nothing_is_shadowed_there_is_no_shadow_to_end(cluster: Cluster) -> None:
    """Who ends it twice does not open a candidate for whoever asks for one."""
    cluster.change("shadow", version=2, percent=0)
    assert (cluster.rollout.phase, cluster.rollout.attempt) == (Phase.STEADY, 1)
    refusal = cluster.refusal("shadow", version=2, percent=0)
    assert (refusal.status, str(refusal)) == (409, "model 'm' has no shadow that could end: see its status")


def test_an_alias_that_moved_while_the_endpoint_slept_is_followed_when_it_wakes(cluster: Cluster) -> None:
    for replica in list(cluster.replicas):
        cluster.controller.leave(replica)
    cluster.replicas.clear()
    cluster.catalogue.promote("m", 2, "champion")
    cluster.controller.tick()
    cluster.now_s += 10 * STAGE_TIMEOUT_S
    cluster.controller.tick()
    woken = cluster.add()
    cluster.settle()
    assert woken.answering == {2}
    assert cluster.position == (Phase.STEADY, 2)


@pytest.mark.parametrize("word", ["1", "champion", "latest"])
def test_rollbacks_walk_back_and_never_to_what_was_withdrawn(cluster: Cluster, word: str) -> None:
    cluster.redeploy(word)
    cluster.settle()
    for version in (2, 3, 4):
        assert cluster.change("promote", version=version) == version
    assert [cluster.change("rollback") for _ in range(2)] == [3, 2]
    assert cluster.change("promote", version=3) == 3  # no longer withdrawn
    assert cluster.change("promote", version=2) == 2
    assert cluster.change("rollback") == 3
    cluster.start_controller()  # which reads its file
    cluster.redeploy(word)
    cluster.settle()
    assert cluster.change("rollback") == 1  # 2 was withdrawn
    refused = cluster.refusal("rollback")
    assert (refused.status, cluster.rollout.stable) == (409, 1)


def test_a_rollback_passes_over_a_version_that_was_refused_as_a_candidate_since(cluster: Cluster) -> None:
    cluster.redeploy("1")
    cluster.settle()
    for version in (2, 3):
        cluster.change("promote", version=version)
    cluster.change("shadow", version=2, percent=10)
    cluster.change("rollback")  # the end of a shadow says nothing against it
    assert cluster.rollout.previous == 2
    cluster.open_canary(2)
    cluster.controller.drop_candidate("m", "guard", "bad")
    cluster.settle()
    assert cluster.change("rollback") == 1


def test_who_follows_the_newest_takes_each_and_stays_where_it_was_sent_until_there_is_another(cluster: Cluster) -> None:
    cluster.change("deploy", model="m@latest")
    assert cluster.controller.state.models["m"].deployment.version == "latest"
    cluster.catalogue.newest = 3
    cluster.settle()
    assert cluster.rollout.stable == 3
    assert cluster.change("rollback") == 1
    cluster.catalogue.newest = 4
    cluster.settle()
    assert (cluster.rollout.stable, cluster.catalogue.stack) == (4, [1])


def test_a_moved_alias_is_seen_and_a_bucket_that_fails_is_told(
    bucket_environment: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_source, "FOLLOW_S", 0.0)
    registry = Registry(f"{open_bucket(bucket_environment, monkeypatch).url}/followed")
    for number in (1, 2):
        registry.register(
            "linear",
            WeightSnapshot.of(1, {"w": np.array([float(number)])}),
            model=ModelFactory(factory="a:b"),
            signature=Signature(inputs=[], outputs=[]),
            aliases=["champion"] if number == 1 else [],
        )
    catalogue = RegistryCatalogue(registry.location)
    assert catalogue.follow("linear", "champion") == 1
    registry.promote("linear@2")
    wait_for(lambda: catalogue.follow("linear", "champion") == 2)

    def refuse(store: Store, key: str) -> bytes:
        raise StoreError("the bucket does not answer")

    def is_told() -> bool:
        try:
            catalogue.follow("linear", "champion")
        except RegistryError as error:
            return "does not answer" in str(error)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(type(registry.store), "read", refuse)
        wait_for(is_told)
    wait_for(lambda: not is_told())
    assert catalogue.follow("linear", "champion") == 2
