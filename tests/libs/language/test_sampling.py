"""Tokens follow the distribution of a request, and its grammar, which costs no token where it cannot be followed."""

import json
import math
import re
from typing import Any

import pytest
import torch
from tests.libs.language.tiny_language import Bytes, compute_logprobs, list_tokens, make_decoder

from shoal.errors import ConfigError
from shoal.libs.language.engine import Sampling, SlotEngine, TextRequest
from shoal.libs.language.engine.grammar import GrammarCompiler
from shoal.libs.language.engine.sampling import Row, draw_uniform, sample

NUM = 1000


def filter_plainly(logits: torch.Tensor, chosen: Sampling) -> torch.Tensor:
    """Probabilities [V] by a sort of the whole vocabulary."""
    probabilities, order = (logits.double() / chosen.temperature).softmax(-1).sort(descending=True)
    if chosen.top_k:
        probabilities[chosen.top_k :] = 0
        probabilities /= probabilities.sum()
    probabilities[(probabilities.cumsum(0) - probabilities >= chosen.top_p)] = 0
    probabilities[probabilities < chosen.min_p * probabilities[0]] = 0
    return torch.zeros(len(order), dtype=torch.float64).index_copy_(0, order, probabilities / probabilities.sum())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.9999},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    ],
)
def test_shares_of_tokens_are_their_probabilities(fields: dict[str, Any]) -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(1)) * 2
    chosen = Sampling(**{"temperature": 0.8, **fields})
    rows = [Row(chosen, {}, frozenset(), None, (i + 0.5) / NUM, behaviour=True) for i in range(NUM)]
    found, expected = torch.zeros(400, dtype=torch.float64), filter_plainly(logits, chosen)
    for each in sample(logits.expand(NUM, -1), rows):
        found[each.token] += 1 / NUM
        assert each.logprob == pytest.approx(float(logits.log_softmax(-1)[each.token]), abs=1e-5)
        assert each.behaviour_logprob == pytest.approx(math.log(expected[each.token]), abs=1e-5)
    torch.testing.assert_close(found, expected, atol=1.1 / NUM, rtol=0)
    assert ((found > 0) <= (expected > 0)).all()


def test_penalties_bias_and_grammar_change_the_choice_and_not_the_log_probability() -> None:
    logits = torch.tensor([[3.0, 2.9, 2.0, -1.0]])
    nothing: frozenset[int] = frozenset()
    cases = [
        (Row(Sampling(), {}, nothing, None, 0.0), 0),
        (Row(Sampling(repetition_penalty=1.2), {}, frozenset({0}), None, 0.0), 1),
        (Row(Sampling(repetition_penalty=2.0), {1: 1}, frozenset({0}), None, 0.0), 2),
        (Row(Sampling(presence_penalty=0.2), {0: 5}, nothing, None, 0.0), 1),
        (Row(Sampling(frequency_penalty=0.2), {0: 1, 1: 9}, nothing, None, 0.0), 0 if 3.0 - 0.2 > 2.0 else 2),
        (Row(Sampling(frequency_penalty=0.6), {0: 2, 1: 2}, nothing, None, 0.0), 2),
        (Row(Sampling(logit_bias={3: 5.0}), {}, nothing, None, 0.0), 3),
        (Row(Sampling(temperature=1e-45), {}, nothing, None, 0.9), 0),
        (Row(Sampling(logit_bias={0: 99.0}), {}, nothing, torch.tensor([False, False, True, True]), 0.0), 2),
    ]
    expected = logits.log_softmax(-1)[0]
    found = sample(logits.expand(len(cases), -1), [row for row, _ in cases])
    assert [each.token for each in found] == [token for _, token in cases]
    assert [each.logprob for each in found] == pytest.approx([float(expected[token]) for _, token in cases])


def test_uniform_numbers_depend_on_seed_answer_and_place() -> None:
    numbers = [draw_uniform(seed, index, place) for seed in range(10) for index in range(10) for place in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
    assert all(0 <= number < 1 for number in numbers)
    assert draw_uniform(3, 1, 4) == draw_uniform(3, 1, 4)


pytest.importorskip("llguidance")
PROMPT = tuple(b"answer: ")


def test_a_log_probability_is_also_that_of_the_distribution_that_was_sampled_from(engine: SlotEngine) -> None:
    cold = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.5, "logit_bias": {65: 4.0}, "seed": 3}
    requests = [
        TextRequest(PROMPT, Sampling(**cold), max_tokens=20, behaviour=True),
        TextRequest(PROMPT, Sampling(1.0, seed=1), max_tokens=20, grammar=("regex", "[ab]{9}"), behaviour=True),
        TextRequest(PROMPT, Sampling(1.0, seed=2), max_tokens=5, behaviour=True),
        TextRequest(PROMPT, max_tokens=5, behaviour=True),
        TextRequest(PROMPT, Sampling(0.5, seed=3), max_tokens=5),
    ]
    altered, compelled, *others = engine.run(requests)
    raw = compute_logprobs(make_decoder(0), [*PROMPT, *list_tokens(altered)])[len(PROMPT) - 1 :]
    for place, event in enumerate(altered):
        raw[place, 65] += 4.0
        raw[place, list({each.token for each in altered[:place]})] -= 1.5
        share = filter_plainly(raw[place], requests[0].sampling)[event.token]
        assert event.behaviour_logprob == pytest.approx(math.log(share), abs=1e-3)
    raw = compute_logprobs(make_decoder(0), [*PROMPT, *list_tokens(compelled)])[len(PROMPT) - 1 :]
    for place, event in enumerate(compelled[:9]):
        share = raw[place, [97, 98]].softmax(-1)[event.token - 97]
        assert event.behaviour_logprob == pytest.approx(math.log(share), abs=1e-3)
    assert [{event.behaviour_logprob for event in each} for each in others] == [{None}, {0.0}, {None}]


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
    for text in generate(engine, ("regex", r"\d{3}/[\w-]{2}"), 9):
        assert re.fullmatch("[0-9]{3}/[0-9A-Za-z_-]{2}", text)
    for text in generate(engine, ("json_schema", {"type": "string", "pattern": r"^\d{2}\w$"})):
        assert re.fullmatch('"[0-9]{2}[0-9A-Za-z_]"', text)
    assert set(generate(engine, ("choice", ["yes", 'no "really"']), 6)) <= {"yes", 'no "really"'}
    assert all(text.strip("+1") == "" for text in generate(engine, ("lark", 'start: "1" ("+" "1"){1,3}')))
    engine.prepare(TextRequest(PROMPT, grammar=("regex", "x{2}[yz]")))
    monkeypatch.setattr(GrammarCompiler, "_compile", None)  # once is enough
    assert {text[:2] for _ in range(2) for text in generate(engine, ("regex", "x{2}[yz]"))} == {"xx"}


@pytest.mark.parametrize("blank", [" ", "\n", "\t"])
@pytest.mark.parametrize("begin", ["", "start: %json "])
def test_a_model_that_prefers_white_space_comes_to_the_end_of_its_json(
    blank: str, begin: str, engine: SlotEngine
) -> None:
    schema = {"type": "array", "items": {"enum": [1, True]}, "minItems": 2, "maxItems": 2, "title": "%json {}"}
    sampling = Sampling(logit_bias={ord(each): 100.0 for each in {blank, "\n"}})
    kind: Any = "lark" if begin else "json_schema"
    request = TextRequest(PROMPT, sampling, max_tokens=80, grammar=(kind, begin + json.dumps(schema)))
    ((*_, end),) = engine.run([request])
    assert end.finish == "stop"
    (free,) = engine.run([TextRequest(PROMPT, sampling, max_tokens=9, grammar=("lark", "start: %json {}"))])
    assert "".join(event.text for event in free).strip()


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
