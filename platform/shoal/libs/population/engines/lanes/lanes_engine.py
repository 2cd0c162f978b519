"""The engine of members as lanes: a network of each input shape, compiled at its first batch.

Called through MemberEngine, where the trial chose it. On a CPU it wins for networks of small convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.differentiation import is_each_operation_needed
from shoal.libs.population.engines.engine import DifferentiableEngine, EngineMisfit
from shoal.libs.population.engines.lanes.lane_network import LaneNetwork
from shoal.libs.population.objective import Objective


class LanesEngine(DifferentiableEngine):
    """Raises EngineMisfit, at the first batch too, for a model that is no chain of known layers, with the reason."""

    name: ClassVar[str] = "lanes"

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__(objective)
        self.model = model
        self._networks: dict[tuple[int, ...], LaneNetwork] = {}

    def forward(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: tuple[Any, ...],
        *,
        is_own: bool,
        generators: Sequence[torch.Generator] | None,
    ) -> Tensor:
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise EngineMisfit("cannot be lanes because its input is not one tensor")
        samples = inputs[0][0] if is_own else inputs[0]
        if samples.device.type != "cpu":
            raise EngineMisfit(f"cannot be lanes because its device is {samples.device.type}, not a CPU")
        if samples.requires_grad or is_each_operation_needed():
            raise EngineMisfit("cannot be lanes because its inputs need gradients: engine=auto takes another")
        shape = tuple(samples.shape[1:])
        if shape not in self._networks:
            self._networks[shape] = LaneNetwork(self.model, samples)
        network = self._networks[shape]
        return network.forward(parameters, buffers, inputs[0], is_own=is_own, generators=generators)
