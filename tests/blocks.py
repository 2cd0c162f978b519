"""The fenced blocks of the README and of the pages in docs/, for tests that run them. A page is named from docs/ on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def _read(page: str | Path) -> Iterator[tuple[str, str]]:
    """What stands behind each fence, and the text."""
    yield from re.findall(r"^```([^\n]*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def read_blocks(page: str, language: str = "python") -> list[str]:
    """Those of a language, but for the files that a page has."""
    return [text for info, text in _read(page) if info == language]


def read_files(page: str | Path) -> dict[str, str]:
    """The files that a page has, as in `python file=NAME`, by their names."""
    return {info.partition(" file=")[2]: text for info, text in _read(page) if " file=" in info}


def run_blocks(page: str, names: dict[str, Any] | None = None) -> None:
    """Run the Python of a page, in order: each block with the names in `names`, and leaving its own there, or alone."""
    blocks = read_blocks(page)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {} if names is None else names)
