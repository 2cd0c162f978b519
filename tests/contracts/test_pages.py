"""Pages name files that exist, and what CONTRIBUTING says of sizes holds."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

from shoal.plugins.library import find_libraries

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


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [
    (page, module, name.split(" as ")[0].strip())
    for page in PAGES
    for module, names in re.findall(r"^ *from (shoal[\w.]*) import ([\w, ]+)$", page.read_text(), re.MULTILINE)
    for name in names.split(",")
]


def test_pages_import_what_is_there() -> None:
    assert [each for each in NAMES if not hasattr(importlib.import_module(each[1]), each[2])] == []


def find_headings(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in titles}


def test_links_lead_to_a_file_and_a_heading_of_it() -> None:
    broken = []
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            is_heading = not anchor or target.suffix != ".md"
            if not target.exists() or not (is_heading or anchor in find_headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_the_menu_has_every_page_once_and_those_of_maintainers_apart() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("- For maintainers:")
    users, maintainers = (re.findall(r"[\w/-]+\.md", part) for part in menu[::2])
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    assert sorted(users + maintainers) == sorted(page for page in pages if not re.match(r"decisions/\d", page))
    assert not [page for page in users if re.match("architecture|decisions|measured|what-did", page)]


def test_the_index_lists_every_decision() -> None:
    decisions = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d.*?)\) \|", (decisions / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in decisions.glob("[0-9]*.md"))


def test_the_page_of_upgrades_has_every_file_that_uses_private_names_of_ray() -> None:
    page = (ROOT / "docs" / "architecture" / "upgrades.md").read_text()
    private = re.compile(r"^ *(from ray\S*\._|from ray\S* import .*\b_|import ray\S*\._)", re.MULTILINE)
    platform = ROOT / "platform" / "shoal"
    users = [path for path in platform.rglob("*.py") if private.search(path.read_text())]
    assert [name for path in users if f"`{(name := path.relative_to(platform).as_posix())}`" not in page] == []


MAX_PAGE = 2500  # words
LONG = {"protocol.md", "inference-protocol.md", "measured.md"}  # beside the reference


def test_pages_are_short() -> None:
    pages = [page for page in PAGES if page.parent.name != "reference" and page.name not in LONG]
    assert {page.name for page in pages if len(page.read_text().split()) > MAX_PAGE} == set()


def test_the_page_of_extensions_has_every_group() -> None:
    groups = {group for library in find_libraries() for group in library.extensions} - {"shoal.extend"}
    page = (ROOT / "docs" / "extending.md").read_text()
    assert {group for group in groups if f"`{group}`" not in page} == set()


def test_the_page_of_the_architecture_has_every_room_and_library() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent for path in (ROOT / "platform" / "shoal").glob("**/__init__.py")}
    rooms = {folder.name for folder in folders if folder.parent.name in ("shoal", "libs")} - {"libs"}
    assert {room for room in rooms if not re.search(rf"^\|.*`{room}/?`.* \|", page, re.MULTILINE)} == set()


PRODUCT = [path for place in ("platform", "jobs", "serve_apps") for path in sorted((ROOT / place).rglob("*.py"))]
MAX_FUNCTION, MAX_FILE = 60, 450  # lines without docstrings


def test_pages_that_the_product_names_are_there() -> None:
    named = {each for path in PRODUCT for each in re.findall(r"docs/([\w/-]+\.md)(?:#([\w-]+))?", path.read_text())}
    assert ("glossary.md", "credit") in named
    assert [each for each in named if each[1] and each[1] not in find_headings(ROOT / "docs" / each[0])] == []
    assert [name for name, _ in named if not (ROOT / "docs" / name).is_file()] == []


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
