"""A library can be deleted, and imports of the core what `library_api.txt` lists."""

import os
import shutil
from pathlib import Path

from test_imports import FILES, PACKAGE, ROOT, imported_modules, imports_of, module_of

from libraries import LIBRARIES, find_missing_libraries
from python_program import run_python

API = Path(__file__).parent / "library_api.txt"
MAX_API = 60
WITHOUT_IT = """
import shoal
from shoal.cli import find_commands
from shoal.plugins.library import find_libraries

assert shoal.__file__.startswith({folder!r}), shoal.__file__
assert {library!r} not in {{each.name for each in find_libraries()}}
assert "run" in find_commands()
"""


def test_libraries_import_of_the_core_what_is_listed() -> None:
    """The list shrinks with what is no longer imported, and does not grow."""
    used = set()
    for path in (PACKAGE / "libs").rglob("*.py"):
        used |= {module for module in imported_modules(path) if not module.startswith(("shoal.libs", "shoal.extend"))}
    listed = [line for line in API.read_text().splitlines() if line and not line.startswith("#")]
    assert used - set(listed) == set(), "import it from shoal.extend, or from a module of the list"
    assert set(listed) - used == set(), "it is no longer used: take it off the list"
    assert listed == sorted(listed)
    assert len(listed) <= MAX_API


def test_what_shoal_extend_offers_is_there() -> None:
    from importlib import import_module

    from shoal.plugins.lazy import list_exports

    for path in sorted((PACKAGE / "extend").glob("*.py")):
        module = import_module(module_of(path))
        assert [name for name in list_exports(module.__name__) if not hasattr(module, name)] == []


def test_no_module_of_the_core_names_a_library() -> None:
    """Not even as a string: the core finds what a library brings by its word. `moved` has the old names of modules."""
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] != "libs" and path.name != "moved.py":
            text = path.read_text()
            assert not {name for name in imports_of(path) if name.startswith("shoal.libs.")}, path
            assert not [name for name in LIBRARIES if f'"shoal.libs.{name}' in text], path


def test_without_a_library_the_command_line_starts(tmp_path: Path) -> None:
    copy = tmp_path / "platform" / "shoal"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    for library in LIBRARIES:
        folder = (copy / "libs" / library).rename(tmp_path / library)
        code = WITHOUT_IT.format(folder=str(copy), library=library)
        run_python(code, env=environment, cwd=tmp_path)
        folder.rename(copy / "libs" / library)


def test_tests_of_a_deleted_library_are_not_collected() -> None:
    """`conftest` leaves them out."""
    own, other = (ROOT / "tests" / name for name in ("libs/som/test_som.py", "unit/test_home.py"))
    assert own.exists()
    assert find_missing_libraries(own, {*LIBRARIES} - {"som"}) == {"som"}
    assert find_missing_libraries(other, set()) == set()
