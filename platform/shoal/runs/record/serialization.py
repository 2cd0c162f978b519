"""What is said of a run, as SQLite, files and readers take it; or the error at once, of what none of them does.

Called by the recorder before anything is kept: what waits behind a row that can never be written would wait for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from shoal.errors import ConfigError

_RESERVED = frozenset({"step", "time"})  # columns of Run.metrics()
_MOST = 2**63 - 1  # what SQLite takes for a whole number


def escape_text(text: str) -> str:
    """SQLite and files take no half of a surrogate pair, which is how Python has bytes of others that are no text.

    A NUL is escaped too: it would be the end of the text to some of its readers.
    """
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def validate_text(field: str, value: str) -> str:
    """A text as it is stored. Raises ConfigError for what is none."""
    if not isinstance(value, str):
        raise ConfigError(field, value, "is no text")
    return escape_text(value)


@lru_cache(maxsize=4096)  # the same ones again and again
def validate_metric_name(name: str) -> str:
    """The name of a metric as it is stored. Raises ConfigError for what is none."""
    if not isinstance(name, str) or not name:
        raise ConfigError("values", name, "cannot name a metric", "give it a name of at least a letter")
    return escape_text(name)


def validate_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics as they are stored, by name. Raises ConfigError for what cannot name one, and for what is no number."""
    if not _RESERVED.isdisjoint(values):
        raise ConfigError(
            "values", sorted(map(str, values)), "'step' and 'time' cannot name a metric", "call it x/time"
        )
    return {validate_metric_name(name): _to_float(name, value) for name, value in values.items()}


def _to_float(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: torch's, of several values
        raise ConfigError(name, value, f"is no number ({error})", "log one number for each metric") from None


def validate_integer(field: str, value: int) -> int:
    """A step or a version. Raises ConfigError for what is none, and for more than the record can hold."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or found != value:
        raise ConfigError(field, value, "is no whole number")
    if not -_MOST <= found <= _MOST:
        raise ConfigError(field, value, "is beyond the whole numbers of 64 bits that the record holds")
    return found


def to_json(details: Mapping[str, object]) -> str:
    """As JSON, and as text where JSON has no word for it."""
    try:
        text = json.dumps(details, default=str, ensure_ascii=False)
    except (TypeError, ValueError):  # a key that is no text, or what holds itself
        text = json.dumps({name: str(value) for name, value in details.items()}, ensure_ascii=False)
    return text.encode(errors="replace").decode()  # no escape would do: it would be read as half a pair again
