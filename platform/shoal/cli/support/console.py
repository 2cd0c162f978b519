"""What verbs print with: the console, tables, JSON, facts, and the lines of live displays.

The console is for names, paths and words of others: `[a]` and `:b:` stand there as they were written. Called by the
verbs. Pictures style what they assemble (`rich.text.Text`), and never by markup in a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import click
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text


def make_literal_console(*, soft_wrap: bool = True) -> Console:
    """Interprets no string, nor a table's heading, as markup or emoji. `soft_wrap`: do not wrap long lines."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


def make_table(*columns: Column | str) -> Table:
    """Dim headings over columns without lines."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def make_number_column(heading: str) -> Column:
    """A column of a table whose numbers stand below each other, and are not cut."""
    return Column(heading, justify="right", no_wrap=True)


def print_json(value: object) -> None:
    """The answer of a verb for programs."""
    click.echo(json.dumps(value, indent=2))


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """One line a fact, after its label: no table, for what may be copied is not folded."""
    width = max(len(label) for label, _ in facts)
    for label, value in facts:
        click.echo(f"{click.style(label.ljust(width), dim=True)}  {value}")


def render_line(*cells: RenderableType) -> Table:
    """One line of a live display: its first cell, a number, is not cut."""
    line = Table.grid(Column(no_wrap=True), padding=(0, 1))
    line.add_row(*cells)
    return line


def render_cells(cells: Iterable[tuple[str, str]]) -> Columns:
    """Names and values side by side, in several rows where the terminal is narrow."""
    texts = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in cells]
    return Columns(texts, padding=(0, 3, 0, 0))


def render_run_panel(
    run_id: str, phase: str, elapsed_s: float, parts: Iterable[RenderableType], notes: Iterable[str]
) -> Panel:
    """The frame of a run that goes on."""
    title = f"[bold]{run_id}[/]  {phase}  [dim]{elapsed_s:.0f} s[/]"
    lines = Group(*parts, *(Text(note, style="yellow") for note in notes))
    return Panel(lines, title=title, title_align="left", border_style="cyan", padding=(0, 1))


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
