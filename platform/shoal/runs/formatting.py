"""Numbers and times for people, the same in the report and on the terminal, and durations as people write them. Pure
functions."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

_SHARE = re.compile(r"^(wait|flops)/|_fraction$|\b(success|win)_rate\b")  # metrics from 0 to 1 that are shown as such
_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def format_number(value: float) -> str:
    """Integers with separators, other numbers with four significant digits: 1,234,568, 0.000123, 3e-5, and 1.000 for
    what is only nearly 1."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if (value == int(value) or abs(value) >= 999.95) and abs(value) < 1e15:
        return f"{round(value):,}"
    text = f"{value:.4g}"
    if "e" in text:
        digits, exponent = text.split("e")
        return f"{digits}e{int(exponent)}"
    return text if "." in text else f"{value:#.4g}"


def format_metric(name: str, value: float) -> str:
    """A metric by its name: shares of a time, of a peak or of a count as percentages."""
    return f"{100 * value:.3g}%" if _SHARE.search(name) and math.isfinite(value) else format_number(value)


def format_metrics(values: Mapping[str, float]) -> str:
    """Metrics for the end of a line."""
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in values.items())


def format_duration(seconds: float) -> str:
    """8.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    rounded = round(seconds)
    for unit_s, unit, part_s, part in _UNITS:
        if rounded >= unit_s:
            return f"{rounded // unit_s} {unit} {rounded % unit_s // part_s} {part}"
    return f"{max(seconds, 0.0):.1f} s"


_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def parse_duration(text: str) -> float | None:
    """The seconds of 90s, 30m, 45min, 2h, 3d; None for a text that is no duration."""
    match = _WRITTEN.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def _to_seconds(value: object) -> object:
    seconds = parse_duration(value) if isinstance(value, str) else None
    return value if seconds is None else seconds


Duration = Annotated[float, BeforeValidator(_to_seconds), Field(ge=0, allow_inf_nan=False)]
"""A field of a spec: seconds, also written as 30m."""


_WRITTEN_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)")
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _to_bytes(value: object) -> object:
    match = _WRITTEN_SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return value if match is None else round(float(match[1]) * _BYTES[match[2]])


Size = Annotated[int, BeforeValidator(_to_bytes), Field(ge=1, le=1 << 50)]
"""A field of a spec: bytes, also written as 2GiB."""


def format_age(seconds: float) -> str:
    """8 s, 3 min, 2 h, 3 d."""
    rounded = max(int(seconds), 0)
    for unit_s, unit, _, _ in _UNITS:
        if rounded >= unit_s:
            return f"{rounded // unit_s} {unit}"
    return f"{rounded} s"


def format_size(size_bytes: int) -> str:
    """12 B, 3.5 KiB, 1.2 GiB."""
    for unit_bytes, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"


def format_timestamp(epoch_s: float) -> str:
    """A local time of day with its date."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(epoch_s))


def format_value(value: object, most: int = 4) -> str:
    """An event's value: of a float the significant digits, of a list `most` values and its length."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(each, most)}" for name, each in value.items())
    if isinstance(value, list):
        shown = [format_value(each, most) for each in value[:most]]
        return f"[{', '.join(shown)}{f', ... ({len(value)})' if len(value) > most else ''}]"
    return format_number(value) if isinstance(value, float) else str(value)


def sort_opponents(rates: Mapping[str, float]) -> list[tuple[str, float]]:
    """Win rates as they are shown, of each policy together: registered opponents by their names, and then the run's
    versions in order."""

    def order(name: str) -> tuple[str, int, str]:
        policy, _, version = name.rpartition(" ")
        return policy, int(version) if version.isdigit() else -1, version

    labels = {name: re.sub(r"(?:^|(?<= ))(?=\d+$)", "v", name) for name in rates}
    return [(labels[name], rates[name]) for name in sorted(rates, key=order)]
