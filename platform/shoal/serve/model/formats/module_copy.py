"""Checks whether a deep copy of a module is independent of the original.

Called by `module`, whose versions are copies with their own weights. Python does not copy a function's closure, and a
tensor that a module stores outside its parameters is not the parameter that replaces it. A copy that reaches its
weights by either would compute with the original's. Computes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_SKIPPED_TYPES = (type, ModuleType)  # shared objects lead to every other


def list_state_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that a version replaces: parameters and buffers."""
    return [*module.state_dict(keep_vars=True).values()]


def can_reach(copied: nn.Module, sought: Iterable[object], *, barred: Iterable[object] = ()) -> bool:
    """Whether one of the `sought` objects can be reached from a copy without passing a `barred` one.

    The globals of a function's file are not part of the copy.
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
