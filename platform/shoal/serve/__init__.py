"""Endpoints: models behind HTTP and gRPC that batch without a timeout and swap versions without losing a request.

`shoal.serve("fashion@champion", num_replicas=2)` serves registered models from this process, and returns once all of
them answer (`shoal.api.serve`, which `shoal.serve` calls):

    with shoal.serve("fashion") as endpoint, endpoint.client() as client:
        client.infer("fashion", images)

Python sets `shoal.serve` to this package as soon as a part of it is imported, so the package itself is callable.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *models: str, **fields: Any) -> Any:
        """See `shoal.api.serve`."""
        return importlib.import_module("shoal.api").serve(*models, **fields)


sys.modules[__name__].__class__ = _CallablePackage
