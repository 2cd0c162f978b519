"""A group of verbs whose help says of each what it does, in a whole sentence. Called by the verbs that have some."""

from __future__ import annotations

import click

_ANY_LENGTH = 1_000


class Verbs(click.Group):
    """click's own list cuts each sentence where the line ends."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(_ANY_LENGTH)) for name, each in commands if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
