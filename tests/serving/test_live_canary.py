"""The newest weights of a run as a canary beside a pinned version, in whole replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from serving.faulty_models import RAISE, moody
from serving.live_set import LiveSet, everywhere, infer, live
from serving.replica_set import ask, tally, until
from shoal.cli.display.serve_display import format_plain_lines, format_shares
from shoal.client.endpoint_status import EndpointStatus, ModelStatus
from shoal.errors import InferenceError
from shoal.serve.controller.canary_guard import MAX_LOST_REPLICAS
from shoal.serve.spec.model_options import GuardOptions


def seen(endpoint: LiveSet) -> ModelStatus:
    return EndpointStatus.from_json(msgspec.json.encode(endpoint.status.describe_endpoint())).models[0]


def candidates(endpoint: LiveSet) -> list[int]:
    return [replica.manager.get_model("moody").router.candidate_version for replica in endpoint.replicas.values()]


async def beside(endpoint: LiveSet, version: int, mood: float = 0.0) -> None:
    """The run publishes, and every replica has it as the candidate."""
    endpoint.store.publish(moody(version, mood))
    await until(lambda: set(candidates(endpoint)) == {version})


async def answered(endpoint: LiveSet, num: int = 100, **headers: str) -> Counter[int]:
    """Who answers `num` requests to each replica; not one may fail."""
    return await tally(endpoint, lambda replica: infer(replica, **headers), num)


@live(replicas=2)
async def test_the_newest_gets_its_share_until_it_is_promoted(endpoint: LiveSet) -> None:
    told = await endpoint.administer(action="canary", model="moody", percent=20, reason="carefully")
    assert (told["pinned"], told["newest_percent"]) == (1, 20.0)
    assert await answered(endpoint) == {1: 200}  # there is nothing newer yet
    for version in (2, 3):
        await beside(endpoint, version)
        found = await answered(endpoint)
        assert found[1] + found[version] == 200
        assert 36 <= found[version] <= 44
    assert await answered(endpoint, 8, shoal_track="candidate") == {3: 16}
    assert await answered(endpoint, 8, shoal_track="stable") == {1: 16}
    assert await answered(endpoint, 8, version=3) == {3: 16}  # type: ignore[arg-type]
    assert len(await answered(endpoint, 8, shoal_sticky="customer 17")) == 1
    await endpoint.administer(action="canary", model="moody", percent=0)
    assert await answered(endpoint) == {1: 200}
    [late] = await endpoint.start()
    await until(lambda: candidates(endpoint) == [3, 3, 3])
    assert (await infer(late)).version == 1
    endpoint.restart_controller()
    await endpoint.administer(action="promote", model="moody")
    assert await everywhere(endpoint) == {3}
    assert [(kind, version, before) for kind, version, before, _ in endpoint.entries()] == [
        ("pin", 1, 1), ("canary", None, 1), ("canary", None, 1), ("follow", None, 1),
    ]  # fmt: skip
    assert endpoint.controller.state.events[1].reason == "carefully (20 percent of the requests, 0 percent shadowed)"


@live(replicas=2)
async def test_rolled_back_what_was_pinned_answers_everything_and_a_second_time_does_nothing(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2))
    assert await everywhere(endpoint) == {2}
    await endpoint.administer(action="canary", model="moody", percent=50)
    await beside(endpoint, 3)
    await until(lambda: seen(endpoint).candidate == 3)
    with pytest.raises(InferenceError, match="would leave the newest weights of its run, not version 2"):
        await endpoint.administer(action="rollback", model="moody", from_version=2)
    told = await endpoint.administer(action="rollback", model="moody", from_version=3)
    assert (told["pinned"], told["newest_percent"], candidates(endpoint)) == (2, None, [0, 0])
    assert await answered(endpoint) == {2: 200}
    endpoint.store.publish(moody(4))
    with pytest.raises(InferenceError, match="would leave version 2, not 3"):
        await endpoint.administer(action="rollback", model="moody", from_version=3)
    assert await everywhere(endpoint) == {2}
    assert endpoint.entries()[-1] == ("rollback", 2, 3, "tester")


@live(replicas=2)
async def test_a_newest_version_that_fails_is_left_no_request_fails_and_the_next_one_gets_the_share(
    endpoint: LiveSet,
) -> None:
    await endpoint.administer(action="canary", model="moody", percent=100)
    for version in (2, 3):
        await beside(endpoint, version, RAISE)
        assert await answered(endpoint, 8) == {1: 16}
        await until(lambda: candidates(endpoint) == [0, 0])
    await beside(endpoint, 4)
    assert await answered(endpoint, 8) == {4: 16}
    assert ("rollback", 1, 2, "guard") in endpoint.entries()
    assert endpoint.versions("moody") == [1, 1]


@live(replicas=2, guard=GuardOptions(metric="return", min_value=100.0))
async def test_the_newest_goes_by_what_a_user_measures(endpoint: LiveSet) -> None:
    await endpoint.administer(action="canary", model="moody", percent=50)
    await beside(endpoint, 2)
    await until(lambda: seen(endpoint).candidate == 2)
    await endpoint.administer(action="metric", model="moody", version=1, metric="return", value=80.0)
    await endpoint.administer(action="metric", model="moody", metric="return", value=120.0)
    assert candidates(endpoint) == [2, 2]
    await endpoint.administer(action="metric", model="moody", metric="return", value=80.0)
    await until(lambda: candidates(endpoint) == [0, 0])
    assert endpoint.versions("moody") == [1, 1]
    assert endpoint.entries()[-1] == ("rollback", 1, 2, "guard")


@live()
async def test_a_shadow_of_the_newest_is_compared_and_answers_nobody(endpoint: LiveSet) -> None:
    await endpoint.administer(action="shadow", model="moody", percent=100)
    await beside(endpoint, 2)
    assert await answered(endpoint, 20) == {1: 20}

    def compared() -> dict[str, Any]:
        return {str(each.version): (each.track, each.compared, each.disagreed) for each in seen(endpoint).versions}

    await until(lambda: compared().get("2") == ("shadow", 20, 20))
    assert compared()["1"] == ("stable", 0, 0)
    assert await answered(endpoint, 1, shoal_track="candidate") == {1: 1}
    await endpoint.administer(action="shadow", model="moody", percent=0)
    await until(lambda: candidates(endpoint) == [0])
    assert endpoint.versions("moody") == [1]


@live(replicas=2)
async def test_the_newest_is_pinned_by_its_number_while_it_has_a_share(endpoint: LiveSet) -> None:
    await endpoint.administer(action="canary", model="moody", percent=20)
    await beside(endpoint, 2)
    await until(lambda: seen(endpoint).candidate == 2)
    told = await endpoint.administer(action="rollback", model="moody", version=2, timeout_s=5.0)
    assert (told["pinned"], told["newest_percent"]) == (2, None)
    endpoint.store.publish(moody(3))
    assert await answered(endpoint, 8) == {2: 16}
    [late] = await endpoint.start()
    assert (await infer(late)).version == 2


@live(replicas=2)
async def test_status_says_who_has_which_share(endpoint: LiveSet) -> None:
    await endpoint.administer(action="canary", model="moody", percent=10)
    await beside(endpoint, 2)
    about = "pinned at version 1 of a run, beside its newest"
    # One replica reports before the other: until then the candidate has half of its share.
    await until(lambda: format_shares(seen(endpoint)) == f"90% by 1 (stable), 10% by 2 (candidate), {about}")
    lines = format_plain_lines(EndpointStatus("endpoint", models=[seen(endpoint)]), "http://here")[1:]
    assert [line.partition(",")[0] for line in lines] == ["moody@1 stable: share 90%", "moody@2 candidate: share 10%"]


@live(replicas=MAX_LOST_REPLICAS + 2)
async def test_when_replicas_die_the_newest_loses_its_share(endpoint: LiveSet) -> None:
    await endpoint.administer(action="canary", model="moody", percent=10)
    await beside(endpoint, 2)
    for name in list(endpoint.replicas)[1:]:
        await endpoint.kill(name)
    await until(lambda: candidates(endpoint) == [0])
    [event] = [each for each in endpoint.controller.state.events if each.kind == "rollback"]
    assert (event.version, event.by) == (1, "guard")
    assert "replicas died while it answered" in event.reason


@live()
async def test_what_is_pinned_is_not_answered_for_by_the_newest(endpoint: LiveSet) -> None:
    """An error of the stable version is its own: the newest is there to be tried, not to be relied on."""
    await endpoint.publish(moody(2, RAISE))
    fine = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.0, 0.0]}]}  # it can answer this
    [replica] = endpoint.replicas.values()
    assert (await ask(replica, "POST", "/v2/models/moody/infer", fine)).version == 2
    await endpoint.administer(action="canary", model="moody", percent=0)
    await beside(endpoint, 3)
    assert (await infer(replica)).status == 500
    assert (await infer(replica, shoal_track="candidate")).version == 3
    assert (endpoint.versions("moody"), candidates(endpoint)) == ([2], [3])
