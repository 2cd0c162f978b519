"""The options that several verbs have, and the numbers that options take."""

from __future__ import annotations

import math
import os
from pathlib import Path
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
endpoint_option = click.option(
    "--endpoint", metavar="NAME|URL", help="The endpoint.  [default: the one running on this machine]"
)
key_option = click.option("--key", envvar="SHOAL_KEY", default="", metavar="KEY", help="An API key, or $SHOAL_KEY.")
address_option = click.option("--address", help="The cluster to use: a dashboard URL, or 'local' for a new one.")
overrides_argument = click.argument("overrides", nargs=-1, metavar="[A.B=C]...")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
plain_option = click.option("--plain", is_flag=True, help="Plain lines, even on a terminal.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
output_folder_option = click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the files that are written."
)
