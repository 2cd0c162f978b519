"""What members minimise and are measured by: a user's functions of one member, applied to many at once.

Owns `MemberBatch`, the batch of a step, and `Objective`. Called by engines and by Population. Knows no rows.
Legend: k members of a chunk, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.batch_tree import count_samples, map_tensors, tensors_of
from shoal.errors import ConfigError, summarize_error
from shoal.extend.parallel import Loss, get_value, split_mean

LossFunction = Callable[[Any, Any], Loss]
InputsFunction = Callable[[Any], tuple[Any, ...]]
MetricsFunction = Callable[[Any, Any], Mapping[str, Loss]]

FEW = 16  # members, whose losses cost less than torch.vmap

# What users' functions and models raise that are computed in another way than they were written for.
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


@dataclass(frozen=True)
class MemberBatch:
    """A batch for a chunk of members: a tensor, or a tuple, list or mapping of tensors.

    is_own: each member has its own samples, tensors [k, B, ...]; otherwise all share [B, ...]
    """

    content: Any
    is_own: bool = False

    def of_member(self, index: int) -> Any:
        """The batch [B, ...] of one member of the chunk."""
        return map_tensors(self.content, lambda tensor: tensor[index]) if self.is_own else self.content

    def narrow(self, start: int, length: int) -> MemberBatch:
        """The part of some members."""
        if not self.is_own:
            return self
        return MemberBatch(map_tensors(self.content, lambda tensor: tensor[start : start + length]), True)

    def select(self, members: Sequence[int]) -> MemberBatch:
        """The part of members anywhere in the batch: in place where they follow each other."""
        if not self.is_own:
            return self
        if list(members) == list(range(members[0], members[0] + len(members))):
            return self.narrow(members[0], len(members))
        return MemberBatch(map_tensors(self.content, lambda tensor: tensor[list(members)]), True)

    def to(self, device: torch.device) -> MemberBatch:
        """The batch on a device; itself where it lies there."""
        if all(tensor.device == device for tensor in tensors_of(self.content)):
            return self
        return MemberBatch(map_tensors(self.content, lambda tensor: tensor.to(device, non_blocking=True)), self.is_own)


def default_inputs(batch: Any) -> tuple[Any, ...]:
    """The model's positional arguments: all but the last of a tuple, `batch["inputs"]` of a dict, or the batch."""
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        if "inputs" not in batch:
            raise ConfigError("inputs", ", ".join(map(str, batch)), "the batch has no 'inputs'", "give inputs=...")
        return (batch["inputs"],)
    return tuple(batch[:-1])


@dataclass
class Objective:
    """The functions of one member.

    loss:       (outputs, batch) to a scalar, the mean over the samples, or a Mean
    inputs:     the model's positional arguments of a batch
    metrics:    (outputs, batch) to scalars, each a mean over the samples, or a Mean
    is_stacked: whether the functions work under torch.vmap, as far as is known; else they are called for each member
    reason:     why they do not
    """

    loss: LossFunction
    inputs: InputsFunction = default_inputs
    metrics: MetricsFunction | None = None
    is_stacked: bool = True
    reason: str = ""

    def find_inputs(self, batch: MemberBatch) -> tuple[Any, ...]:
        """The model's arguments: tensors [B, ...] of a shared batch, [k, B, ...] of own batches."""
        if not batch.is_own or self.inputs is default_inputs:
            return self.inputs(batch.content)
        size = len(next(iter(tensors_of(batch.content))))
        inputs: tuple[Any, ...] = self._apply(self.inputs, size, batch.content, in_dims=(0,))
        return inputs

    def find_losses(self, outputs: Any, batch: MemberBatch) -> Tensor:
        """Losses [k] of outputs [k, B, ...]."""
        losses: Tensor = self._apply_to_outputs(lambda *of: get_value(self.loss(*of)), outputs, batch)
        return losses

    def measure(self, outputs: Any, batch: MemberBatch) -> dict[str, Tensor]:
        """Sum and count of the loss and of each metric over a batch, each [k, 2]."""
        num_samples = count_samples(batch.of_member(0))

        def measure_member(outputs: Any, content: Any) -> dict[str, Tensor]:
            values = {"loss": self.loss(outputs, content)}
            if self.metrics is not None:
                values |= self.metrics(outputs, content)
            return {name: split_mean(value, num_samples) for name, value in values.items()}

        measured: dict[str, Tensor] = self._apply_to_outputs(measure_member, outputs, batch)
        return measured

    def _apply_to_outputs(self, function: Callable[..., Any], outputs: Any, batch: MemberBatch) -> Any:
        size = len(next(iter(tensors_of(outputs))))
        return self._apply(function, size, outputs, batch.content, in_dims=(0, 0 if batch.is_own else None))

    def _apply(self, function: Callable[..., Any], size: int, *arguments: Any, in_dims: tuple[int | None, ...]) -> Any:
        """Call it under torch.vmap; for few members on a CPU once for each: vmap's first call loads 45 MB."""
        device = next(iter(tensors_of(arguments[0]))).device
        if self.is_stacked and (size > FEW or device.type != "cpu"):
            try:
                return torch.vmap(function, in_dims)(*arguments)
            except MODEL_ERRORS as error:  # what the function raises by itself, it raises again below
                self.is_stacked, self.reason = False, summarize_error(error)

        def take(index: int) -> list[Any]:
            parts = zip(arguments, in_dims, strict=True)
            return [each if dim is None else map_tensors(each, lambda tensor: tensor[index]) for each, dim in parts]

        return stack_trees([function(*take(index)) for index in range(size)])


def stack_trees(trees: Sequence[Any]) -> Any:
    """Trees of tensors of one form, as one tree of tensors with one more dimension, the first."""
    stacked = iter([torch.stack(each) for each in zip(*map(tensors_of, trees), strict=True)])
    return map_tensors(trees[0], lambda _: next(stacked))
