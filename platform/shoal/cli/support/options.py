"""The types of what several verbs take: numbers, names, and options with their help."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import click

from shoal.client.tls import CA_VARIABLE
from shoal.errors import ConfigError


class FiniteRange(click.FloatRange):
    """A range without NaN, which click takes for any, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        return number


def parse_age(text: str) -> float:
    """`30d`, `12h`, `45min` or `10s`, in seconds."""
    from shoal.runs.formatting import parse_duration  # here: most verbs need no runs

    seconds = parse_duration(text)
    if seconds is None:
        raise ConfigError("older-than", text, "is no age", "give a number and its unit, as in 30d, 12h, 45min or 10s")
    return seconds


def strip_task_key(task: str) -> str:
    """Accepts the task also as for `shoal run`, `task=NAME`."""
    return task.removeprefix("task=")


Texts = tuple[str, ...]
Positive = Annotated[int, click.IntRange(min=1)]
NotNegative = Annotated[int, click.IntRange(min=0)]
Percent = Annotated[float, FiniteRange(0, 100)]
Seconds = Annotated[float, FiniteRange(min=0, min_open=True)]
TaskName = Annotated[str, strip_task_key]
VersionName = Annotated[str, "NAME@VERSION"]
ModelName = Annotated[str, "NAME[@VERSION]"]
Overrides = Annotated[Texts, "[A.B=C]..."]
EndpointName = Annotated[str | None, "--endpoint NAME|URL", "The endpoint.  [default: the one running on this machine]"]
Key = Annotated[str, "--key KEY $SHOAL_KEY", "An API key, or $SHOAL_KEY."]
Address = Annotated[str | None, "The cluster to use: a dashboard URL, or 'local' for a new one."]
Plain = Annotated[bool, "Plain lines, even on a terminal."]
Yes = Annotated[bool, "Do not ask."]
OlderThan = Annotated[float | None, parse_age, "--older-than AGE"]
DryRun = Annotated[bool, "Show what would be removed."]
OutputFolder = Annotated[Path | None, "Folder of the files that are written."]


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
