"""An exponential moving average of the weights, which is evaluated and registered instead of the last ones.

Owns one averaged copy of each saved parameter on this rank, sharded like the parameter. Copies of half-precision
parameters are float32: a thousandth of a difference is below half precision, and the average would not move. Called by
the Trainer after each step of the optimiser. Buffers are not averaged: the averaged network has the newest ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shoal.parallel.model import ParallelModel


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, after each step.

    The decay starts low and rises to `decay` as (1 + steps) / (10 + steps), so that the initial random weights are soon
    forgotten.
    """

    def __init__(self, model: ParallelModel, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self._model = model
        saved = model.model_state()
        self._weights = {
            name: each
            for name, each in model.named_parameters()
            if name in saved and (each.is_floating_point() or each.is_complex())
        }
        self._averages = {  # with at least the precision of float32
            name: each.detach().to(torch.promote_types(each.dtype, torch.float32), copy=True)
            for name, each in self._weights.items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        """The averages on this rank."""
        return list(self._averages.values())

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the average."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        pairs = self._pairs()
        if pairs:
            averages = [average for _, average in pairs]
            get_ema_multi_avg_fn(decay)(
                averages, [weight.to(average.dtype) for weight, average in pairs], self.num_updates
            )

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Within the context, the model has the averaged weights; afterwards exactly its own. Not for training."""
        rounded = [(weight, average) for weight, average in self._pairs() if weight.dtype != average.dtype]
        own = [weight.clone() for weight, _ in rounded]
        self._swap()
        with torch.no_grad():
            for weight, average in rounded:
                weight.copy_(average)
        try:
            yield
        finally:
            self._swap()
            with torch.no_grad():
                for (weight, _), before in zip(rounded, own, strict=True):
                    weight.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of any plan: the averages by the parameters' names, and the number of updates."""
        return {"weights": dict(self._averages), "num_updates": torch.tensor(self.num_updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` that a checkpoint has filled."""
        self.num_updates = int(state["num_updates"])
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(state["weights"][name])

    def reset(self) -> None:
        """Start anew from the present weights."""
        self.num_updates = 0
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(self._weights[name])

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange weights and averages in place, one at a time, so that only one is duplicated."""
        reshard_modules(self._model.modules)
        for weight, average in self._pairs():
            if weight.dtype == average.dtype:
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight and its average: their parts on this rank."""
        return list(
            zip(_get_local_tensors(self._weights.values()), _get_local_tensors(self._averages.values()), strict=True)
        )


def reshard_modules(modules: Iterable[nn.Module]) -> None:
    """Let FSDP free the full weights of a forward pass; the next pass gathers them again."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _get_local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The part of each tensor on this rank, sharing its memory."""
    return [each.to_local() if isinstance(each, DTensor) else each.detach() for each in tensors]
