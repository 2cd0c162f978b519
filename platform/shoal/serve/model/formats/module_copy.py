"""Whether a deep copy of a module stands by itself, or comes upon the module that it was copied from.

Called by `module`, whose versions are copies that are given weights of their own. Python copies no function with what
it encloses, and a tensor that a module keeps beside its parameters is another object than the parameter that takes its
place: a copy that reaches its weights by either would compute with the original's. Computes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_SKIPPED_TYPES = (type, ModuleType)  # what everything has in common leads to everything


def list_state_tensors(module: nn.Module) -> list[Tensor]:
    """What its versions give it: parameters and buffers."""
    return [*module.state_dict(keep_vars=True).values()]


def can_reach(copied: nn.Module, sought: Iterable[object], *, barred: Iterable[object] = ()) -> bool:
    """Whether one of the objects that are `sought` can be reached from a copy, by a way that leads over none `barred`.

    What a function finds in the globals of its file is no part of the copy.
    """
    wanted, seen = set(map(id, sought)), set(map(id, barred))
    ahead: list[Any] = [copied]
    while ahead:
        found = ahead.pop()
        if id(found) in wanted:
            return True
        if id(found) in seen or isinstance(found, _SKIPPED_TYPES):
            continue
        seen.add(id(found))
        if isinstance(found, FunctionType):
            ahead += (found.__closure__, found.__defaults__, found.__kwdefaults__, found.__dict__)
        else:
            ahead += gc.get_referents(found)
    return False
