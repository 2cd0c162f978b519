"""How a benchmark and its child processes talk: one JSON object a line, on standard input and output.

Used on both ends, in both environments: standard library only. Lines without the mark are somebody's log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

MARK = "#bench "


def say(**content: Any) -> None:
    """Tell the parent something."""
    sys.stdout.write(MARK + json.dumps(content) + "\n")
    sys.stdout.flush()


def commands() -> Iterator[dict[str, Any]]:
    """What the parent says, until it closes the pipe."""
    for line in sys.stdin:
        yield json.loads(line)


def parse(line: str) -> dict[str, Any] | None:
    """What a line says; None for a line of a log."""
    if not line.startswith(MARK):
        return None
    content: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return content
