"""The least that a plan asks of a Task, and a small model to plan for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Learnable:
    """First element in, mean out."""

    def __init__(self, plan: dict[str, str] | None = None) -> None:
        self.plan = plan

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.float().mean()

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {}

    def tensor_plan(self) -> dict[str, str] | None:
        return self.plan

    def pipeline_cuts(self) -> list[str] | None:
        return None


def mlp(hidden: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 4))
