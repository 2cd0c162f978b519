"""An endpoint's controller in the process of its only replica, for benchmarks without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.serve.controller.controller import EndpointController
from shoal.serve.messages.desired_state import EndpointPlan
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.weights import WeightSnapshot


class LocalController:
    """A replica's end of a controller in this process. No change and no weights go through it."""

    def __init__(self, controller: EndpointController) -> None:
        self._controller = controller

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        return await self._controller.follow(replica, known_generation, min(timeout_s, 0.5))

    async def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        return self._controller.report(report)

    async def leave(self, replica: str) -> None:
        self._controller.leave(replica)

    async def store_weights(self, model: str, snapshot: WeightSnapshot) -> None:
        self._controller.live.store_weights(model, snapshot)

    async def fetch_weights(self, model: str, version: int) -> WeightSnapshot | None:
        return self._controller.live.fetch_weights(model, version)

    async def administer(self, change: Mapping[str, Any], by: str) -> dict[str, Any]:
        raise NotImplementedError

    async def load(self, name: str, parameters: Mapping[str, Any], by: str) -> None:
        raise NotImplementedError

    async def unload(self, name: str, by: str) -> None:
        raise NotImplementedError

    async def status(self) -> dict[str, Any]:
        raise NotImplementedError
