"""The seam between a population and the ways of computing many members at once.

Owns `MemberChunk`, what an engine works on, and `MemberEngine`, what it must do. An engine never updates weights and
never chooses members. Two threads never share an engine; they may share the rows.
Legend: k members of a chunk, B samples of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.libs.population.member_rows import MemberRows
from shoal.libs.population.objective import MemberBatch, Objective

Tensors = Mapping[str, Tensor]
Inputs = tuple[Any, ...]
Generators = Sequence[torch.Generator] | None  # one a member in training; None in evaluation


class EngineMisfit(Exception):
    """An engine cannot compute this model; the message says why. Caught where the engine is chosen."""


@dataclass(frozen=True)
class MemberChunk:
    """Consecutive rows that are trained together.

    rows:       parameters, gradient_views and buffers are {name: [k, *shape]}, views of the population's rows
    generators: one a member, for dropout and augmentation
    """

    rows: MemberRows
    generators: Sequence[torch.Generator]

    def __len__(self) -> int:
        return len(self.rows)


class MemberEngine(ABC):
    """Computes gradients and outputs of a chunk.

    The constructor takes a model, which the engine may change and whose weights it ignores, and the objective. It
    raises EngineMisfit where it cannot compute the model.

    name:            as users write it
    max_chunk:       the most members of a chunk; None: any number
    """

    name: ClassVar[str]
    max_chunk: ClassVar[int | None] = None

    @abstractmethod
    def compute_gradients(self, chunk: MemberChunk, batch: MemberBatch) -> Tensor:
        """Write the gradient rows, and update the buffers as training does. Returns the losses [k], detached."""

    @abstractmethod
    def predict(self, chunk: MemberChunk, batch: MemberBatch) -> Any:
        """The outputs [k, B, ...] as in evaluation (dropout off, running statistics), without gradients."""


class DifferentiableEngine(MemberEngine):
    """The base of engines whose forward is one differentiable function of stacked parameters."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    @abstractmethod
    def forward(
        self, parameters: Tensors, buffers: Tensors, inputs: Inputs, *, is_own: bool, generators: Generators
    ) -> Any:
        """Outputs [k, B, ...].

        parameters: {name: [k, *shape]}, differentiable; buffers: {name: [k, *shape]}, changed in place in training
        inputs:     the model's arguments, [B, ...] for all members, or [k, B, ...] where is_own
        generators: one a member in training; None in evaluation
        """

    def compute_gradients(self, chunk: MemberChunk, batch: MemberBatch) -> Tensor:
        leaves = {name: view.detach().requires_grad_() for name, view in chunk.rows.parameters.items()}
        inputs = self.objective.find_inputs(batch)
        buffers, generators = chunk.rows.buffers, chunk.generators
        outputs = self.forward(leaves, buffers, inputs, is_own=batch.is_own, generators=generators)
        losses = self.objective.find_losses(outputs, batch)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        for view, gradient in zip(chunk.rows.gradient_views.values(), gradients, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
        return losses.detach()

    @torch.no_grad()
    def predict(self, chunk: MemberChunk, batch: MemberBatch) -> Any:
        inputs = self.objective.find_inputs(batch)
        parameters, buffers = chunk.rows.parameters, chunk.rows.buffers
        return self.forward(parameters, buffers, inputs, is_own=batch.is_own, generators=None)
