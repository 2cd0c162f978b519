"""Every environment variable of Ray that we name exists in the Ray that is installed: a misspelt one does nothing."""

import ast
import mmap
import re
from functools import cache
from importlib.metadata import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"\bRAY_[A-Za-z0-9_]*[A-Za-z0-9]\b")
BINARIES = ["ray/_raylet.so", "ray/core/src/ray/raylet/raylet"]


def names_of(path: Path) -> set[str]:
    """The variables in the strings of a file, its docstrings included."""
    text = path.read_text()
    if "RAY_" not in text:
        return set()
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {name for text in strings if isinstance(text, str) for name in NAME.findall(text)}


@cache
def installed() -> dict[str, Path]:
    """Ray's files."""
    return {str(file): Path(str(file.locate())) for file in files("ray") or []}


@cache
def names_in_sources() -> set[str]:
    """The variables that Ray's own sources in Python name."""
    sources = [path for name, path in installed().items() if name.endswith(".py") and "/thirdparty_files/" not in name]
    return {name.decode() for path in sources for name in re.findall(NAME.pattern.encode(), path.read_bytes())}


def unknown_to_ray(names: set[str]) -> set[str]:
    """Those that neither a source file of Ray names, nor a program of Ray has as a flag (RAY_<flag> sets `flag`)."""
    unknown = names - names_in_sources()
    for binary in BINARIES:
        with installed()[binary].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            flags = {name: b"\0%b\0" % name.removeprefix("RAY_").encode() for name in unknown}
            unknown -= {name for name, flag in flags.items() if content.find(flag) >= 0}
    return unknown


def test_every_variable_of_ray_that_we_name_exists() -> None:
    names = set().union(*map(names_of, (ROOT / "platform").rglob("*.py")))
    assert len(names) > 30
    assert unknown_to_ray(names) == set()


def test_a_misspelt_variable_and_flag_are_found() -> None:
    misspelt = {"RAY_SERVE_ENABLE_HAPROXI", "RAY_worker_nicenes"}
    assert unknown_to_ray({*misspelt, "RAY_SERVE_ENABLE_HA_PROXY", "RAY_worker_niceness"}) == misspelt
