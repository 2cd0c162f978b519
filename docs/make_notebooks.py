"""Writes docs/notebooks: each tutorial as a notebook, from the blocks of its page. `make docs` runs it.

    python docs/make_notebooks.py [--check]

--check: exit with 1 where a notebook is not as it would be written

A block of `python` is a cell, and one with `file=NAME` writes that file. A block of the shell without a language is a
cell, and a line of it that ends with & one in the background. All other blocks (`bash`, `py`, ...) stay in the text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FOLDER = DOCS / "notebooks"
_BLOCK = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
_PARTS = re.compile(r"```(\w*)(?: file=(\S+))?\n(.*)```", re.DOTALL)
_SIBLING = re.compile(r"\]\((?=[\w-]+\.md)")


def main() -> int:
    """Write the notebooks, or compare them."""
    notebooks = {FOLDER / f"{page.stem}.ipynb": write_notebook(page) for page in sorted(DOCS.glob("tutorials/*.md"))}
    wrong = [path for path, text in notebooks.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in wrong:
            print(f"{path} is not what the page says: run python docs/make_notebooks.py")
        return bool(wrong)
    FOLDER.mkdir(exist_ok=True)
    for path in wrong:
        path.write_text(notebooks[path])
    return 0


def write_notebook(page: Path) -> str:
    """The notebook of a page, as JSON of nbformat 4.5."""
    cells: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(read_cells(page.read_text())):
        code = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cells.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source, **code})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def read_cells(page: str) -> Iterator[tuple[str, str]]:
    """The kind, `markdown` or `code`, and the source of each cell."""
    text = ""
    for piece in _BLOCK.split(_SIBLING.sub("](../tutorials/", page)):
        parts = _PARTS.fullmatch(piece)
        cells = list(_make_cells(*parts.groups())) if parts else []
        if not cells:
            text += piece
            continue
        if text.strip():
            yield "markdown", text.strip()
        text = ""
        for cell in cells:
            yield "code", cell.rstrip()
    if text.strip():
        yield "markdown", text.strip()


def _make_cells(language: str, file: str | None, block: str) -> Iterator[str]:
    if file:
        yield f"%%writefile {file}\n{block}"
    elif language == "python":
        yield block
    elif not language:
        for is_behind, group in groupby(block.splitlines(), lambda line: line.endswith(" &")):
            lines = list(group)
            commands = [line.removesuffix(" &") for line in lines] if is_behind else ["\n".join(lines)]
            yield from (f"%%bash{' --bg' * is_behind}\n{each}" for each in commands)


if __name__ == "__main__":
    sys.exit(main())
