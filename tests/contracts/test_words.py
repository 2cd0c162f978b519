"""Names are the field's: words that were the project's own are refused in files, classes and functions."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "platform" / "shoal"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each with the field's words for it.
REFUSED = {
    **dict.fromkeys(("told", "tells", "hears", "hear", "heard"), "reported, notified, received"),
    "said": "specified, explicit",
    **dict.fromkeys(("word", "words"), "overrides, arguments"),
    "whole": "full, unsharded, integer",
    **dict.fromkeys(("survey", "cut", "cuts"), "profile, split point"),
    **dict.fromkeys(("fates", "settle", "settled"), "outcomes, acknowledge"),
    **dict.fromkeys(("complaint", "refusal", "refusals", "trouble"), "error, rejection, warning"),
    **dict.fromkeys(("signs", "agreement"), "signals, rank synchronisation"),
    "hosted": "served model",
    **dict.fromkeys(("pretence", "pretended", "play"), "fake, simulate"),
    "left": "rejected, remaining",
    **dict.fromkeys(("kept", "keeper", "held"), "retained, stored, checkpoint"),
    "beside": "alongside, in parallel",
    **dict.fromkeys(("place", "places", "turn", "way"), "position, worker index, route"),
    **dict.fromkeys(("life", "lives", "era"), "attempt, epoch"),
    "room": "capacity",
    **dict.fromkeys(("look", "looked"), "inspect, poll"),
    **dict.fromkeys(("nobody", "whoever"), "no process, the caller"),
    # Participles are no names of functions.
    **dict.fromkeys(("joined", "made", "begun", "judged", "parted", "placed", "ended"), "a verb"),
}

# Each with its reason.
EXCEPTIONS = {
    "play": "shoal.actor.play is public, and playing an environment is reinforcement learning's own term",
    "_play": "plays episodes of an environment",
    "play_through": "plays episodes of an environment through an endpoint",
    "SelfPlaySpec": "self-play is the field's term",
    "pipeline_cuts": "a method of users' Tasks, and a field of specs",
}


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_have_no_words_of_our_own(path: Path) -> None:
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, definitions)]
    found = {name: words_of(name) & REFUSED.keys() for name in [path.stem, *names] if name not in EXCEPTIONS}
    assert {name: [f"{word}: {REFUSED[word]}" for word in words] for name, words in found.items() if words} == {}


def test_every_exception_is_needed() -> None:
    names = {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert set(EXCEPTIONS) <= names


def test_no_class_name_is_given_twice() -> None:
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
