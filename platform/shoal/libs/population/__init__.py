"""Populations: many members of one architecture trained at once on one device, and how they learn from each other.

Nothing here imports Ray. Names that need torch are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.libs.population.population import Population

__all__ = ["Population"]

_HOMES = {"Population": "shoal.libs.population.population"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
