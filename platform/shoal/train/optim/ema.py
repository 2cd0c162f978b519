"""An exponential moving average of the weights, which is evaluated and registered in place of the last ones.

Owns one averaged copy of each parameter that this rank holds, split as the parameter is, and in float32 where that is
of half precision: a thousandth of a difference is less than such a number can be told from the next one, and the
average would stand still. Called by the Trainer after each step of the optimiser. Buffers are not averaged: the
averaged network has the newest ones.
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

    The decay begins low and rises to `decay` as (1 + steps) / (10 + steps), so that the random weights of the beginning
    are soon forgotten.
    """

    def __init__(self, model: ParallelModel, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self._model = model
        self._weights = {
            name: each for name, each in model.named_parameters() if each.is_floating_point() or each.is_complex()
        }
        self._averages = {name: _copy_precise(each.detach()) for name, each in self._weights.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """The averages, as this rank holds them."""
        return list(self._averages.values())

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the average."""
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
        """Within, the model has the averaged weights; afterwards its own again, to the bit. Not for training."""
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
        """Take what `state_dict` gave, filled by a checkpoint."""
        self.num_updates = int(state["num_updates"])
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(state["weights"][name])

    def reset(self) -> None:
        """From the weights as they are now, as if there had been no step before."""
        self.num_updates = 0
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(self._weights[name])

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange weights and averages of one type in place, one at a time, so that only one is held twice."""
        reshard_modules(self._model.modules)
        for weight, average in self._pairs():
            if weight.dtype == average.dtype:
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight and its average: what of them lies on this rank."""
        return list(
            zip(_get_local_tensors(self._weights.values()), _get_local_tensors(self._averages.values()), strict=True)
        )


def reshard_modules(modules: Iterable[nn.Module]) -> None:
    """Let FSDP forget whole weights that it has kept from a forward pass: they are gathered at the next one."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _copy_precise(tensor: Tensor) -> Tensor:
    """A copy, of at least the precision of float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def _get_local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What of each tensor lies on this rank, sharing its memory."""
    return [each.to_local() if isinstance(each, DTensor) else each.detach() for each in tensors]
