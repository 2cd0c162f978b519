"""Pages name files that exist, and what CONTRIBUTING says of sizes holds."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_OTHERS = {"marshal/dispatcher.py", "platform/__init__.py"}  # of a peer; one that must not be


def test_pages_name_files_that_exist() -> None:
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    missing = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for named in re.findall(r"`([\w./-]+/[\w-]+\.(?:py|hpp|html))`", page.read_text()):
            if named not in OF_OTHERS and not any(f"/{file}".endswith(f"/{named}") for file in files):
                missing.append(f"{page.relative_to(ROOT)}: {named}")
    assert missing == []


PRODUCT = [path for place in ("platform", "jobs", "serve_apps") for path in sorted((ROOT / place).rglob("*.py"))]
MAX_FUNCTION, MAX_FILE = 50, 400  # lines without docstrings


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len((ast.get_docstring(node, clean=False) or "").splitlines())


def test_functions_and_files_are_short() -> None:
    too_long = []
    for path in PRODUCT:
        text, file = path.read_text(), path.relative_to(ROOT)
        documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
        if (size := len(text.splitlines()) - sum(map(docstring_lines, documented))) > MAX_FILE:
            too_long.append(f"{file} has {size} lines")
        for node in documented:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1 - docstring_lines(node)
                if size > MAX_FUNCTION:
                    too_long.append(f"{file}: {node.name} has {size} lines")
    assert not too_long, "\n".join(too_long)
