"""The budget of the house: `tests/budget.json` has the tokens of each room and library, of the core, the whole and the
tests, and the seconds of the suite. A token is a name, an operator, a number or a string: comments, blank lines and
line breaks are free, and a docstring counts as one. The whole may only be lowered: a capability names the rooms that
pay for it."""

import io
import json
import tokenize
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
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


def room_of(name: Path) -> str:
    return "/".join(name.parts[: 2 if name.parts[0] == "libs" and len(name.parts) > 2 else 1])


def count_tokens(path: Path) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(token.type in COUNTED for token in tokens)


@cache
def count() -> dict[str, Any]:
    """What there is, by room and in all."""
    rooms: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        rooms[room_of(path.relative_to(PACKAGE))] += count_tokens(path)
    return {
        "rooms": dict(rooms),
        "core": sum(tokens for room, tokens in rooms.items() if not room.startswith("libs")),
        "whole": sum(rooms.values()),
        "tests": sum(map(count_tokens, (ROOT / "tests").rglob("*.py"))),
    }


def test_counts_are_within_their_budgets() -> None:
    counts = {name: number for name, number in count().items() if name != "rooms"}
    assert {name: (number, BUDGET[name]) for name, number in counts.items() if number > BUDGET[name]} == {}


def test_every_room_is_within_its_budget_and_gives_back_what_it_does_not_use() -> None:
    rooms, budget = count()["rooms"], BUDGET["rooms"]
    assert rooms.keys() == budget.keys()
    too_many = {room: (tokens, budget[room]) for room, tokens in rooms.items() if tokens > budget[room]}
    assert not too_many, "write less, or lower another room of tests/budget.json by as much"
    unused = {
        room: (tokens, budget[room]) for room, tokens in rooms.items() if tokens < budget[room] * (1 - SLACK) - 200
    }
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
