"""The least that a plan asks of a Task, and a small model to plan for."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


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


class Classifier(Learnable):
    """Of the last tensor of a batch, by logits [..., classes], which may be those of a result of transformers.

    cuts: where the stages of a pipeline begin, if a class says so
    """

    cuts: list[str] | None = None

    def pack(self, batch: tuple[Tensor, ...]) -> Any:
        """The batch as a user's data would give it."""
        return batch

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return tuple(batch[:-1])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        logits = getattr(outputs, "logits", outputs)
        return functional.cross_entropy(logits.flatten(0, -2), batch[-1].flatten())

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        logits = getattr(outputs, "logits", outputs)
        return {"accuracy": (logits.argmax(-1) == batch[-1]).float().mean()}

    def pipeline_cuts(self) -> list[str] | None:
        return self.cuts


def mlp(hidden: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 4))
