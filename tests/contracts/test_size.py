"""The budget of the house: `tests/budget.json` has lines (docstrings included) of each room and library, of the core,
the whole and the tests; counts of grain; and seconds of the suite. A number goes up only together with a page in
docs/decisions that says what was bought; what is no longer used of a budget is given back."""

from __future__ import annotations

import ast
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from suite import DURATIONS_FILE

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "platform" / "shoal"
BUDGET: dict[str, Any] = json.loads((ROOT / "tests" / "budget.json").read_text())
DURATIONS: dict[str, Any] = json.loads(DURATIONS_FILE.read_text())
SLACK = 0.05  # of a room's budget that may be unused


def room_of(name: Path) -> str:
    return "/".join(name.parts[: 2 if name.parts[0] == "libs" and len(name.parts) > 2 else 1])


@cache
def count() -> dict[str, Any]:
    """What there is: lines by room, and the counts of grain."""
    lines: Counter[str] = Counter()
    uses: Counter[tuple[Path, str]] = Counter()
    private: set[tuple[Path, str]] = set()
    num_functions = num_files = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(PACKAGE)
        lines[room_of(name)] += text.count("\n")
        num_files += 1
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_functions += 1
                is_small = (node.end_lineno or 0) - node.lineno < 12
                if is_small and node.name.startswith("_") and not node.name.startswith("__"):
                    private.add((name, node.name))
            elif isinstance(node, ast.Name | ast.Attribute):
                uses[name, node.id if isinstance(node, ast.Name) else node.attr] += 1
    total = sum(lines.values())
    libraries = sum(number for room, number in lines.items() if room.startswith("libs"))
    tests = sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py"))
    return {
        "rooms": dict(lines),
        "core": total - libraries,
        "whole": total,
        "tests": tests,
        "files": num_files,
        "functions_per_1000_lines": round(1000 * num_functions / total),
        "small_private_functions_used_once": sum(uses[each] == 1 for each in private),
    }


def test_counts_are_within_their_budgets() -> None:
    counts = {name: number for name, number in count().items() if name != "rooms"}
    assert {name: (number, BUDGET[name]) for name, number in counts.items() if number > BUDGET[name]} == {}


def test_every_room_is_within_its_budget_and_gives_back_what_it_does_not_use() -> None:
    rooms, budget = count()["rooms"], BUDGET["rooms"]
    assert rooms.keys() == budget.keys()
    too_many = {room: (lines, budget[room]) for room, lines in rooms.items() if lines > budget[room]}
    assert not too_many, (
        "write less, or raise tests/budget.json with a page in docs/decisions that says what was bought"
    )
    unused = {room: (lines, budget[room]) for room, lines in rooms.items() if lines < budget[room] * (1 - SLACK) - 100}
    assert not unused, "lower tests/budget.json"


def test_folders_of_tests_take_no_longer_than_they_may() -> None:
    """Reads tests/durations.json, which `python tests/suite.py keep` writes: no outcome depends on this machine."""
    seconds, budget = DURATIONS["folders_s"], BUDGET["folders_s"]
    assert seconds.keys() == budget.keys()
    assert {folder: (took, budget[folder]) for folder, took in seconds.items() if took > budget[folder]} == {}
    assert sum(DURATIONS["cpu_s"].values()) <= BUDGET["cpu_s"]


def test_a_test_of_more_than_five_seconds_is_one_that_may() -> None:
    slow = {test for test, seconds in DURATIONS["tests_s"].items() if seconds > BUDGET["test_s"]}
    assert slow <= set(BUDGET["slow_tests"]), "make it quicker, mark it `soak`, or name it among the slow tests"
