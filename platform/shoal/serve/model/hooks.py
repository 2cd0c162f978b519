"""The user's code before and after a forward: a `module:function` from a dict of arrays to another.

Called by a loaded model, once per batch, in the forward's thread. An error of a hook maps to an answer:

| hook        | raises               | the request gets                                                        |
|-------------|----------------------|-------------------------------------------------------------------------|
| preprocess  | ValueError           | 422: its input does not fit the model (ConfigError is a ValueError)     |
| preprocess  | ConfigError, DataError | 422, with the input that its `field` names                            |
| either      | InferenceError       | that                                                                    |
| either      | anything else        | 500; its text as `ModelError` says                                      |
| either      | gives no dict of arrays | 500, naming what it gave                                             |

The batcher splits a failed batch, so that the error reaches only the request that caused it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from shoal.errors import ConfigError, InferenceError, ModelError
from shoal.registry.manifest import ModelFactory, find_callable
from shoal.serve.model.column_drift import Ranges
from shoal.serve.model.formats import Arrays
from shoal.serve.spec.model_options import ModelOptions


class Hook:
    """A step, named by its `reference`. `ranges`: what a preprocessing step, or the object of which it is a method, has
    seen in training (`column_drift`)."""

    def __init__(self, field: str, reference: str, function: Callable[[Arrays], Any]) -> None:
        self._field = field
        self._who = f"{field} {reference}"
        self._function = function
        owner = getattr(function, "__self__", None)
        self.ranges: Ranges = getattr(function, "ranges", None) or getattr(owner, "ranges", None) or {}

    def __call__(self, arrays: Arrays) -> Arrays:
        who = self._who
        try:
            given = self._function(dict(arrays))
        except InferenceError:
            raise
        except Exception as error:
            if self._field == "preprocess" and isinstance(error, ValueError):
                if isinstance(error, ConfigError) and error.field in arrays:  # it names a column of the request
                    raise InferenceError(422, str(error), field=error.field) from error
                raise InferenceError(422, f"{who}: {error}") from error
            raise ModelError(500, f"{who}: {type(error).__name__}: {error}") from error
        if not isinstance(given, Mapping):
            raise InferenceError(500, f"{who}: expected a dict of arrays, it gave {type(given).__name__}")
        for name, value in given.items():
            if not isinstance(value, np.ndarray):
                raise InferenceError(500, f"{who}: expected an array for {name!r}, it gave {type(value).__name__}")
        return given


def find_hook(field: Literal["preprocess", "postprocess"], factory: ModelFactory, options: ModelOptions) -> Hook | None:
    """Find the hook that the options name, or else the registered one; None without either.

    Raises ConfigError, and any error of the registered code when it is built.
    """
    reference: str | None = getattr(options, field)
    if reference is not None:
        return Hook(field, reference, find_callable(field, reference)) if reference else None
    hook = factory.make_hook(field)
    return None if hook is None else Hook(field, getattr(factory, field), hook)
