"""Answers satisfy their grammar, and a grammar that cannot be followed costs no token."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.libs.language.tiny_language import Bytes, make_decoder

from shoal.errors import ConfigError
from shoal.libs.language.engine import Sampling, SlotEngine, TextRequest
from shoal.libs.language.engine.grammar import GrammarCompiler

pytest.importorskip("llguidance")
PROMPT = tuple(b"answer: ")


@pytest.fixture(scope="module")
def engine() -> SlotEngine:
    return SlotEngine(make_decoder(0), tokenizer=Bytes(), stop_tokens=(0,))


def generate(engine: SlotEngine, grammar: Any, num_answers: int = 3) -> list[str]:
    request = TextRequest(PROMPT, Sampling(1.0, seed=2), max_tokens=60, num_answers=num_answers, grammar=grammar)
    (events,) = engine.run([request])
    assert {event.finish for event in events if event.finish} == {"stop"}
    return ["".join(event.text for event in events if event.index == index) for index in range(num_answers)]


def test_answers_satisfy_their_grammar(engine: SlotEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "is": {"enum": ["x", "y"]}},
        "required": ["age", "is"],
        "additionalProperties": False,
    }
    for text in generate(engine, ("json_schema", schema | {"x-guidance": {"whitespace_flexible": False}})):
        found = json.loads(text)
        assert found.keys() == {"age", "is"}
        assert 0 <= found["age"] <= 99
        assert found["is"] in ("x", "y")
    assert all(re.fullmatch("[ab]{3}-[0-9]{2}", text) for text in generate(engine, ("regex", "[ab]{3}-[0-9]{2}")))
    assert set(generate(engine, ("choice", ["yes", 'no "really"']), 6)) <= {"yes", 'no "really"'}
    assert all(text.strip("+1") == "" for text in generate(engine, ("lark", 'start: "1" ("+" "1"){1,3}')))
    engine.prepare(TextRequest(PROMPT, grammar=("regex", "x{2}[yz]")))
    monkeypatch.setattr(GrammarCompiler, "_compile", None)  # once is enough
    assert {text[:2] for _ in range(2) for text in generate(engine, ("regex", "x{2}[yz]"))} == {"xx"}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (("json_schema", {"type": "nonsense"}), "Invalid type: nonsense"),
        (("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable schema"),
        (("json_schema", "{"), "grammar = '{'"),
        (("json_schema", 3), "grammar = '3': expected an object"),
        (("regex", 3), "grammar = '3': expected a text"),
        (("regex", "(a"), r"grammar = '\(a': unclosed group$"),
        (("lark", "start: nothing"), """'start: nothing': .* unknown name: "nothing"$"""),
        (("choice", []), "expected 1 to 128 texts"),
        (("choice", ["x" * 70_000]), "has 70004 characters"),
        (("other", "x"), "expected json_schema, regex, lark or choice"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(engine: SlotEngine, grammar: Any, message: str) -> None:
    before = engine.observe()
    with pytest.raises(ConfigError, match=message):
        engine.submit(TextRequest(PROMPT, grammar=grammar))
    assert engine.observe() == before
