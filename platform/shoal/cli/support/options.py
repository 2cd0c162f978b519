"""The numbers that options take, and the option `--ca` of the verbs that call an endpoint."""

from __future__ import annotations

import math
import os
from typing import Any

import click

from shoal.client.tls import CA_VARIABLE


class FiniteRange(click.FloatRange):
    """A range without NaN, which click takes for any, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        return number


PERCENT = FiniteRange(0, 100)
SECONDS = FiniteRange(min=0, min_open=True)


def _set_authorities(context: click.Context, option: click.Parameter, ca: str) -> None:
    if ca:
        before = os.environ.get(CA_VARIABLE, "")
        os.environ[CA_VARIABLE] = ca
        context.call_on_close(lambda: os.environ.update({CA_VARIABLE: before}))  # an empty one counts as none


ca_option = click.option(
    "--ca",
    metavar="FILE",
    default="",
    expose_value=False,
    callback=_set_authorities,
    help=f"The authorities to trust for https, or ${CA_VARIABLE}.  [default: the system's]",
)
