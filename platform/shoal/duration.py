"""Durations as people write them: 30m, 90s, 2h. Used by specs and the command line."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")


def parse_duration(text: str) -> float | None:
    """Seconds; None for a text that is no duration."""
    found = _WRITTEN.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _UNITS[found[2]]


def _to_seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    seconds = parse_duration(value)
    return value if seconds is None else seconds


Duration = Annotated[float, BeforeValidator(_to_seconds), Field(ge=0, allow_inf_nan=False)]
"""Seconds, or a text such as 30m."""
