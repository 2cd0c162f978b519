"""A rich console without markup, for printing user-supplied text: `[a]` and `:b:` are printed as written.

Called by the commands. Displays style text with `rich.text.Text`, and never by markup in a string.
"""

from __future__ import annotations

import click
from rich.console import Console


def make_literal_console(*, soft_wrap: bool = True) -> Console:
    """Interprets no string, nor a table's heading, as markup or emoji. `soft_wrap`: do not wrap long lines."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


_ANY_LENGTH = 1_000


class CommandGroup(click.Group):
    """A group whose list keeps full sentences; click would cut them at the line's end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(_ANY_LENGTH)) for name, each in commands if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def strip_task_key(_context: object, _argument: object, task: str) -> str:
    """A click callback: accepts the task also as for `shoal run`, `task=NAME`."""
    return task.removeprefix("task=")
