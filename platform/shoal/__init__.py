"""Shoal: train, reinforce and serve PyTorch models on Ray as one loop of versioned weights.

    import shoal

    result = shoal.fit(MyTask, stop={"epochs": 3})                    # a network in the registry
    outputs = shoal.load("mytask").predict(inputs)                    # here, or from an endpoint:
    with shoal.serve("mytask") as endpoint, endpoint.client() as client:
        client.infer("mytask", inputs)

`import shoal` loads no torch and no ray: each name is imported at its first use, so a game client loads only what it
needs. The packages (`shoal.train`, `shoal.runs`, ...) are imported in the same way.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import errors, runs
    from shoal.actor import ActorClient
    from shoal.api import connect, fit, load_run, serve
    from shoal.client import AsyncClient, Client
    from shoal.data import Data
    from shoal.loaded import load
    from shoal.parallel.loss import Mean
    from shoal.registry import Registry
    from shoal.train import Task, TrainSpec

__version__ = "0.1.0"

__all__ = [
    "ActorClient",
    "AsyncClient",
    "Client",
    "Data",
    "Mean",
    "Registry",
    "Task",
    "TrainSpec",
    "__version__",
    "connect",
    "errors",
    "fit",
    "load",
    "load_run",
    "runs",
    "serve",
]

_HOMES = {
    **dict.fromkeys(("connect", "fit", "load_run"), "shoal.api"),
    **dict.fromkeys(("AsyncClient", "Client"), "shoal.client"),
    **dict.fromkeys(("Task", "TrainSpec"), "shoal.train"),
    "ActorClient": "shoal.actor",
    "Data": "shoal.data",
    "load": "shoal.loaded",
    "Mean": "shoal.parallel.loss",
    "Registry": "shoal.registry",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        if importlib.util.find_spec(f"shoal.{name}") is not None:
            return importlib.import_module(f"shoal.{name}")
        from shoal.plugins.library import find_sound_libraries

        for library in find_sound_libraries():
            if name in library.names:
                module, _, member = library.names[name].partition(":")
                loaded = importlib.import_module(module)
                return getattr(loaded, member) if member else loaded
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    from shoal.plugins.library import find_sound_libraries

    return sorted({*__all__, *(name for library in find_sound_libraries() for name in library.names)})
