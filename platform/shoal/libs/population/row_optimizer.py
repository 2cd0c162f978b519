"""SGD, Adam and AdamW over rows of members, each with its own hyper-parameters.

Equal to torch.optim's for each member, to rounding. Two ways: a handful of kernels over all rows with hyper-parameters
as columns, or torch's fused kernel for each row, which on a CPU reads and writes every number once. Called after an
engine wrote the gradients, which are scratch thereafter.
Legend: k members of a chunk, P parameters of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.libs.population.member_rows import MemberRows

OptimizerName = Literal["sgd", "adam", "adamw"]
SLOTS = {"sgd": ("momentum",), "adam": ("mean", "square"), "adamw": ("mean", "square")}

# On a CPU, rows of at least so many parameters are updated one by one: µs a member with 5,000 and with 61,706, columns
# beside fused: SGD 3.8, 37 beside 3.7, 18; Adam 16, 700 beside 5.6, 34.
FUSED_SIZE = {"sgd": 8192, "adam": 1024, "adamw": 1024}


@dataclass(frozen=True)
class RowOptimizer:
    """An optimizer of torch.optim's formulas. betas and eps are those of all members."""

    name: OptimizerName = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.name not in SLOTS:
            raise ConfigError("optimizer", self.name, "has no rows", f"one of {', '.join(SLOTS)}")

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its state, each [k, P]."""
        return SLOTS[self.name]

    @torch.no_grad()
    def update(self, rows: MemberRows, columns: Mapping[str, Tensor]) -> None:
        """Take one step of every row.

        columns: learning_rate, weight_decay and, for SGD, momentum: [k, 1]
        """
        rows.steps.add_(1)
        is_fused = rows.weights.device.type == "cpu" and rows.layout.num_parameters >= FUSED_SIZE[self.name]
        if self.name == "sgd":
            _update_sgd_rows(rows, columns) if is_fused else _update_sgd(rows, columns)
        elif is_fused:
            self._update_adam_rows(rows, columns)
        else:
            self._update_adam(rows, columns)

    def _update_adam(self, rows: MemberRows, columns: Mapping[str, Tensor]) -> None:
        """Adam (arXiv:1412.6980, algorithm 1), or AdamW (arXiv:1711.05101, algorithm 2)."""
        weights, gradients = rows.weights, rows.gradients
        mean, square = rows.slots["mean"], rows.slots["square"]
        rate, decay = columns["learning_rate"], columns["weight_decay"]
        if self.name == "adamw":
            weights.mul_(1 - rate * decay)
        else:
            gradients.addcmul_(weights, decay)
        steps, (beta1, beta2) = rows.steps.double().unsqueeze(1), self.betas
        corrected_rate = (rate / (1 - beta1**steps)).to(weights.dtype)
        correction = (1 - beta2**steps).sqrt_().to(weights.dtype)
        mean.lerp_(gradients, 1 - beta1)
        square.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        denominator = (square.sqrt() / correction).add_(self.eps)
        weights.sub_(denominator.reciprocal_().mul_(mean).mul_(corrected_rate))

    def _update_adam_rows(self, rows: MemberRows, columns: Mapping[str, Tensor]) -> None:
        kernel = torch._fused_adam_ if self.name == "adam" else torch._fused_adamw_
        tensors = (rows.weights, rows.gradients, rows.slots["mean"], rows.slots["square"], rows.steps)
        values = (columns["learning_rate"].flatten().tolist(), columns["weight_decay"].flatten().tolist())
        for *row, rate, decay in zip(*(tensor.unbind() for tensor in tensors), *values, strict=True):
            weights, gradients, mean, square, step = ([each] for each in row)
            kernel(
                weights, gradients, mean, square, [], step, lr=rate, beta1=self.betas[0], beta2=self.betas[1],
                weight_decay=decay, eps=self.eps, amsgrad=False, maximize=False,
            )  # fmt: skip


def _update_sgd(rows: MemberRows, columns: Mapping[str, Tensor]) -> None:
    """v = momentum v + g + decay w; w = w - rate v. The first v is the first g, as the buffer starts at zero."""
    gradients, momentum = rows.gradients, rows.slots["momentum"]
    gradients.addcmul_(rows.weights, columns["weight_decay"])
    momentum.mul_(columns["momentum"]).add_(gradients)
    rows.weights.addcmul_(momentum, columns["learning_rate"], value=-1)


def _update_sgd_rows(rows: MemberRows, columns: Mapping[str, Tensor]) -> None:
    tensors = (rows.weights, rows.gradients, rows.slots["momentum"])
    values = (columns[name].flatten().tolist() for name in ("learning_rate", "momentum", "weight_decay"))
    for *row, rate, momentum, decay in zip(*(tensor.unbind() for tensor in tensors), *values, strict=True):
        weights, gradients, buffer = ([each] for each in row)
        torch._fused_sgd_(
            weights, gradients, buffer if momentum else [], lr=rate, momentum=momentum, weight_decay=decay,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
