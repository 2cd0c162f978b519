"""Which tests are a library's: whoever deletes its folder has the others left, and they pass."""

import re
from collections.abc import Collection
from pathlib import Path

TESTS = Path(__file__).parent
LIBRARIES = frozenset(path.parent.name for path in (TESTS.parent / "platform/shoal/libs").glob("*/__init__.py"))
_NAME = re.compile(r"\bshoal\.libs\.([a-z]\w*)")


def find_missing_libraries(path: Path, libraries: Collection[str] = LIBRARIES) -> set[str]:
    """The libraries that a test file names, or in whose folder it is, and that are none of these."""
    owner = {path.parent.name} if path.parent.parent == TESTS / "libs" else set()
    return (owner | {*_NAME.findall(path.read_text())}) - {*libraries}
