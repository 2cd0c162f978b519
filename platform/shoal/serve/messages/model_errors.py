"""The error of a request, in every protocol: of one that names an unknown model or version, that its model failed on,
or that ended with an exception."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from shoal.errors import Closed, ConnectionLost, InferenceError

logger = logging.getLogger(__name__)

OTHER_TENSORS = "it takes or gives other tensors than what is served: deploy it by another name"


def unknown_model(name: str, models: Iterable[str]) -> InferenceError:
    """The 404 for a model that is not among the served `models`."""
    there = ", ".join(map(repr, models)) or "none"
    return InferenceError(404, f"there is no model {name[:200]!r}; this endpoint serves {there}")


def undescribed_model(name: str) -> InferenceError:
    """The 503 for a model of which nothing is known while the registry cannot be read."""
    problem = f"model {name!r} is not known yet: the registry cannot be read; try again later"
    return InferenceError(503, problem, retry_after_s=1.0)


def unloaded_model(name: str, error: str) -> InferenceError:
    """The 503 for a model that a replica is to have, and has not yet, or cannot load."""
    state = f"cannot be loaded: {error}" if error else "is loading; try again later"
    return InferenceError(503, f"model {name!r} {state}", retry_after_s=1.0)


def unknown_version(model: str, version: str, versions: Sequence[int]) -> InferenceError:
    """The 404 for a version that is not among the model's loaded `versions`. `version`: as the client names it."""
    there = ", ".join(map(str, versions)) or "none yet"
    return InferenceError(404, f"model {model!r} has no version {version[:40]!r}; it serves {there}")


def find_version(model: str, text: str, versions: Sequence[int]) -> int:
    """The requested version, which is one of `versions`. Raises InferenceError (404)."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1
    if number not in versions:
        raise unknown_version(model, text, versions)
    return number


def failed_model(reference: str) -> InferenceError:
    """The 500 that conceals a model's own error. `reference`: by which the log has it."""
    return InferenceError(500, f"the model failed on this request: its endpoint's log has the reason ({reference})")


def to_inference_error(error: Exception) -> InferenceError:
    """The client's error for any exception of a request; a bug is logged."""
    if isinstance(error, InferenceError):
        return error
    if isinstance(error, Closed):
        return InferenceError(503, "the endpoint is closing; try again later", retry_after_s=1.0)
    if isinstance(error, ConnectionLost):
        problem = f"the endpoint's controller is away, models are served as they are: {error}"
        return InferenceError(503, problem, retry_after_s=1.0)
    logger.error("a request failed", exc_info=error)
    return InferenceError(500, f"this request failed: {type(error).__name__}: {error}")
