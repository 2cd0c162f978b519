"""Commands as a user types them, in this process: `typed("serve status --once")`; and what a terminal shows.

Words that are given behind the line are taken as they are.
"""

import io
import shlex
from typing import Any

from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

from shoal.cli import cli
from shoal.errors import ShoalError


def typed(line: str, *words: str, stdin: str | None = None, is_caught: bool = True, **options: Any) -> Result:
    """What became of `shoal LINE`."""
    return CliRunner().invoke(cli, [*shlex.split(line), *words], input=stdin, catch_exceptions=is_caught, **options)


def said(line: str, *words: str, stdin: str | None = None) -> str:
    """What a command prints that succeeds. Raises what the command raises."""
    result = typed(line, *words, stdin=stdin, is_caught=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def complaint(line: str, *words: str, stdin: str | None = None) -> str:
    """The error of ours with which a command ends."""
    result = typed(line, *words, stdin=stdin)
    assert isinstance(result.exception, ShoalError), (result.output, result.exception)
    return str(result.exception)


def draw_plain(drawn: RenderableType, width: int = 100, **options: Any) -> str:
    """As a terminal of this width shows it, without colours."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None, **options)
    console.print(drawn)
    return console.export_text()
