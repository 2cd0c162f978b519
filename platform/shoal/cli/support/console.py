"""The console of verbs that print names, paths and words of others: `[a]` and `:b:` stand there as they were written.

Called by the verbs. Pictures style what they assemble (`rich.text.Text`), and never by markup in a string.
"""

from __future__ import annotations

import click
from rich.console import Console


def make_literal_console(*, soft_wrap: bool = True) -> Console:
    """Takes no string for markup or an emoji, nor the heading of a table. `soft_wrap`: long lines stay whole."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


_ANY_LENGTH = 1_000


class CommandGroup(click.Group):
    """click's own list cuts each sentence where the line ends."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(_ANY_LENGTH)) for name, each in commands if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def strip_task_key(_context: object, _argument: object, task: str) -> str:
    """A click callback: the task also where it is typed as for `shoal run`, `task=NAME`."""
    return task.removeprefix("task=")
