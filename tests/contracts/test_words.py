"""Names are the field's: words that were the project's own are refused.

In files, classes, functions, parameters, attributes and fields; not in local variables.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "platform" / "shoal"

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
    "Turn": "of a conversation, the field's term, and that of the sessions' wire format",
    "self_play": "self-play is the field's term, and a field of specs",
    "modified_in_place": "of tensors, as PyTorch says it",
    "connection_made": "a method of asyncio's protocols",
}

# What users type, or what is stored: each with its file and the reason.
FIXED = {
    ("client/requests.py", "ended"): "a field of the protocol's requests of episodes",
    ("open_inference/episodes.py", "ended"): "a field of the protocol's requests of episodes",
    ("cost/cost_table.py", "cuts"): "a detail of recorded events",
    ("models/network_source.py", "word"): "a field of specs, in the records of runs",
    ("models/own_network.py", "word"): "an argument of networks in registered versions",
    ("cost/cost_table.py", "held_as"): "a key of `shoal inspect --json`",
    ("runs/record/opening.py", "begun"): "shoal.runs.recording is public: jobs name this parameter",
    ("serve/spec/model_options.py", "held_versions"): "a field of specs",
    ("wire/messages.py", "ended"): "a field of the protocol",
}


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


@cache
def parse() -> dict[Path, ast.Module]:
    """Not when the tests are collected, which each worker does."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def names_of(path: Path, tree: ast.Module) -> Iterator[str]:
    yield path.stem
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.ClassDef(name=name, body=body):
                yield name
                for statement in body:
                    match statement:
                        case ast.AnnAssign(target=ast.Name(id=field)):
                            yield field
                        case ast.Assign(targets=targets):
                            yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


@cache
def list_names() -> set[tuple[str, str]]:
    return {(str(path.relative_to(PACKAGE)), name) for path, tree in parse().items() for name in names_of(path, tree)}


def test_names_have_no_words_of_our_own() -> None:
    wrong = [
        f"{file}: {name} has {word}: {REFUSED[word]}"
        for file, name in sorted(list_names())
        if name not in EXCEPTIONS and (file, name) not in FIXED
        for word in words_of(name) & REFUSED.keys()
    ]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_needed() -> None:
    assert set(FIXED) <= list_names()
    assert set(EXCEPTIONS) <= {name for _, name in list_names()}


def test_no_class_name_is_given_twice() -> None:
    homes = defaultdict(list)
    for path, tree in parse().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
