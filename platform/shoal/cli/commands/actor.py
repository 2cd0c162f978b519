"""`shoal actor`: the bundled actor of `python -m shoal.actor`, as a command of this program."""

from __future__ import annotations

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def actor(arguments: tuple[str, ...]) -> None:
    """Play an environment and send the experience to a gateway (`shoal actor --help` lists the options)."""
    from shoal.actor.__main__ import main

    sys.exit(main(arguments))
