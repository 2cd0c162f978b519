"""The blocks that a model repeats, such as the layers of a transformer: found, and all but a few left out.

What a model costs grows linearly with their number, so two short models tell the cost of a deep one. Called by
`fake_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from shoal.cost.fake_tensors import copy_model
from shoal.parallel.spmd import fsdp_layout
from shoal.parallel.tensor import plan

NUM_BLOCKS = (4, 6)  # of the two short models: with fewer, FSDP has not all of its buffers at once
MIN_BLOCKS = 8  # of a model that is shortened


@dataclass(frozen=True)
class RepeatedBlocks:
    """Equal children of one list or sequence, one after another.

    path:  of the list, in the model
    names: of the children in it
    """

    path: str
    names: tuple[str, ...]

    def keep(self, model: nn.Module, number: int) -> None:
        """Leave out all but the first `number` of them; other children keep their names."""
        for name in self.names[number:]:
            del model.get_submodule(self.path)._modules[name]

    def copy(self, model: nn.Module, number: int) -> nn.Module:
        """A copy of a fake model with the first `number` of them alone."""
        children = model.get_submodule(self.path)._modules
        every = dict(children)
        self.keep(model, number)
        try:
            return copy_model(model)
        finally:
            children.clear()
            children.update(every)


def find_repeated_blocks(model: nn.Module) -> RepeatedBlocks | None:
    """Those with the most parameters; None where no eight blocks are alike."""
    found: list[tuple[int, RepeatedBlocks]] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for _, group in groupby(module.named_children(), key=lambda item: _describe(item[1])):
            blocks = list(group)
            if len(blocks) >= MIN_BLOCKS and len({id(block) for _, block in blocks}) == len(blocks):
                size = sum(each.numel() for _, block in blocks for each in block.parameters())
                found.append((size, RepeatedBlocks(path, tuple(name for name, _ in blocks))))
    return max(found, key=lambda each: each[0])[1] if found else None


def _describe(block: nn.Module) -> str:
    parameters = [(name, each.shape, each.dtype, each.requires_grad) for name, each in block.named_parameters()]
    return repr((block, parameters))


@contextmanager
def keep_block_shares(share: float) -> Iterator[None]:
    """Let a shortened model be divided as the deep one is.

    share: the part of its parameters that the model still has
    """
    before = fsdp_layout.MIN_SHARE, fsdp_layout.MAX_SHARE, plan.MIN_LAYER_SHARE
    fsdp_layout.MIN_SHARE, fsdp_layout.MAX_SHARE, plan.MIN_LAYER_SHARE = (each / share for each in before)
    try:
        yield
    finally:
        fsdp_layout.MIN_SHARE, fsdp_layout.MAX_SHARE, plan.MIN_LAYER_SHARE = before
