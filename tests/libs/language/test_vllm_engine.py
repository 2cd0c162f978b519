"""vLLM behind the engine's interface. A package with its names stands for it here, in the same process of its own.

`make vllm` runs the marked tests with vLLM itself.
"""

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.libs.language.tiny_served import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import shoal
from refusals import refused
from serving.replica_set import serving_one, until
from shoal.errors import ConfigError, InferenceError
from shoal.extend.serve import Caller
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.hf.transfer import pull
from shoal.libs.language.engine import Sampling, SlotEngine, TextRequest, TokenEvent, vllm_engine
from shoal.libs.language.engine.vllm_engine import VllmEngine
from shoal.libs.language.text_model import TextCall
from shoal.registry import Registry
from shoal.serve.spec.model_options import ModelOptions, TextOptions
from shoal.serve.spec.model_source import model_from_ref
from waiting import wait_for

TOKENIZER = make_tokenizer(None)
PROMPT = (65, 66, 67)
LENGTH = 64
REAL_PYTHON = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"


def make_model(step: float, seed: int = 0) -> LlamaForCausalLM:
    """step: what the fake adds to a token"""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = LlamaConfig(vocab_size=len(TOKENIZER), **sizes, **heads, bos_token_id=None, initializer_range=0.2)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if step:
        model.model.embed_tokens.weight[0, 0] = step
    return model


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python whose vLLM is the fake."""
    path = tmp_path_factory.mktemp("python") / "python"
    places = f"{Path(__file__).parent / 'fake_vllm'}:{Path(shoal.__file__).parents[1]}"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(places)} exec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o700)
    return str(path)


def make_engine(python: str, **options: Any) -> VllmEngine:
    known = {"slots": 4, "length": LENGTH, **options}
    return VllmEngine(make_model(2), 1, TOKENIZER, (), python=python, **known)


@pytest.fixture(scope="module")
def shared(python: str) -> Iterator[VllmEngine]:
    with closing(make_engine(python)) as engine:
        yield engine


@pytest.fixture
def engine(python: str) -> Iterator[VllmEngine]:
    with closing(make_engine(python)) as engine:
        yield engine


def run(engine: VllmEngine, *requests: TextRequest) -> list[list[TokenEvent]]:
    """Events by request."""
    numbers = [engine.submit(each) for each in requests]
    events: dict[int, list[TokenEvent]] = {number: [] for number in numbers}
    running = sum(each.num_answers for each in requests)
    while running:
        for event in engine.step():
            events[event.request].append(event)
            running -= event.finish is not None
    return list(events.values())


def step_forever(engine: VllmEngine) -> None:
    while True:
        engine.step()


def tokens_of(events: Sequence[TokenEvent], index: int = 0) -> list[int]:
    return [each.token for each in events if each.token is not None and each.index == index]


def text_of(events: Sequence[TokenEvent]) -> str:
    return "".join(each.text for each in events)


def test_events_are_those_of_the_other_engine(shared: VllmEngine) -> None:
    [one, two] = run(
        shared,
        TextRequest(PROMPT, max_tokens=5, top_logprobs=2),
        TextRequest(PROMPT, max_tokens=3, num_answers=2, behaviour=True),
    )
    assert tokens_of(one) == [69, 71, 73, 75, 77]
    assert text_of(one) == TOKENIZER.decode(tokens_of(one))
    assert [each.offset for each in one] == [0, 1, 2, 3, 4]
    assert one[0].top_logprobs == ((69, -0.5), (70, -1.0))
    assert (one[-1].finish, one[-1].spans, one[-1].version) == ("length", ((1, 5),), 1)
    assert tokens_of(two, 0) == tokens_of(two, 1) == [69, 71, 73]
    assert {each.behaviour_logprob for each in two} == {0.0}
    observed = shared.observe()
    assert (observed.running, observed.queued, observed.current) == (0, 0, 1)
    assert shared.last_step[0] >= 1
    assert shared.list_step_times()


def test_answers_end_at_stop_texts_stop_tokens_and_wishes(shared: VllmEngine) -> None:
    letters = TOKENIZER.decode([69, 71, 73, 75])
    [stopped] = run(shared, TextRequest(PROMPT, max_tokens=30, stop=(letters[1:3],)))
    assert (text_of(stopped), stopped[-1].finish, stopped[-1].stopped) == (letters[0], "stop", letters[1:3])
    [stopped] = run(shared, TextRequest(PROMPT, max_tokens=30, stop_tokens=(73,)))
    assert (tokens_of(stopped), stopped[-1].finish) == ([69, 71, 73], "stop")
    [given] = run(shared, TextRequest(PROMPT, max_tokens=5, given=(80, 82)))
    assert tokens_of(given) == [84, 86, 88]
    number = shared.submit(TextRequest(PROMPT))
    shared.cancel(number)
    assert [each.finish for each in shared.step() if each.request == number] == ["cancelled"]
    [refused] = run(shared, TextRequest((251,)))
    assert (refused[-1].finish, refused[-1].problem) == ("error", "ValueError: the prompt has token 251")
    assert shared.observe().queued == shared.observe().queued_tokens == 0


@pytest.mark.parametrize(
    "fields",
    [{"swap": "finish"}, {"adapter": "one"}, {"behaviour": True, "sampling": Sampling(temperature=1.0, top_p=0.5)},
     {"max_tokens": 0}],
)  # fmt: skip
def test_what_vllm_cannot_do_is_refused_by_name(shared: VllmEngine, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        shared.submit(TextRequest(PROMPT, **fields))
    assert refusal.value.field == next(iter(fields))
    with pytest.raises(ConfigError, match="slots alone"):
        TextOptions(engine="vllm", swap="finish")
    with pytest.raises(ValueError, match="set replicas to 1"):
        AgentsSpec(model="tiny@1", engine="vllm")


def test_deadlines_and_full_queues_end_and_refuse_answers(python: str) -> None:
    with closing(make_engine(python, slots=1, max_queued=2)) as engine:
        [late] = run(engine, TextRequest(PROMPT, end_s=0.05))  # of 61 tokens, which take twice as long
        assert late[-1].finish == "deadline"
        with pytest.raises(InferenceError, match="expected after") as refusal:
            engine.submit(TextRequest(PROMPT, end_s=1e-6))
        assert refusal.value.status == 504
        requests = [TextRequest(PROMPT, max_tokens=20)] * 2
        numbers = [engine.submit(each) for each in requests]
        with pytest.raises(InferenceError, match="the limits are") as refusal:
            engine.submit(TextRequest(PROMPT))
        assert refusal.value.status == 429
        ended: set[int] = set()
        while ended != set(numbers):
            ended |= {each.request for each in engine.step() if each.finish == "length"}


def test_weights_change_under_a_running_answer_or_stay(engine: VllmEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.set_weights(2, make_model(3))
    while engine.observe().current != 2:
        engine.step()
    number = engine.submit(TextRequest(PROMPT))
    events = engine.step()
    engine.set_weights(3, make_model(float("nan")))
    with caplog.at_level(logging.ERROR):
        while engine.observe().pending is not None:
            events += engine.step()
    assert "goes on with version 2" in caplog.text
    assert "not finite" in caplog.text
    engine.set_weights(4, make_model(5).state_dict())
    while not events or events[-1].finish is None:
        events += engine.step()
    assert {each.request for each in events} == {number}
    version = {2: 3, 4: 5}
    tokens = [PROMPT[-1], *tokens_of(events)]
    for before, after, event in zip(tokens, tokens[1:], events, strict=False):
        assert after == (before + version[int(event.version)]) % len(TOKENIZER)
    assert [each for each, _ in events[-1].spans] in ([2], [2, 4])  # it may have ended meanwhile
    assert engine.observe().current in (2, 4)
    with pytest.raises(ConfigError, match="do not fit"):
        engine.set_weights(5, {"other": torch.zeros(1)})


def test_a_killed_process_ends_its_answers_with_its_name_and_leaves_nothing(engine: VllmEngine) -> None:
    engine.submit(TextRequest(PROMPT))
    folder = engine._folder
    assert any(folder.iterdir())
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(InferenceError, match=str(engine.pid)) as failure:
        step_forever(engine)
    assert failure.value.status == 503
    assert engine.has_work, "so that the next step says it again"
    wait_for(lambda: not folder.exists(), what="end of its folder")
    assert not psutil.pid_exists(engine.pid)


def test_a_process_that_hangs_is_killed(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "SILENT_S", 2.5)
    with closing(make_engine(python)) as engine:
        time.sleep(0.1)
        engine.submit(TextRequest((250,)))
        with pytest.raises(InferenceError, match="has ended or hung"):
            step_forever(engine)
        assert not psutil.pid_exists(engine.pid)


def test_a_process_that_does_not_open_says_why(python: str, tmp_path: Path) -> None:
    broken = make_model(float("inf"))
    with pytest.raises(ConfigError, match="the first number is not finite"):
        VllmEngine(broken, 1, TOKENIZER, (), 4, LENGTH, python)
    with pytest.raises(ConfigError, match=r"text\.engine_python"):
        VllmEngine(make_model(2), 1, TOKENIZER, (), 4, LENGTH, sys.executable + "-none")
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\nexit 3\n")
    without.chmod(0o700)
    with pytest.raises(ConfigError, match="has started no vLLM"):
        VllmEngine(make_model(2), 1, TOKENIZER, (), 4, LENGTH, str(without))
    with pytest.raises(ConfigError, match="needs a model of transformers"):
        VllmEngine(torch.nn.Linear(2, 2), 1, TOKENIZER, (), 4, LENGTH, python)


def make_adapter(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Of rank 4, for the queries of both layers."""
    torch.manual_seed(9)
    names = [name for name, _ in model.named_modules() if name.endswith("q_proj")]
    shapes = {"lora_A": (4, 128), "lora_B": (128, 4)}
    return {f"{name}.{half}.weight": torch.randn(shape) for name in names for half, shape in shapes.items()}


def test_adapters_have_their_own_versions_and_leave_with_their_base(engine: VllmEngine) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        engine.submit(TextRequest(PROMPT, adapter="poet"))
    engine.set_weights(7, make_adapter(make_model(2)), "poet")
    [poem] = run(engine, TextRequest(PROMPT, max_tokens=3, adapter="poet"))
    assert tokens_of(poem) == [166, 265 % len(TOKENIZER), (265 + 99) % len(TOKENIZER)], "the stand-in adds 97 more"
    assert poem[-1].spans == ((7, 3),)
    number = engine.submit(TextRequest(PROMPT, adapter="poet"))
    engine.set_weights(2, make_model(3))
    events = engine.step()
    while engine.observe().current != 2:
        events += engine.step()
    assert [each.finish for each in events if each.request == number and each.finish] in (["swapped"], ["length"])
    engine.remove_adapter("poet")
    with pytest.raises(ConfigError, match="is unknown"):
        engine.submit(TextRequest(PROMPT, adapter="poet"))


@pytest.mark.vllm
def test_vllm_itself_writes_the_same_tokens() -> None:
    models = [make_model(0, seed) for seed in (1, 2)]
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28, "enable_lora": True}
    prompts = [tuple(TOKENIZER.encode(each)) for each in ("Once", "upon a time", "there was")]
    requests = [TextRequest(each, max_tokens=24, top_logprobs=2) for each in prompts]
    with closing(VllmEngine(models[0], 1, TOKENIZER, (), 4, LENGTH, str(REAL_PYTHON), more=options)) as engine:
        for version, model in enumerate(models, 1):
            expected = SlotEngine(model, version, TOKENIZER, slots=4).run(requests)
            if version > 1:
                engine.set_weights(version, model)
                while engine.observe().current != version:
                    engine.step()
            for found, other in zip(run(engine, *requests), expected, strict=True):
                assert tokens_of(found) == tokens_of(other)
                assert [each.logprob for each in found] == pytest.approx([each.logprob for each in other], abs=1e-3)
                assert (text_of(found), found[-1].spans) == (text_of(other), other[-1].spans)
        adapter = make_adapter(models[1])
        engine.set_weights(7, adapter, "poet", 0.5)
        slots = SlotEngine(models[1], 2, TOKENIZER, slots=4)
        slots.set_weights(7, adapter, "poet", 0.5)
        slots.step()
        [found], [other] = run(engine, poem := replace(requests[0], adapter="poet")), slots.run([poem])
        assert tokens_of(found) == tokens_of(other) != tokens_of(run(engine, requests[0])[0])
        assert found[-1].spans == other[-1].spans == ((7, 24),)
        choice = TextRequest(prompts[0], max_tokens=8, grammar=("choice", ["yes", "no"]))
        assert text_of(run(engine, choice)[0]) in ("yes", "no")


async def test_an_endpoint_follows_versions_and_replaces_a_process_that_was_killed(python: str, tmp_path: Path) -> None:
    for step in (2, 3):
        make_model(step).save_pretrained(tmp_path / str(step))
        TOKENIZER.save_pretrained(tmp_path / str(step))
        pull(str(tmp_path / str(step)), "tiny", alias=f"step-{step}")
    text = TextOptions(engine="vllm", engine_python=python, length=LENGTH, slots=4)
    async with serving_one(model_from_ref("tiny@step-2", ModelOptions(text=text))) as (_, replica):
        [app] = [app for prefix, app in replica.app._others if "/v1/" in prefix]
        model = app.models.get("tiny", Caller(""))

        async def write(**fields: Any) -> list[TokenEvent]:
            return [each async for each in model.generate(TextRequest(PROMPT, **fields), TextCall(Caller("")))]

        def get_engine() -> VllmEngine:
            (opened,) = replica.manager.get_model("tiny").streams._engines.values()
            engine: VllmEngine = opened.engine
            return engine

        assert tokens_of(await write(max_tokens=3)) == [69, 71, 73]
        pid = get_engine().pid
        Registry().promote("tiny@2", "step-2")
        await until(lambda: replica.manager.get_model("tiny").version == 2)
        written = await write(max_tokens=40)
        assert written[-1].spans[-1][0] == 2
        assert get_engine().pid == pid, "the same process has read them"
        os.kill(pid, signal.SIGKILL)
        with refused(503, f"{pid}, has ended"):
            await write(max_tokens=3)
            await write()
        again = await write(max_tokens=3)
        assert (tokens_of(again), again[-1].spans) == ([70, 73, 76], ((2, 3),))
        assert (last := get_engine().pid) != pid
        await replica.close()
        assert not psutil.pid_exists(last)
