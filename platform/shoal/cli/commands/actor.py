"""`shoal actor`: the ready actor of `python -m shoal.actor`, under the program's own name."""

from __future__ import annotations

import os
import sys

import click


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def actor(arguments: tuple[str, ...]) -> None:
    """Play an environment and send the experience to a gateway (`shoal actor --help` lists the options)."""
    from shoal.actor.__main__ import main

    sys.path.insert(0, os.getcwd())  # as `python -m` has it: the environment's module may lie there
    sys.exit(main(arguments))
