"""What fails in an endpoint's controller, as its replicas hear of it: Ray's errors, without a cluster that raises."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.errors import ConnectionLost, InferenceError
from shoal.serve.controller.config import ControllerConfig
from shoal.serve.messages.replica_report import ReplicaReport, decode_report
from shoal.weights import WeightSnapshot


class FailingActor:
    """An actor's handle: every call of a method ends with its error, which was raised in the actor."""

    def __init__(self, **errors: Exception) -> None:
        self.call, self._errors = self, errors
        self.report = SimpleNamespace(remote=lambda encoded: self.remote("report"))

    async def remote(self, method: str, *arguments: object) -> None:
        from ray.exceptions import RayTaskError

        raise RayTaskError("method", "the traceback", self._errors[method]).as_instanceof_cause()


def test_what_fails_in_the_controller_stops_no_replica_and_is_told_to_people(tmp_path: Path) -> None:
    from shoal.serve.on_ray.controller_actor import RayControllerClient

    full, no = OSError("the disk is full"), InferenceError(409, "no")
    controller = RayControllerClient(ControllerConfig("e", "1", (), tmp_path, str(tmp_path), {}))
    controller._handle = FailingActor(report=full, status=full, administer=no)
    with pytest.raises(ConnectionLost, match=r"the controller of 'e' failed: .*the disk is full"):
        asyncio.run(controller.report(ReplicaReport("r1")))
    with pytest.raises(OSError, match="the traceback"):
        asyncio.run(controller.status())
    with pytest.raises(InferenceError, match="no"):
        asyncio.run(controller.administer({}, "me"))


def test_the_client_of_a_controller_calls_methods_that_the_controller_has(tmp_path: Path) -> None:
    from shoal.serve.controller.service import ControllerService
    from shoal.serve.on_ray.controller_actor import ControllerWorker, RayControllerClient

    async def answer(method: str, *arguments: object) -> list[object]:
        assert not method.startswith("_")
        assert method in vars(ControllerService)
        return []

    async def take(encoded: bytes) -> list[object]:
        assert "report" in vars(ControllerWorker.__ray_metadata__.modified_class)  # type: ignore[attr-defined]
        assert decode_report(encoded).replica == "r1"
        return []

    controller = RayControllerClient(ControllerConfig("e", "1", (), tmp_path, str(tmp_path), {}))
    controller._handle = SimpleNamespace(call=SimpleNamespace(remote=answer), report=SimpleNamespace(remote=take))

    async def call_everything() -> None:
        await controller.follow("r1", 0, 1.0)
        await controller.report(ReplicaReport("r1"))
        await controller.leave("r1")
        await controller.store_weights("m", WeightSnapshot.of(1, {}))
        await controller.fetch_weights("m", 1)
        await controller.administer({}, "me")
        await controller.load("m", {}, "me")
        await controller.unload("m", "me")
        await controller.status()

    asyncio.run(call_everything())
