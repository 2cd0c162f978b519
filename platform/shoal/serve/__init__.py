"""Endpoints: models behind HTTP and gRPC that batch without a timeout and swap versions without losing a request.

Python sets `shoal.serve` to this package as soon as a part of it is imported. So the package itself is callable, as the
function `shoal.api.serve`, whose help it shows.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

_OWN_TEXT = __doc__


def _load_function() -> Any:
    return importlib.import_module("shoal.api").serve


class _CallablePackage(ModuleType):
    def __call__(self, *models: str, **fields: Any) -> Any:
        """See `shoal.api.serve`."""
        return _load_function()(*models, **fields)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """The function's signature and text, before the package's own."""
        function = _load_function()
        return f"serve{inspect.signature(function)}\n\n{inspect.getdoc(function)}\n\n{_OWN_TEXT}"


sys.modules[__name__].__class__ = _CallablePackage
