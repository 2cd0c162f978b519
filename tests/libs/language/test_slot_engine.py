"""What an engine guarantees, whatever else it computes at the time, and of the text that it writes."""

import gc
import itertools
import random
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from tests.libs.language.tiny_language import (
    VOCABULARY,
    Bytes,
    compute_logprobs,
    continue_greedily,
    copy_state,
    list_tokens,
    make_decoder,
)

from refusals import refused
from shoal.errors import ConfigError, InferenceError
from shoal.libs.language.engine import Sampling, SlotEngine, TextRequest, TokenEvent, models
from shoal.libs.language.engine.cells import CacheCells
from shoal.libs.language.engine.text import TextStream
from shoal.models.decoder import Decoder

PROMPT = tuple(range(40, 64))
Answers = dict[tuple[int, int], list[TokenEvent]]


def check_answer(models: Sequence[Decoder], request: TextRequest, events: Sequence[TokenEvent]) -> None:
    """Each token is the uncached choice of its version, and so is its log-probability."""
    tokens = list_tokens(events)
    versions = [event.version for event in events if event.token is not None]
    text = [*request.prompt, *tokens]
    for version in set(versions):
        expected = compute_logprobs(models[int(version)], text)[len(request.prompt) - 1 :]
        for place, event in enumerate(event for event in events if event.token is not None):
            if event.version == version:
                assert event.token == int(expected[place].argmax())
                assert event.logprob == pytest.approx(float(expected[place, event.token]), abs=1e-4)
    spans = tuple((version, len(list(group))) for version, group in itertools.groupby(versions))
    last = events[-1]
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    assert (last.spans, last.finish is None) == (spans, False)
    if request.swap == "finish":
        assert len(spans) <= 1
    if last.finish == "length":
        assert len(tokens) == request.max_tokens
    else:
        assert last.finish == "cancelled" or (last.finish == "swapped" and request.swap == "refuse")


class Schedule:
    """Random joins, leaves, groups, shared prefixes, priorities and new weights."""

    def __init__(self, seed: int, deterministic: bool) -> None:
        self.models = [make_decoder(version) for version in range(4)]
        self._states = [copy_state(model) for model in self.models]
        self.engine = SlotEngine(make_decoder(0), slots=4, chunk=8, length=80, spare=2, deterministic=deterministic)
        self.requests: dict[int, TextRequest] = {}
        self.answers: Answers = defaultdict(list)
        self._random, self._version = random.Random(seed), 0
        self._prefixes = [[self._random.randrange(VOCABULARY) for _ in range(30)] for _ in range(3)]

    def act(self) -> None:
        chance = self._random.random()
        if chance < 0.5:
            prefix = self._random.choice(self._prefixes)[: self._random.randint(0, 30)]
            prompt = (*prefix, *(self._random.randrange(VOCABULARY) for _ in range(self._random.randint(1, 12))))
            swap: Any = self._random.choice(["continue", "continue", "finish", "refuse"])
            request = TextRequest(
                prompt,
                max_tokens=self._random.randint(1, 24),
                num_answers=self._random.choice([1, 1, 1, 3]),
                swap=swap,
                priority=self._random.choice([0, 0, 0, 1]),
            )
            self.requests[self.engine.submit(request)] = request
        elif chance < 0.6 and self.requests:
            self.engine.cancel(self._random.choice(list(self.requests)))
        elif chance < 0.65 and self._version < 3:
            self._version += 1
            self.engine.set_weights(self._version, self._states[self._version])

    def step(self) -> None:
        for event in self.engine.step():
            self.answers[event.request, event.index].append(event)


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_are_those_without_a_cache_in_any_order_of_events(deterministic: bool) -> None:
    totals = torch.zeros(4, dtype=torch.int64)
    for seed in range(2):
        schedule = Schedule(seed, deterministic)
        for _ in range(60):
            schedule.act()
            schedule.step()
        while schedule.engine.has_work:
            schedule.step()
        expected = {(number, i) for number, each in schedule.requests.items() for i in range(each.num_answers)}
        assert schedule.answers.keys() == expected
        for (number, _), events in schedule.answers.items():
            check_answer(schedule.models, schedule.requests[number], events)
        seen = schedule.engine.observe()
        assert (seen.running, seen.queued, seen.queued_tokens) == (0, 0, 0)
        totals += torch.tensor([seen.shared_tokens, seen.refilled_tokens, seen.preempted, 0])
        totals[3] += sum(len(events[-1].spans) > 1 for events in schedule.answers.values())
    assert (totals > 0).tolist() == [True, True, not deterministic, True]  # all of it has happened


def test_rows_of_a_large_model_are_padded_and_keep_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_LARGE", 0)
    assert [models.open_model(make_decoder(0)).pad_rows(num) for num in (7, 8, 15, 17)] == [7, 16, 16, 17]
    engine = SlotEngine(make_decoder(0), slots=14, chunk=16, length=80)
    requests = [TextRequest(tuple(range(40 + number, 50 + 2 * number)), max_tokens=3 + number) for number in range(14)]
    for request, events in zip(requests, engine.run(requests), strict=True):
        check_answer([make_decoder(0)], request, events)


def test_neighbours_change_neither_seeded_tokens_nor_deterministic_bits() -> None:
    prompts = [tuple((7 * i + j) % VOCABULARY for j in range(5 + 9 * i)) for i in range(5)]
    requests = [TextRequest(p, Sampling(0.9, top_p=0.95, seed=i), max_tokens=20) for i, p in enumerate(prompts)]
    for deterministic in (False, True):
        make = {"slots": 3, "chunk": 8, "length": 80, "deterministic": deterministic}
        together = SlotEngine(make_decoder(0), **make).run(requests)
        for request, found in zip(requests, together, strict=True):
            (alone,) = SlotEngine(make_decoder(0), **make).run([request])
            assert list_tokens(found) == list_tokens(alone)
            if deterministic:
                assert [event.logprob for event in found] == [event.logprob for event in alone]


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_answer_continues_elsewhere_from_the_tokens_it_has(deterministic: bool) -> None:
    make = {"slots": 3, "chunk": 8, "deterministic": deterministic}
    request = TextRequest(PROMPT, Sampling(1.0, seed=5, frequency_penalty=0.5), max_tokens=40)
    (events,) = SlotEngine(make_decoder(0), **make).run([request])
    tokens = list_tokens(events)
    engine = SlotEngine(make_decoder(0), **make)
    engine.run([TextRequest((*PROMPT, *tokens), max_tokens=1)])  # has cells of these tokens, by chunks
    rest = replace(request, given=tuple(tokens[:30]))
    (found, _) = engine.run([rest, TextRequest(PROMPT[3:], max_tokens=40)])
    assert list_tokens(found) == tokens[30:]
    if deterministic:
        assert [event.logprob for event in found] == [event.logprob for event in events[30:]]


def test_a_cancelled_request_frees_its_slot_before_the_next_step_computes() -> None:
    engine = SlotEngine(make_decoder(0), slots=1)
    first, second = (engine.submit(TextRequest(PROMPT, max_tokens=40)) for _ in range(2))
    assert [event.request for event in engine.step()] == [first]
    engine.cancel(first)
    ended, begun = engine.step()
    assert (ended.request, ended.finish, ended.spans) == (first, "cancelled", ((0, 1),))
    assert (begun.request, begun.token) == (second, continue_greedily(make_decoder(0), PROMPT, 1)[0])
    engine.cancel(second)
    engine.cancel(99)
    (ended,) = engine.step()
    assert (ended.finish, engine.has_work) == ("cancelled", False)


def test_eight_answers_take_one_prefill() -> None:
    engine = SlotEngine(make_decoder(0), slots=8, chunk=16)
    (events,) = engine.run([TextRequest(PROMPT, Sampling(1.0, seed=1), max_tokens=5, num_answers=8)])
    seen = engine.observe()
    assert (seen.prompt_tokens, seen.shared_tokens) == (len(PROMPT), 7 * (len(PROMPT) - 1))
    answers = {tuple(e.token for e in events if e.index == index) for index in range(8)}
    assert len(answers) > 4
    engine.run([TextRequest((*PROMPT, 3), max_tokens=1)])  # a later prompt finds what slots still hold
    assert engine.observe().shared_tokens == 8 * len(PROMPT) - 7


def test_no_cell_outlives_its_weights_and_no_weights_their_answers() -> None:
    engine = SlotEngine(make_decoder(0))
    old = weakref.ref(engine._weights.base.model)
    engine.run([TextRequest(PROMPT, max_tokens=2)])
    engine.set_weights(1, copy_state(make_decoder(1)))
    (events,) = engine.run([TextRequest(PROMPT, max_tokens=6)])
    assert list_tokens(events) == continue_greedily(make_decoder(1), PROMPT, 6)
    assert engine.observe().shared_tokens == 0
    gc.collect()
    assert old() is None


def test_new_weights_never_stall_a_running_answer_and_at_most_two_versions_are_held() -> None:
    engine = SlotEngine(make_decoder(0), slots=3, chunk=32)
    numbers = [engine.submit(TextRequest(PROMPT[i:], max_tokens=60)) for i in range(2)]
    numbers.append(engine.submit(TextRequest(PROMPT[5:], max_tokens=30, swap="finish")))
    while len(engine.step()) < 3:
        pass
    ends: list[TokenEvent] = []
    engine.set_weights(1, copy_state(make_decoder(1)))
    while engine.has_work:
        running = engine.observe().running
        events = engine.step()
        assert len(events) == running  # a token for each, in each step
        ends += [event for event in events if event.finish]
        if len(engine.observe().versions) == 2 and engine.observe().current == 1:
            engine.set_weights(2, copy_state(make_decoder(2)))
            engine.step()
            assert (engine.observe().current, engine.observe().pending) == (1, 2)
            break
    while engine.has_work:
        ends += [event for event in engine.step() if event.finish]
    spans = {event.request: [version for version, _ in event.spans] for event in ends}
    assert spans == {numbers[0]: [0, 1, 2], numbers[1]: [0, 1, 2], numbers[2]: [0]}


def test_full_queues_and_hopeless_deadlines_are_refused() -> None:
    engine = SlotEngine(make_decoder(0), slots=1, max_queued=3, max_queued_tokens=60)
    engine.submit(TextRequest(PROMPT))
    engine.submit(TextRequest(PROMPT))
    with pytest.raises(InferenceError, match="are queued") as raised:
        engine.submit(TextRequest(PROMPT))
    assert (raised.value.status, raised.value.retry_after_s) == (429, 0.1)
    late = engine.submit(TextRequest((1, 2), begin_s=1e-9))  # before a step was seen, any deadline may be met
    events = engine.step()
    assert [event.finish for event in events if event.request == late] == ["deadline"]
    engine.step()
    with refused(504, "begin_s = 1e-09: expected after"):
        engine.submit(TextRequest((1, 2), begin_s=1e-9))
    assert engine.observe().queued == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "prompt = .*holds no token"),
        ({"prompt": (VOCABULARY,)}, "prompt = '1 tokens': holds one outside of 0 to 255"),
        ({"prompt": (1,) * 96}, "prompt = '96 tokens': leaves no token of the context length of 96"),
        ({"num_answers": 10**6}, "num_answers = 1000000: expected 1 to 256"),
        ({"stop": ("a",) * 10_000}, "stop = '10000 texts': expected 16 at most"),
        ({"stop": ("",)}, "stop = '': expected 1 to 256 characters"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"given": (1, 2), "max_tokens": 2}, "given = '2 tokens': are max_tokens = 2 already"),
        ({"swap": "finnish"}, "swap = 'finnish': expected .*did you mean 'finish'?"),
        ({"adapter": "no"}, "adapter = 'no': is unknown"),
        ({"begin_s": 0}, "begin_s = 0: must be above zero"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature = nan: expected 0.0 to 100.0"),
        ({"sampling": Sampling(logit_bias={300: 1.0})}, "logit_bias = '1 tokens': holds one outside"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    engine = SlotEngine(make_decoder(0), tokenizer=Bytes())
    with pytest.raises(ConfigError, match=message):
        engine.submit(TextRequest(**{"prompt": PROMPT, **fields}))
    assert engine.observe().queued == 0


def test_weights_that_do_not_fit_are_refused() -> None:
    engine = SlotEngine(make_decoder(0))
    with pytest.raises(ConfigError, match="weights = 'other': is no tensor of the network"):
        engine.set_weights(1, {"other": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"head.norm.weight.*has shape \(1,\), not \(32,\)"):
        engine.set_weights(1, {"head.norm.weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"weights = .*are its heads, not \[8, 8\]: another network"):
        engine.set_weights(1, Decoder(num_tokens=VOCABULARY, context=96, width=32, heads=2))
    with pytest.raises(ConfigError, match=r"Linear.*is no network that generates"):
        SlotEngine(torch.nn.Linear(2, 2))
    engine.set_weights(1, {"head.norm.weight": torch.full((32,), torch.nan)})
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5)):
        ((event,),) = engine.run([TextRequest(PROMPT, sampling)])
        assert (event.finish, event.problem) == ("error", "the model's logits are not finite")


def test_adapters_of_one_base_share_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    base = make_decoder(0)
    merged = [make_decoder(0) for _ in range(2)]
    adapters = []
    for model in merged:
        state = {}
        for name in ("block1.attention.query", "block2.feed_forward.up"):
            weight = model.get_submodule(name).weight
            up, down = (torch.randn(shape, generator=generator) for shape in ((weight.shape[0], 4), (4, 32)))
            state |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
            weight.data += 0.1 * up @ down
        adapters.append(state)
    for deterministic in (False, True):
        engine = SlotEngine(make_decoder(0), slots=4, chunk=8, deterministic=deterministic)
        for name, state in zip("ab", adapters, strict=True):
            engine.set_weights(f"{name}1", state, adapter=name, scale=0.1)
        found = engine.run([TextRequest(PROMPT, max_tokens=8, adapter=name) for name in ("", "a", "b", "a")])
        for model, events, version in zip((base, *merged, merged[0]), found, (0, "a1", "b1", "a1"), strict=True):
            assert list_tokens(events) == continue_greedily(model, PROMPT, 8)
            assert events[-1].spans == ((version, 8),)
    for name in ("block1", "head.output", "absent"):
        with pytest.raises(ConfigError, match=f"adapter = '{name}': is no linear layer inside of the base model"):
            engine.set_weights(1, {f"{name}.lora_A.weight": torch.zeros(1, 1)}, adapter="c")


def test_text_is_cut_before_a_stop_text_that_several_tokens_make() -> None:
    prompt = (104, 105)
    tokens = continue_greedily(make_decoder(3), prompt, 12)
    text = Bytes().decode(tokens)
    stop = text[4:6]
    engine = SlotEngine(make_decoder(3), tokenizer=Bytes())
    events, whole, by_token = engine.run(
        [
            TextRequest(prompt, max_tokens=12, stop=("never met", stop)),
            TextRequest(prompt, max_tokens=12, top_logprobs=3),
            TextRequest(prompt, max_tokens=12, stop_tokens=(tokens[2],)),
        ]
    )
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert events[-1].finish == "stop"
    assert "".join(event.text for event in whole) == text
    assert all(event.top_logprobs[0] == (event.token, pytest.approx(event.logprob)) for event in whole)
    assert list_tokens(by_token) == tokens[: tokens.index(tokens[2]) + 1]
    assert by_token[-1].finish == "stop"


def test_a_cache_takes_memory_as_texts_are_written() -> None:
    cells = CacheCells(16, 1 << 16)
    before = psutil.Process().memory_info().rss
    key = torch.ones(8, 1, 64)
    keys, _ = cells.write(0, torch.tensor([3 << 16]), key, key)
    assert cells.token_bytes == 2 * 8 * 64 * 4
    assert psutil.Process().memory_info().rss - before < 1 << 27  # of the 4.5 GB that all of them would be
    assert keys[3, :, 0].eq(1).all()
    assert not keys[3, :, 1].any()


DECODE = Bytes().decode


def test_characters_come_whole() -> None:
    stream = TextStream(DECODE, b"once ", ())
    parts = [stream.push(byte) for byte in "aé€😀".encode()]
    assert [part for part in parts if part] == ["a", "é", "€", "😀"]
    assert stream.finish() == ""


def test_bytes_that_are_no_character_are_replaced_and_do_not_hold_back_the_rest() -> None:
    stream = TextStream(DECODE, b"", ())
    parts = [stream.push(byte) for byte in b"\xff\xff\xff\xff\xffabc\xe2\x82"]
    assert "".join(parts).endswith("abc")
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("seed", range(30))
def test_a_stop_text_is_found_wherever_it_lies(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice("abé") for _ in range(40))
    stops = ["".join(chance.choice("abé") for _ in range(chance.randint(2, 5))) for _ in range(3)]
    places = [text.index(stop) for stop in stops if stop in text]
    stream = TextStream(DECODE, b"x", stops)
    seen = ""
    for byte in text.encode():
        seen += stream.push(byte)
        if stream.stopped:
            break
        assert not any(stop in seen for stop in stops)
    seen += stream.finish()
    # of stop texts that overlap, the one that is complete first ends the answer
    ends = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
    expected = text if ends is None else min((p for p in places if p < ends), default=0)
    assert seen == expected or (ends is not None and text.startswith(seen) and len(seen) in places)


# -- causal models of transformers over slots: as without a cache, or refused


SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # learnt positions
    "gemma3_text": {**GROUPED, "sliding_window": 6},  # some layers see six tokens
    "deepseek_v3": {  # keys and values of different sizes
        **{"n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
        **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"n_group": 1, "topk_group": 1},
    },
}


def build(kind: str, **fields: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_without_a_cache(kind: str) -> None:
    model, other = build(kind, **KINDS[kind]), build(kind, **KINDS[kind])
    for parameter in other.parameters():
        parameter.data += 0.1
    engine = SlotEngine(model, slots=3, length=48, chunk=8)
    differences = []
    for version, module in enumerate((build(kind, **KINDS[kind]), other)):
        if version:
            engine.set_weights(version, copy_state(other))
        prompts = [tuple(torch.randint(1, 64, (size,)).tolist()) for size in (3, 20, 11, 20)]
        for prompt, events in zip(
            prompts, engine.run([TextRequest(each, max_tokens=12) for each in prompts]), strict=True
        ):
            expected = compute_logprobs(module, [*prompt, *list_tokens(events)])[len(prompt) - 1 : -1]
            assert list_tokens(events) == expected.argmax(-1).tolist()
            assert events[-1].spans == ((version, 12),)
            differences += [abs(each.logprob - float(row.max())) for each, row in zip(events, expected, strict=True)]
    assert max(differences) <= 1e-4
    assert sum(differences) / len(differences) <= 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("gpt_oss", {**GROUPED, "num_local_experts": 4}, "has attention with s_aux"),
        ("mamba", {}, "has an attention that cannot be exchanged"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depend on the length",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlotEngine(build(kind, **fields))
