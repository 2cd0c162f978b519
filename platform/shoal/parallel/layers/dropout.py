"""Dropout whose masks do not depend on the plan: the same seed, step and layer give each sample the same mask.

Each mask is drawn for the full global micro-batch, from a generator seeded by (seed, step, micro-step, layer, call),
and each data rank takes the rows of its samples. This applies to `nn.Dropout` and `nn.Dropout1d/2d/3d`. Other random
operations of a model (functional dropout, as in `nn.MultiheadAttention` and between the layers of `nn.LSTM`,
`AlphaDropout`, `torch.rand`) are seeded by (seed, step, micro-step, data rank): they are repeatable, and ranks that
split layers agree on them, but data ranks draw independently, and differently from one process. So do compiled layers,
because a generator of their own would break their graph.

Called by every plan when it is built, and once for each micro-step.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

_MASK_64 = (1 << 64) - 1


def mix_seed(*numbers: int) -> int:
    """A seed of 63 bits from several numbers (SplitMix64's finaliser)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state >> 1


class TensorPart(NamedTuple):
    """One of `number` equal parts along a dimension."""

    dim: int
    which: int
    number: int


class DropoutRng:
    """All random operations of a step. One object for each rank, shared by its dropout layers."""

    def __init__(self, seed: int, data_rank: int, num_data_ranks: int, device: torch.device) -> None:
        self.seed = seed
        self.data_rank = data_rank
        self.num_data_ranks = num_data_ranks
        self.num_samples = 0
        self._generator = torch.Generator(device)
        self._global = [torch.default_generator]
        if device.type == "cuda":
            self._global.append(torch.cuda.default_generators[device.index])
        self._key = (seed, 0, 0)
        self._calls: dict[tuple[int, ...], int] = {}
        self._seeds_by_token: dict[int, int] = {}
        self._step = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> DropoutRng:
        return self  # a copy of the model still belongs to this rank

    def begin_micro_step(self, step: int, micro_step: int, num_samples: int) -> None:
        """Assign the following draws to this micro-step, of so many samples on this rank."""
        if step != self._step:
            self._calls.clear()
            self._seeds_by_token.clear()
            self._step = step
        self.num_samples = num_samples
        self._key = (self.seed, step, micro_step)
        seed = mix_seed(*self._key, self.data_rank)
        for generator in self._global:
            generator.manual_seed(seed)

    def draw_mask(self, layer: int, shape: torch.Size, keep: float, like: Tensor, part: TensorPart | None) -> Tensor:
        """Ones with probability `keep` and zeros, [*shape]: the part of this rank's samples in the global mask.

        part: this rank's part of a dimension that tensor ranks split
        """
        # Recomputing by activation checkpointing restores the state of PyTorch's own generator: a token drawn from it
        # identifies the call. A layer called again draws another mask.
        token = int(torch.empty((), dtype=torch.int64).random_().item())
        if token not in self._seeds_by_token:
            key = (*self._key, layer)
            self._calls[key] = self._calls.get(key, -1) + 1
            self._seeds_by_token[token] = mix_seed(*key, self._calls[key])
        self._generator.manual_seed(self._seeds_by_token[token])
        full = list(shape)
        if part is not None and shape[part.dim] == 1:  # a mask of full channels, which are not split
            part = None
        if part is not None:
            full[part.dim] *= part.number
        dim = self._sample_dim(shape)
        if dim is not None:
            full[dim] *= self.num_data_ranks
        mask = torch.empty(full, dtype=like.dtype, device=like.device).bernoulli_(keep, generator=self._generator)
        if dim is not None and self.num_data_ranks > 1:
            mask = mask.narrow(dim, self.data_rank * shape[dim], shape[dim])
        if part is not None:
            mask = mask.narrow(part.dim, part.which * shape[part.dim], shape[part.dim])
        return mask

    def _sample_dim(self, shape: torch.Size) -> int | None:
        """The dimension of the samples: the first, of which each sample may have several rows, or the second."""
        if not self.num_samples or not len(shape):
            return None
        if shape[0] == self.num_samples:
            return 0
        if len(shape) > 1 and shape[1] == self.num_samples:
            return 1
        return 0 if shape[0] % self.num_samples == 0 else None


class SeededDropout(nn.Dropout):
    """`nn.Dropout` and its relatives, with masks from `Draws`. Zeroes whole channels when `channels` is true."""

    rng: DropoutRng
    layer: int
    channels: bool
    part: TensorPart | None

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return (torch.feature_dropout if self.channels else torch.dropout)(input, self.p, self.training)
        if not self.training or self.p == 0.0:
            return input
        if self.p == 1.0:
            return input * 0.0
        shape = input.shape
        if self.channels:
            shape = torch.Size([*shape[:2], *(1 for _ in shape[2:])])
        mask = self.rng.draw_mask(self.layer, shape, 1.0 - self.p, input, self.part)
        return input * mask / (1.0 - self.p)


_CHANNELS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}


def seed_dropout(model: nn.Module, draws: DropoutRng) -> None:
    """Let the dropout layers of `model` draw from `draws`, in place. Layers are distinguished by their names."""
    for name, module in model.named_modules():
        if type(module) in _CHANNELS:
            channels = _CHANNELS[type(module)]
            module.__class__ = SeededDropout
            assert isinstance(module, SeededDropout)
            module.rng = draws
            module.layer = crc32(name.encode())
            module.channels = channels
            module.part = None
