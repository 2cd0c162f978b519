"""Convert a run's values to what SQLite, files and readers accept, or raise at once.

Called by the recorder before anything is queued: a row that can never be written would block all later ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from shoal.errors import ConfigError

_RESERVED = frozenset({"step", "time"})  # columns of Run.metrics()
_MOST = 2**63 - 1  # SQLite's largest integer


def escape_text(text: str) -> str:
    """Escape lone surrogates (Python's form of bytes that are not text): SQLite and files reject them.

    A NUL is escaped too: some readers would end the text there.
    """
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def validate_text(field: str, value: str) -> str:
    """A text as it is stored. Raises ConfigError for a value that is not text."""
    if not isinstance(value, str):
        raise ConfigError(field, value, "is no text")
    return escape_text(value)


@lru_cache(maxsize=4096)  # the same names recur
def validate_metric_name(name: str) -> str:
    """The name of a metric as it is stored. Raises ConfigError for an invalid one."""
    if not isinstance(name, str) or not name:
        raise ConfigError("values", name, "cannot name a metric", "give it a name of at least a letter")
    return escape_text(name)


def validate_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics as they are stored, by name. Raises ConfigError for an invalid name or a value that is not a number."""
    if not _RESERVED.isdisjoint(values):
        problem = "'step' and 'time' cannot name a metric"
        raise ConfigError("values", sorted(map(str, values)), problem, "call it x/time")
    return {validate_metric_name(name): _to_float(name, value) for name, value in values.items()}


def _to_float(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: torch's, of several values
        raise ConfigError(name, value, f"is no number ({error})", "log one number for each metric") from None


def validate_integer(field: str, value: int) -> int:
    """A step or a version. Raises ConfigError for a value that is not an integer or exceeds the record's range."""
    try:
        integer = int(value)
    except (TypeError, ValueError, OverflowError):
        integer = None
    if integer is None or integer != value:
        raise ConfigError(field, value, "is no whole number")
    if not -_MOST <= integer <= _MOST:
        raise ConfigError(field, value, "is beyond the whole numbers of 64 bits that the record holds")
    return integer


def to_json(details: Mapping[str, object]) -> str:
    """Write as JSON; values that JSON cannot hold become text."""
    try:
        text = json.dumps(details, default=str, ensure_ascii=False)
    except (TypeError, ValueError):  # a key that is not text, or a value that contains itself
        text = json.dumps({name: str(value) for name, value in details.items()}, ensure_ascii=False)
    return text.encode(errors="replace").decode()  # an escape would be read as a lone surrogate again
