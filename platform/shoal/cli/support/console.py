"""What verbs print with: the console, tables, JSON and facts; and the files that they leave.

The console is for names, paths and words of others: `[a]` and `:b:` stand there as they were written. Called by the
verbs. Pictures style what they assemble (`rich.text.Text`), and never by markup in a string. Files of pictures and
numbers lie in a folder of the user's or in $SHOAL_HOME, and never overwrite one of another second.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from shoal.cli.support.groups import SuggestingGroup
from shoal.errors import ConfigError, RunError, suggest
from shoal.home import home
from shoal.plugins.find import load_reference
from shoal.plugins.library import find_libraries
from shoal.runs.formatting import parse_duration


def make_literal_console(*, soft_wrap: bool = True) -> Console:
    """Interprets no string, nor a table's heading, as markup or emoji. `soft_wrap`: do not wrap long lines."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


def make_table(*columns: Column | str, rows: Iterable[Iterable[str | Text]] = ()) -> Table:
    """Dim headings over columns without lines. Cells stand as they are written: `[a]` is no markup."""
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def make_number_column(heading: str) -> Column:
    """A column of a table: its numbers stand below each other, and are not cut."""
    return Column(heading, justify="right", no_wrap=True)


def print_json(value: object) -> None:
    """The answer of a verb for programs. NaN and infinities are null."""
    click.echo(json.dumps(to_json_value(value), indent=2))


def to_json_value(value: Any) -> Any:
    """Ready for JSON: NaN and infinities become null."""
    if isinstance(value, dict):
        return {name: to_json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [to_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """One line a fact, after its label: no table, for what may be copied is not folded."""
    width = max(len(label) for label, _ in facts)
    for label, value in facts:
        click.echo(f"{click.style(label.ljust(width), dim=True)}  {value}")


_ANY_LENGTH = 1_000


class CommandGroup(SuggestingGroup):
    """A group with a list of full sentences; click would cut them at the line's end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(_ANY_LENGTH)) for name, each in commands if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class ExtensibleCommandGroup(CommandGroup):
    """A group that libraries join with verbs such as "models push", which are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._find_verbs()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (verb := self._find_verbs().get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = load_reference(verb[0])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verbs = self._find_verbs()
        rows = [(name, verbs[name][1]) for name in verbs]
        own = [(name, each.get_short_help_str(_ANY_LENGTH)) for name, each in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted([*own, *rows]))

    def _find_verbs(self) -> dict[str, tuple[str, str]]:
        each = [item for library in find_libraries() for item in library.verbs.items()]
        return {verb.removeprefix(f"{self.name} "): found for verb, found in each if verb.startswith(f"{self.name} ")}


class DefaultCommandGroup(ExtensibleCommandGroup):
    """A group with a command `default` for words that begin with no command's name."""

    default = "show"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_own = bool(args) and args[0] in (*self.list_commands(ctx), *ctx.help_option_names)
        ctx.obj = "" if is_own or not args else suggest(args[0], self.list_commands(ctx))
        return super().parse_args(ctx, args if is_own else [self.default, *args])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RunError as error:
            if not ctx.obj:
                raise
            raise RunError(f"{error}. Of the verbs, {ctx.obj}") from None  # neither a run nor a verb


def confirm_removal(names: Sequence[str], what: str, is_confirmed: bool) -> None:
    """Have the user type the name of what is removed, or of several their number, unless `--yes` was given.

    Raises ConfigError when that is not what was typed.
    """
    if is_confirmed:
        return
    click.echo(f"This cannot be undone. It removes {what}:")
    for name in names:
        click.echo(f"  {name}")
    expected = names[0] if len(names) == 1 else str(len(names))
    try:
        typed = click.prompt(f"Type {expected} to go on", default="", show_default=False)
    except click.Abort:  # no terminal
        typed = ""
    if typed.strip() != expected:
        raise ConfigError("confirmation", typed, f"is not {expected}, so nothing was removed", "type it, or add --yes")


def parse_age(_context: object, _option: object, text: str | None) -> float | None:
    """A click callback: `30d`, `12h`, `45min` or `10s`, in seconds."""
    if text is None:
        return None
    seconds = parse_duration(text)
    if seconds is None:
        raise ConfigError("older-than", text, "is no age", "give a number and its unit, as in 30d, 12h, 45min or 10s")
    return seconds


def strip_task_key(_context: object, _argument: object, task: str) -> str:
    """A click callback: accepts the task also as for `shoal run`, `task=NAME`."""
    return task.removeprefix("task=")


def prepare_output_folder(out: Path | None, name: str = "found") -> Path:
    """`out` or the folder `name` in $SHOAL_HOME, created before hours of work. Raises ConfigError when it is not
    writable."""
    folder = out or home() / name
    with _translate_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def write_files(folder: Path, stem: str, files: dict[str, bytes]) -> list[Path]:
    """Write STEM-TIME.SUFFIX for each suffix into `folder`; the paths. Raises ConfigError."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    paths = []
    with _translate_write_errors(folder):
        for suffix, content in files.items():
            path = folder / f"{stem}-{stamp}.{suffix}"
            path.write_bytes(content)
            paths.append(path)
    return paths


@contextmanager
def _translate_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"takes no files: {error.strerror}"
        raise ConfigError("--out", str(folder), problem, "name a folder where you may write") from None
