"""What verbs print with: the console, tables, JSON and facts; and the files that they leave.

The console is for names, paths and words of others: `[a]` and `:b:` stand there as they were written. Called by the
verbs. Pictures style what they assemble (`rich.text.Text`), and never by markup in a string. Files of pictures and
numbers lie in a folder of the user's or in $SHOAL_HOME, and never overwrite one of another second.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from shoal.errors import ConfigError
from shoal.home import home

UNFOLDED = 10_000  # the width of a table that is not folded


def make_literal_console(*, soft_wrap: bool = True) -> Console:
    """Interprets no string, nor a table's heading, as markup or emoji. `soft_wrap`: do not wrap long lines.

    Where no terminal ends a line, and $COLUMNS does not either, tables are as wide as their cells.
    """
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = UNFOLDED
    return console


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


def format_facts(facts: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """One line a fact that has a value, after its label: no table, for what may be copied is not folded."""
    known = [(label, value) for label, value in facts if value]
    width = max(len(label) for label, _ in known)
    return (f"{click.style(label.ljust(width), dim=True)}  {value}" for label, value in known)


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


def remove_old(
    names: Sequence[str], what: str, remove: Callable[[], object], *, dry_run: bool, is_confirmed: bool
) -> Iterator[str]:
    """Show what a verb `prune` would remove, or remove it. Raises ConfigError as `confirm_removal`."""
    if not names:
        yield "Nothing is to be removed."
    elif dry_run:
        yield from ("These would go:", *names)
    else:
        confirm_removal(names, what, is_confirmed)
        remove()
        yield f"removed: {len(names)}"


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


class Printed(NamedTuple):
    """What a verb with `**PRINTED` prints: lines and tables, or the values with `--json`; then it writes files, which
    may fail after hours of work."""

    lines: Iterable[object]
    values: object
    write: Callable[[], Iterable[Path]] = tuple


PRINTED: dict[str, Any] = {"show": attrgetter("lines"), "to_json": attrgetter("values")}


def print_and_write(
    folder: Path,
    stem: str,
    lines: Iterable[object],
    values: dict[str, Any],
    make_files: Callable[[], dict[str, bytes]],
    **more: Any,
) -> Printed:
    """The files by their suffixes, and the values as JSON beside them, with `more`."""

    def write() -> list[Path]:
        text = json.dumps({**more, **to_json_value(values)}, indent=2)
        return write_files(folder, stem, {**make_files(), "json": text.encode()})

    return Printed(lines, values, write)


@contextmanager
def _translate_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"takes no files: {error.strerror}"
        raise ConfigError("--out", str(folder), problem, "name a folder where you may write") from None
