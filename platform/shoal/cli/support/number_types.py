"""The numbers that options take. Called by the verbs."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range without NaN, which click takes for any, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        return number


PERCENT = FiniteRange(0, 100)
SECONDS = FiniteRange(min=0, min_open=True)
