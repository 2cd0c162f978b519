"""What an endpoint's controller is in its process, and what it is made from; without Ray."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from registered import LINEAR, SIGNATURE, register
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE
from shoal.errors import ConfigError, InferenceError, RegistryError
from shoal.home import home
from shoal.serve.controller.config import build_controller_config
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.rollout import Phase
from shoal.serve.controller.service import ControllerService
from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport
from shoal.serve.on_ray.options import deployment_options
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
from shoal.weights import WeightStore

DEADLINE_S = 5.0


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(aliases=("champion",))


def spec(**fields: Any) -> EndpointSpec:
    return EndpointSpec.parse({"name": "endpoint", **fields})


def audited() -> list[dict[str, Any]]:
    file: Path = home() / "audit.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(body: Callable[[ControllerService], Awaitable[None]], idle_s: float = 60.0, **fields: Any) -> None:
    setting, _ = build_controller_config(spec(**fields), [model_from_ref("linear@champion")])

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await body(ControllerService(type(setting)(**{**vars(setting), "idle_s": idle_s})))

    asyncio.run(bounded())


def test_the_status_says_where_grpc_listens() -> None:
    async def body(service: ControllerService) -> None:
        found.append((await service.status())["grpc"])

    found: list[str] = []
    for port in (9000, None):
        run(body, grpc_port=port)
    assert found == ["127.0.0.1:9000", ""]


def test_what_replicas_refuse_and_administrators_ask_is_in_the_audit_log() -> None:
    async def body(service: ControllerService) -> None:
        others = await service.report(ReplicaReport("r1", refused=(AuthFailure("ada", 403, 2),)))
        assert others == []
        [other] = await service.report(ReplicaReport("r2", refused=(AuthFailure("", 401, 3, "10.0.0.7"),)))
        assert other.replica == "r1"
        with pytest.raises(InferenceError):
            await service.administer({"action": "canary", "model": "none"}, "administrator from 10.0.0.8")

    run(body)
    lines = {line["entry"]: line for line in audited() if line["entry"] != "changed"}
    assert [line["by"] for line in audited() if line["entry"] == "refused"] == ["ada", "unknown"]
    assert (lines["refused"]["count"], lines["refused"]["from"]) == (3, "10.0.0.7")
    assert (lines["asked"]["action"], lines["asked"]["from"], lines["asked"]["result"]) == (
        "canary",
        "10.0.0.8",
        "refused",
    )


def test_what_changes_after_the_state_was_lost_is_told_to_who_had_heard_more() -> None:
    """Events are counted anew then: a driver that goes by their number would record none of them for long."""

    async def body(service: ControllerService) -> None:
        controller = service._controller
        assert await service.events(-1) == []
        controller.record_event("canary", "linear", 2, 1, "me", "")
        heard = await service.events(41)
        assert [event.kind for event in heard] == ["canary"]
        assert await service.events(heard[-1].number) == []

    run(body)


def test_it_ends_when_no_replica_has_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.serve.controller.service.TICK_S", 0.01)
    ended: list[str] = []

    async def body(service: ControllerService) -> None:
        service.on_idle = lambda: ended.append("")
        for generation in range(3):
            await service.follow("r1", generation - 1, 0.0)
            assert not ended
        while not ended:
            await asyncio.sleep(0.01)

    run(body, idle_s=0.2)
    assert len(ended) == 1


def test_an_idle_one_watches_its_certificate_while_there_is_an_ingress() -> None:
    ended: list[str] = []
    answers = iter([True, True, False])

    async def body(service: ControllerService) -> None:
        service.has_ingress, service.on_idle = lambda: next(answers), lambda: ended.append("")
        service._watch = cast(Any, SimpleNamespace(poll=lambda: None, current=SimpleNamespace(not_after=0.0)))
        await service.follow("r1", -1, 0.0)
        while not ended:
            await asyncio.sleep(0.01)
        assert next(answers, None) is None

    run(body, idle_s=0.01)


async def ticks(controller: EndpointController, num: int) -> None:
    """Return when it has ticked so often."""
    tick, ticked = controller.tick, asyncio.Event()
    for _ in range(num):
        ticked.clear()
        controller.tick = lambda: (tick(), ticked.set())[0]  # type: ignore[method-assign]
        await ticked.wait()
    controller.tick = tick  # type: ignore[method-assign]


def test_a_controller_that_stood_still_takes_nobody_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer, or a machine that stands still: what came meanwhile waits to be heard."""
    monkeypatch.setattr("shoal.serve.controller.service.TICK_S", 0.01)
    monkeypatch.setattr("shoal.serve.controller.service.STALL_S", 0.05)

    def report(name: str, *staged: int) -> ReplicaReport:
        return ReplicaReport(name, 1, 1 << 20, True, {"linear": ModelReport(staged=staged)})

    async def body(service: ControllerService) -> None:
        controller = service._controller
        controller._lease_s = 0.2
        for name in ("r1", "r2"):
            await service.report(report(name))
        await service.follow("r1", -1, 0.0)
        rollout = controller.state.models["linear"].rollout
        assert (rollout.phase, rollout.candidate) == (Phase.STAGING, 1)
        await ticks(controller, 1)
        time.sleep(0.4)
        await ticks(controller, 2)
        await service.report(report("r1", 1))
        assert controller.state.models["linear"].rollout.phase is Phase.STAGING  # r2 has not said that it has it
        assert [event.kind for event in controller.state.events] == []

    run(body)


async def test_endpoints_of_one_name_keep_their_states_apart() -> None:
    """As two clusters of one home may have them."""
    model = model_from_ref("linear@champion")
    first, second = (build_controller_config(spec(), [model])[0] for _ in range(2))
    assert first.state_file != second.state_file
    services = [ControllerService(setting) for setting in (first, second)]
    assert first.state_file.exists()
    await services[1].forget()
    assert (first.state_file.exists(), second.state_file.exists()) == (True, False)


def test_a_controller_is_told_each_model_with_its_options_and_replicas_what_to_follow() -> None:
    live = LiveModel(LINEAR, SIGNATURE, WeightStore())
    endpoint = spec(model={"max_batch_size": 8}, models={"linear": {"max_batch_size": 4}})
    models = [model_from_ref("linear@champion"), EndpointModel("live", live, options=ModelOptions(max_batch_size=2))]
    setting, followed = build_controller_config(endpoint, models)
    assert [(each.name, each.version, each.is_live) for each in setting.models] == [
        ("linear", "champion", False),
        ("live", "", True),
    ]
    assert [each.options["max_batch_size"] for each in setting.models] == [4, 2]
    assert followed == {"live": live}
    assert setting.actor_name != build_controller_config(endpoint, models)[0].actor_name  # of another call of `deploy`


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="name a model"):
        build_controller_config(spec(), [])
    with pytest.raises(ConfigError, match="is there twice"):
        build_controller_config(spec(), [model_from_ref("linear@champion"), model_from_ref("linear@1")])
    with pytest.raises(RegistryError):
        build_controller_config(spec(), [model_from_ref("linear@no-such-alias")])


def test_it_marks_an_endpoint_that_may_sleep_and_says_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "haproxy"))
    mark = tmp_path / "asleep" / "endpoint"

    async def sleeps(service: ControllerService) -> None:
        assert mark.exists()
        status = await service.status()
        assert (status["asleep"], status["ready"]) == (True, True)
        await service.report(ReplicaReport("r", 1, 0, False))
        status = await service.status()
        assert (status["asleep"], status["ready"]) == (False, False)
        await service.leave("r")
        assert (await service.status())["asleep"]
        assert not await service.events(-1)
        await service.forget()
        assert not mark.exists()

    async def stays(service: ControllerService) -> None:
        assert not mark.exists()
        status = await service.status()
        assert (status["asleep"], status["ready"]) == (False, False)

    run(sleeps, scale={"min": 0, "max": 1})
    mark.touch()  # of an endpoint of this name before
    run(stays)


@pytest.mark.parametrize(("num_gpus", "reserved"), [(None, {}), (0, {}), (0.25, {"num_gpus": 0.25})])
def test_gpus_are_reserved_when_there_are_any_to_reserve(num_gpus: float | None, reserved: dict[str, float]) -> None:
    options = deployment_options(spec(num_gpus=num_gpus, num_cpus=0.5))
    assert options["ray_actor_options"] == {"num_cpus": 0.5, **reserved}


def test_what_serve_is_asked_for() -> None:
    fixed = deployment_options(spec(num_replicas=3, num_cpus=0.25, drain_s=7.0))
    assert (fixed["num_replicas"], fixed["ray_actor_options"]) == (3, {"num_cpus": 0.25})
    assert (fixed["graceful_shutdown_timeout_s"], "autoscaling_config" in fixed) == (7.0, False)
    scaled = deployment_options(spec(scale={"min": 0, "max": 4}))
    assert "num_replicas" not in scaled
    scaling = scaled["autoscaling_config"]
    assert [scaling[f"{each}_replicas"] for each in ("min", "initial", "max")] == [0, 1, 4]
    assert json.loads(json.dumps(scaling["policy"])) == scaling["policy"]  # Serve carries it as JSON
