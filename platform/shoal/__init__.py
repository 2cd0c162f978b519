"""Shoal: train, reinforce and serve PyTorch models on Ray as one loop of versioned weights.

`import shoal` is lazy: it loads no torch and no ray, so that a game client pays only for what it uses.
Submodules load on first touch: `shoal.runs`, `shoal.registry`, `shoal.actor`, ...
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

_ROOMS = frozenset(
    {
        *("errors", "home", "config", "wire", "weights", "runs", "registry", "models", "checkpoint", "open_inference"),
        *("actor", "client", "cluster", "rl", "serve", "flows", "cli", "train", "parallel", "data", "cost"),
        *("gc_freeze", "batch_tree", "atomic_file", "network_address", "cpu_count"),
    }
)
__all__ = ["__version__"]


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return importlib.import_module(f"shoal.{name}")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_ROOMS | {"__version__"})
