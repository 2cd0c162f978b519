"""Dropout whose masks come from one generator a member, so that a member drops what its solo run would drop.

Owns the masks and the exchange of a model's dropout layers. Called by engines. Masks are drawn as nn.Dropout draws
them on a CPU for contiguous tensors: `bernoulli_(1 - p)` of the activations' shape, from the member's generator. On a
CUDA device, where nn.Dropout has a kernel of its own, masks are the same for every engine, but not nn.Dropout's.
Legend: k members of a chunk, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Of the shape of an activation [B, C, ...]: the dimensions that a mask has; the rest are dropped together.
_MASK_DIMS: dict[type[nn.Module], int | None] = {nn.Dropout: None, nn.Dropout1d: 2, nn.Dropout2d: 2, nn.Dropout3d: 2}


def draw_masks(shape: Sequence[int], p: float, generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Masks [k, *shape] of zeros and 1 / (1 - p), one generator a member."""
    masks = torch.empty(len(generators), *shape, dtype=like.dtype, device=like.device)
    for mask, generator in zip(masks, generators, strict=True):
        mask.bernoulli_(1 - p, generator=generator)
    return masks.div_(1 - p)


class DropoutSource:
    """Where the dropout layers of one model find the generators of the present chunk.

    member: which one the model computes: an index, or under torch.vmap a batched tensor; None: all, [k, B, ...]
    """

    def __init__(self) -> None:
        self.generators: Sequence[torch.Generator] = ()
        self.member: int | Tensor | None = None


class MemberDropout(nn.Module):
    """A dropout layer with masks of the source's generators."""

    def __init__(self, p: float, mask_dims: int | None, source: DropoutSource) -> None:
        super().__init__()
        self.p = p
        self.mask_dims = mask_dims
        self.source = source

    def forward(self, activations: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return activations
        if self.p == 1:
            return activations * 0
        member, generators = self.source.member, self.source.generators
        shape = activations.shape[1:] if member is None else activations.shape
        if self.mask_dims is not None:
            shape = shape[: self.mask_dims] + (1,) * (len(shape) - self.mask_dims)
        if member is None:
            return activations * draw_masks(shape, self.p, generators, activations)
        if isinstance(member, int):
            return activations * draw_masks(shape, self.p, generators[member : member + 1], activations)[0]
        empty = torch.empty(0, dtype=activations.dtype, device=activations.device)
        mask: Tensor = _DrawMask.apply(member, empty, tuple(shape), self.p, generators)  # type: ignore[no-untyped-call]
        return activations * mask


class _DrawMask(torch.autograd.Function):
    """Under torch.vmap: a mask for each member of the batched index."""

    @staticmethod
    def forward(member: Tensor, like: Tensor, shape: Any, p: float, generators: Any) -> Tensor:
        raise NotImplementedError("is called under torch.vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved: a mask has no gradient."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, member: Tensor, like: Tensor, shape: Any, p: float, generators: Any
    ) -> tuple[Tensor, int]:
        return draw_masks(shape, p, generators, like), 0


def replace_dropout(model: nn.Module) -> tuple[nn.Module, DropoutSource]:
    """The model with its dropout layers exchanged in place, and their source."""
    source = DropoutSource()
    if type(model) in _MASK_DIMS:
        return _exchange(model, source), source
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in _MASK_DIMS:
                setattr(module, name, _exchange(child, source))
    return model, source


def _exchange(layer: nn.Module, source: DropoutSource) -> MemberDropout:
    assert isinstance(layer.p, float | int)
    return MemberDropout(float(layer.p), _MASK_DIMS[type(layer)], source)
