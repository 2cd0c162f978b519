"""The errors of a request that name its model: unknown, of an unknown version, or failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.errors import InferenceError

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
