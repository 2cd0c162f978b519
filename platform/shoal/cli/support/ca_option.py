"""The option `--ca` of the verbs that call an endpoint."""

from __future__ import annotations

import os

import click

from shoal.client.tls import CA_VARIABLE


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
