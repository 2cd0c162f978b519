"""The blocks of a model whose sharded parameters are gathered together.

Called by `fsdp` and `pipeline`, which divide a model by them, and by `placement`, which shows it. Uses the model alone,
and loads none of torch's sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

MIN_SHARE = 0.01  # of all parameters: a smaller block is gathered with the rest of the model
MAX_SHARE = 0.5  # a larger block is divided further, if possible


def find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of lists and sequences whose parameters are gathered together, apart from other blocks'.

    A parameter that is also used outside its block (a tied weight) keeps the block in the model's own group. A module
    with `is_one_block` is not divided: ranks differ in how often it calls its layers, as one over trees does.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    holders = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    yield from _iter_blocks(model, "", total, holders)


def _iter_blocks(module: nn.Module, prefix: str, total: int, holders: Counter[int]) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        size = sum(parameter.numel() for parameter in child.parameters())
        is_one = getattr(child, "is_one_block", False)
        inner = [] if is_one else list(_iter_blocks(child, f"{path}.", total, holders))
        divides = size > MAX_SHARE * total and len(inner) > 1
        if not is_list or divides or (isinstance(child, (nn.ModuleList, nn.Sequential)) and inner):
            yield from inner
        elif size >= MIN_SHARE * total and _is_self_contained(child, holders) and not isinstance(child, nn.ModuleList):
            yield path, child


def _is_self_contained(block: nn.Module, holders: Counter[int]) -> bool:
    own = Counter(id(each) for _, each in block.named_parameters(remove_duplicate=False))
    return all(holders[each] == count for each, count in own.items())
