"""Commands as a user types them, in this process: `typed("serve status --once")`.

Words that are given behind the line are taken as they are.
"""

from __future__ import annotations

import shlex
from typing import Any

from click.testing import CliRunner, Result

from shoal.cli import cli
from shoal.errors import ShoalError


def typed(line: str, *words: str, stdin: str | None = None, **options: Any) -> Result:
    """What became of `shoal LINE`."""
    return CliRunner().invoke(cli, [*shlex.split(line), *words], input=stdin, **options)


def said(line: str, *words: str, stdin: str | None = None) -> str:
    """What a command prints that succeeds. Raises as the command does."""
    result = typed(line, *words, stdin=stdin, catch_exceptions=False)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def complaint(line: str, *words: str, stdin: str | None = None) -> str:
    """The error of ours with which a command ends."""
    result = typed(line, *words, stdin=stdin)
    assert isinstance(result.exception, ShoalError), (result.output, result.exception)
    return str(result.exception)
