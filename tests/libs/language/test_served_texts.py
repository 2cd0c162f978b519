"""Whole replicas that write text: versions, tracks, ends, metrics; no Ray, no socket."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny_language import VOCABULARY, continue_greedily, list_tokens, make_decoder, make_tokenizer_files
from torch import nn

from refusals import refused
from registered import arrays_of, register, tensors
from serving.replica_set import ReplicaSet, ask, exchange, infer, serving_one, until
from shoal.errors import InferenceError
from shoal.extend.serve import Caller, ServedModel
from shoal.libs.language.app import TextApp
from shoal.libs.language.engine import Sampling, SlotEngine, TextRequest, TokenEvent
from shoal.libs.language.engine.request import Swap
from shoal.libs.language.served import prepared, registered_adapters, text_engine
from shoal.libs.language.served.text_engine import RequestStream
from shoal.libs.language.text_model import TextCall, TextModel, TextModels
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature
from shoal.serve.messages.counts import VersionCounts
from shoal.serve.protocol.prometheus import render
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
from shoal.weights import WeightSnapshot, WeightStore

ANYONE = Caller("")
CALL = TextCall(ANYONE)
TOKEN_BYTES = 2 * 2 * 32 * 4  # in the cache: keys and values of two layers
PROMPT = tuple(b"Once upon a time")
DECODER = ModelFactory(
    factory="shoal.models.decoder:Decoder",
    kwargs={"num_tokens": VOCABULARY, "context": 96, "width": 32, "depth": 2, "heads": 4},
)
SIGNATURE = Signature(
    inputs=tensors(ids=("INT64", [-1, -1])),
    outputs=tensors(logits=[-1, -1, VOCABULARY]),
)


@cache
def list_files() -> Mapping[str, bytes]:
    """Of the tokenizer."""
    with TemporaryDirectory() as folder:
        return make_tokenizer_files(Path(folder))


def make_weights(seed: int) -> WeightSnapshot:
    return WeightSnapshot.of(seed, arrays_of(make_decoder(seed)))


def register_decoder(
    seed: int, *aliases: str, name: str = "tiny", files: Mapping[str, bytes] | None = None
) -> ModelVersion:
    """The next version, with the weights of this seed."""
    files = list_files() if files is None else files
    return Registry().register(
        name, make_weights(seed), model=DECODER, signature=SIGNATURE, files=files, aliases=aliases
    )


def find_texts(replica: EndpointReplica) -> TextModels:
    [app] = [app for prefix, app in replica.app._others if "/v1/" in prefix]
    return cast(TextApp, app).models


def get_text(replica: EndpointReplica) -> TextModel:
    return find_texts(replica).get("tiny", ANYONE)


def served(replica: EndpointReplica) -> ServedModel:
    return cast(ServedModel, replica.manager.get_model("tiny"))


async def write(replica: EndpointReplica, call: TextCall = CALL, **request: Any) -> list[TokenEvent]:
    return [each async for each in get_text(replica).generate(TextRequest(PROMPT, **request), call)]


def versions_of(events: list[TokenEvent]) -> set[int]:
    return {int(event.version) for event in events}


async def begin(
    replica: EndpointReplica, call: TextCall = CALL, **request: Any
) -> tuple[list[TokenEvent], AsyncIterator[TokenEvent]]:
    """A stream whose first event has come."""
    stream = get_text(replica).generate(TextRequest(PROMPT, **request), call)
    return [await anext(stream)], stream


async def test_a_registered_version_writes_text_and_answers_tensors() -> None:
    register_decoder(1, "champion")
    register("linear")
    async with serving_one("tiny@champion", "linear@1") as (_, replica):
        assert [each.name for each in find_texts(replica).list(ANYONE)] == ["tiny"]  # the other is no language model
        text = get_text(replica)
        assert (text.context, text.tokenizer.decode(text.tokenizer.encode("Once"))) == (96, "Once")
        decoder = make_decoder(1)
        events = await write(replica, max_tokens=20)
        assert list_tokens(events) == continue_greedily(decoder, PROMPT, 20)
        assert (events[-1].finish, events[-1].spans) == ("length", ((1, 20),))
        assert "".join(each.text for each in events) == text.tokenizer.decode(list_tokens(events))
        choice = await write(replica, max_tokens=8, grammar=("choice", ["yes", "no"]))
        assert "".join(each.text for each in choice) in ("yes", "no")
        ids = {"name": "ids", "datatype": "INT64", "shape": [1, 16], "data": list(PROMPT)}
        answer = await ask(replica, "POST", "/v2/models/tiny/infer", {"inputs": [ids]})
        logits = np.array(answer.body["outputs"][0]["data"]).reshape(16, VOCABULARY)
        assert logits[-1].argmax() == events[0].token
        [vector, _], version = await text.embed([PROMPT, PROMPT[:3]], CALL)
        assert (version, vector.shape) == (1, (32,))
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)

        loaded = served(replica).router.stable
        engine = next(iter(served(replica).streams._engines.values())).engine  # type: ignore[union-attr, attr-defined]
        mine, its = loaded.module.state_dict(), engine._weights.base.model.module.state_dict()
        assert {name: each.data_ptr() for name, each in mine.items()} == {
            name: each.data_ptr() for name, each in its.items()
        }

        counts = served(replica).counts.snapshot().versions[1]
        assert counts.statuses == {200: 4}  # two texts, the tensors, the vectors
        lines = render([replica.report()]).decode()
        assert 'shoal_text_prompt_tokens_total{model="tiny",replica="r1"} 32' in lines
        assert 'shoal_text_first_token_seconds_count{model="tiny",replica="r1"} 2' in lines
        assert replica.measure_load()["requests"] > 20


async def test_a_text_ends_at_any_end_token_that_the_models_files_name() -> None:
    tokens = continue_greedily(make_decoder(1), PROMPT, 20)
    ends = [next(each for each in range(VOCABULARY) if each not in tokens), tokens[9]]
    files = list_files() | {"generation_config.json": json.dumps({"eos_token_id": ends}).encode()}
    register_decoder(1, "champion", files=files)
    async with serving_one("tiny@champion") as (_, replica):
        events = await write(replica, max_tokens=20)
        assert list_tokens(events) == tokens[: tokens.index(ends[1]) + 1]
        assert events[-1].finish == "stop"
        (engine,) = served(replica).streams._engines.values()  # type: ignore[union-attr, attr-defined]
        assert set(ends) <= engine.engine._stop_tokens


async def test_wrong_requests_are_refused_before_a_token() -> None:
    register_decoder(1)
    async with serving_one("tiny@1") as (_, replica):
        with pytest.raises(InferenceError, match="top_p") as wrong:
            await write(replica, sampling=Sampling(top_p=2.0))
        assert (wrong.value.status, wrong.value.field) == (400, "top_p")
        with refused(404, "version"):
            await write(replica, TextCall(ANYONE, version=7))
        with refused(403):
            find_texts(replica).get("tiny", Caller("key", models=frozenset({"other"})))
        with refused(404):
            find_texts(replica).get("unknown", ANYONE)
        assert served(replica).counts.snapshot().refused == {400: 1, 404: 1}


async def test_an_endpoint_below_a_root_has_its_texts_there() -> None:
    register()
    async with ReplicaSet("linear@1", route_prefix="/second") as endpoint:
        replica = endpoint.add()
        paths = []

        async def record(scope: Any, receive: Any, send: Any) -> None:
            paths.append(scope["path"])

        replica.app._others = [(prefix, record) for prefix, _ in replica.app._others]
        for path in ("/second/v1/models", "/v1/models", "/second/chat/completions"):
            await replica.app({"type": "http", "method": "GET", "path": path}, record, record)  # type: ignore[arg-type]
        assert paths == ["/v1/models", "/v1/models", "/chat/completions"]  # of a base_url without /v1


async def test_a_page_of_another_origin_reads_streams_and_errors() -> None:
    register_decoder(1)
    page, asked = "https://app.example", {"model": "tiny", "prompt": "Once", "stream": True, "max_tokens": 2}
    async with serving_one("tiny@1", allow_origins=[page]) as (_, replica):
        for method, path, body, status in [
            ("OPTIONS", "/v1/completions", None, 200),
            ("POST", "/v1/completions", asked, 200),
            ("POST", "/v1/completions", asked | {"model": "no"}, 404),
            ("HEAD", "/v1/models", None, 200),
        ]:
            messages: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
            headers = [(b"origin", page.encode()), (b"access-control-request-method", b"POST")]
            sent: list[Any] = []

            async def receive(messages: list[Any] = messages) -> Any:
                return messages.pop() if messages else await asyncio.get_running_loop().create_future()

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            await replica.app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
            assert sent[0]["status"] == status
            assert sent[0]["headers"].count((b"access-control-allow-origin", page.encode())) == 1


async def test_a_version_without_a_tokenizer_is_not_listed() -> None:
    register_decoder(1, files={})
    async with serving_one("tiny@1") as (_, replica):
        assert find_texts(replica).list(ANYONE) == []
        with pytest.raises(InferenceError, match="no language model with a tokenizer"):
            get_text(replica)


class Pace:
    """Steps of engines, counted; after `free` of them, each waits for more."""

    def __init__(self) -> None:
        self.num_steps, self._free = 0, threading.Semaphore(0)
        self._step = SlotEngine.step

    def allow(self, num: int) -> None:
        self._free.release(num)

    def step(self, engine: SlotEngine) -> list[TokenEvent]:
        assert self._free.acquire(timeout=60.0)
        self.num_steps += 1
        return self._step(engine)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    pace = Pace()
    monkeypatch.setattr(SlotEngine, "step", lambda engine: pace.step(engine))
    yield pace
    pace.allow(10_000)


async def test_a_roll_out_under_streams_cuts_none_and_names_each_tokens_version(pace: Pace) -> None:
    register_decoder(1, "champion")
    options = ModelOptions.model_validate({"text": {"swap": "refuse"}})
    async with serving_one(model_from_ref("tiny@champion", options)) as (_, replica):
        pace.allow(12)
        swaps: list[Swap | None] = ["continue", "finish", "refuse", None]
        streams = {each: await begin(replica, swap=each) for each in swaps}
        register_decoder(2)
        Registry().promote("tiny@2")
        await until(lambda: served(replica).version == 2)
        pace.allow(1000)
        found = {name: events + [each async for each in stream] for name, (events, stream) in streams.items()}
        for events in found.values():
            runs = Counter(int(event.version) for event in events if event.token is not None)
            assert tuple(runs.items()) == events[-1].spans
        ends = {name: (events[-1].finish, len(events[-1].spans)) for name, events in found.items()}
        swapped = dict.fromkeys(["refuse", None], ("swapped", 1))  # None: as the model's options say
        assert ends == {"continue": ("length", 2), "finish": ("length", 1)} | swapped
        before = list_tokens(found["continue"])[: found["continue"][-1].spans[0][1]]
        assert before == continue_greedily(make_decoder(1), PROMPT, len(before))
        rest = continue_greedily(make_decoder(2), (*PROMPT, *before), 80 - len(before))
        assert list_tokens(found["continue"]) == before + rest
        assert list_tokens(found["finish"]) == continue_greedily(make_decoder(1), PROMPT, 80)
        assert versions_of(await write(replica, max_tokens=3)) == {2}
        with refused(404):
            await write(replica, TextCall(ANYONE, version=1))
        assert replica.report().models["tiny"].counts.versions[1].statuses == {200: 1}  # type: ignore[union-attr]


async def test_a_canary_computes_its_share_beside_the_stable_version() -> None:
    register_decoder(1)
    register_decoder(2)
    async with serving_one("tiny@1") as (endpoint, replica):
        await endpoint.administer("canary", "tiny", version=2, percent=50)
        await until(lambda: served(replica).router.candidate_version == 2)
        texts = await asyncio.gather(*[write(replica, max_tokens=3) for _ in range(8)])
        assert Counter(next(iter(versions_of(each))) for each in texts) == {1: 4, 2: 4}
        for call, version in (
            (TextCall(ANYONE, version=2), 2),
            (TextCall(ANYONE, track="candidate"), 2),
            (TextCall(ANYONE, track="stable"), 1),
            *[(TextCall(ANYONE, last_version=version), version) for version in (1, 2) * 3],
        ):
            events = await write(replica, call, max_tokens=3)
            assert list_tokens(events) == continue_greedily(make_decoder(version), PROMPT, 3)
        streams = [await write(replica, TextCall(ANYONE, sticky="someone"), max_tokens=2) for _ in range(4)]
        assert len(set().union(*map(versions_of, streams))) == 1
        running, stream = await begin(replica, TextCall(ANYONE, version=2))
        await endpoint.administer("rollback", "tiny")
        await until(lambda: served(replica).versions == [1])
        rest = [each async for each in stream]  # pinned: it ends as it began
        assert list_tokens(running + rest) == continue_greedily(make_decoder(2), PROMPT, 80)


@asynccontextmanager
async def canary_under_streams(**guard: float) -> AsyncIterator[ReplicaSet]:
    """A canary of half of the texts, and the stable version beside it."""
    for seed in (1, 2):
        register_decoder(seed)
    model = {"text": {"slots": 4}, "guard": {"min_requests": 8, **guard}}
    async with serving_one("tiny@1", model=model) as (endpoint, replica):
        await endpoint.administer("canary", "tiny", version=2, percent=50)
        await until(lambda: served(replica).router.candidate_version == 2)
        yield endpoint


async def write_all(endpoint: ReplicaSet, num: int, **request: Any) -> list[Any]:
    """So many texts at once, or their errors; then the controller judges what was counted."""
    [replica] = endpoint.replicas.values()
    texts = await asyncio.gather(*[write(replica, **request) for _ in range(num)], return_exceptions=True)
    endpoint.controller.report(replica.report())
    return texts


@pytest.mark.parametrize("fault", ["raises", "writes nonsense", "is slow"])
async def test_a_canary_whose_texts_fail_or_come_slowly_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    step, record = SlotEngine.step, ServedModel.record_step

    def fail(engine: SlotEngine) -> list[TokenEvent]:
        weights = engine._weights.base
        if weights.version == 2 and fault == "raises":
            raise RuntimeError("secret")
        if weights.version == 2:
            next(weights.model.module.parameters()).data.fill_(torch.nan)
        return step(engine)

    def take_long(served: ServedModel, version: int, num_tokens: int, _: float) -> None:
        record(served, version, num_tokens, 0.3 if version == 2 else 0.1)

    if fault == "is slow":
        monkeypatch.setattr(ServedModel, "record_step", take_long)
    else:
        monkeypatch.setattr(SlotEngine, "step", fail)
    async with canary_under_streams() as endpoint:
        texts = await write_all(endpoint, 24, max_tokens=12)
        assert endpoint.phase("tiny") == "steady"
        event = endpoint.controller.state.events[-1]
        assert (event.kind, event.by) == ("rollback", "guard")
        expected = "3 times as long" if fault == "is slow" else "requests failed, of the stable version 0 of 1"
        assert expected in event.reason
        ends = Counter("raised" if isinstance(each, InferenceError) else each[-1].finish for each in texts)
        wrong = {"raises": "raised", "writes nonsense": "error", "is slow": "length"}[fault]
        assert ends.keys() == {"length", wrong}, "the stable version's streams are whole"
        await until(lambda: served(next(iter(endpoint.replicas.values()))).versions == [1])
        assert {each[-1].finish for each in await write_all(endpoint, 4, max_tokens=3)} == {"length"}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_stream_of_a_replica_that_ends_continues_at_another(pace: Pace, temperature: float) -> None:
    register_decoder(1)
    body: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "stream": True}
    body["temperature"] = temperature

    async def stream(replica: EndpointReplica, **more: Any) -> list[Any]:
        asked = json.dumps(body | more).encode()
        _, _, content = await exchange(replica, "POST", "/v1/completions", {"idempotency-key": "k"}, asked)
        return [json.loads(each[6:]) for each in content.split(b"\n\n") if each.startswith(b"data: {")]

    def join_text(frames: list[Any]) -> str:
        return "".join(each["choices"][0]["text"] for each in frames)

    async with ReplicaSet("tiny@1") as endpoint:
        one, two = await endpoint.start(2)
        pace.allow(14)
        cut = asyncio.create_task(stream(one))
        await until(lambda: pace.num_steps == 14)
        killing = asyncio.create_task(endpoint.kill("r1"))
        *begun, last = await cut
        pace.allow(1000)
        await killing
        assert "replica r1 ends this stream: model 'tiny' is closing" in last["error"]["message"]
        given = [pair for frame in begun for pair in frame["shoal"]["given"]]
        assert 8 <= sum(len(tokens) for _, tokens in given) <= 14
        rest = await stream(two, given=given)
        assert join_text(begun + rest) == join_text(await stream(two))
        assert rest[-1]["choices"][0]["shoal"]["spans"] == [[1, 40]]


async def test_a_reader_that_is_too_slow_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_engine, "MAX_UNREAD", 8)
    register_decoder(1)
    async with serving_one("tiny@1") as (_, replica):
        _, slow = await begin(replica)
        assert len(await write(replica, max_tokens=40)) == 40
        with pytest.raises(InferenceError, match="not read in time"):
            [_ async for _ in slow]


async def test_tensors_of_another_model_wait_for_a_step_not_for_a_text(pace: Pace) -> None:
    register_decoder(1)
    register("linear")
    async with serving_one("tiny@1", "linear@1") as (_, replica):
        pace.allow(1000)
        _, stream = await begin(replica)
        for _ in range(5):
            before = pace.num_steps
            assert (await infer(replica)).status == 200
            assert pace.num_steps - before <= 4
        assert len([each async for each in stream]) == 79


async def test_a_text_follows_live_weights(pace: Pace, tmp_path: Path) -> None:
    for name, content in list_files().items():
        (tmp_path / name).write_bytes(content)
    store = WeightStore()
    store.publish(make_weights(1))
    live = EndpointModel("tiny", LiveModel(DECODER, SIGNATURE, store))
    async with serving_one(live, model={"text": {"tokenizer": str(tmp_path)}}) as (_, replica):
        pace.allow(6)
        events, stream = await begin(replica)
        for version in (2, 3):
            store.publish(make_weights(version))
            await until(lambda expected=version: served(replica).version == expected)
        pace.allow(1000)
        events += [each async for each in stream]
        spans = [version for version, _ in events[-1].spans]
        assert (spans[0], spans[-1], spans) == (1, 3, sorted(spans))
        assert versions_of(await write(replica, max_tokens=2)) == {3}
        store.close()


async def test_an_unloaded_model_ends_its_streams_by_name_after_the_drain(pace: Pace) -> None:
    register_decoder(1)
    register("linear")
    async with serving_one("linear@1", drain_s=0.2) as (endpoint, replica):
        await endpoint.service.load("tiny", {"version": "1"}, "tester")
        await until(lambda: "tiny" in [each.name for each in find_texts(replica).list(ANYONE)])
        pace.allow(3)
        _, stream = await begin(replica)
        unloading = asyncio.create_task(endpoint.service.unload("tiny", "tester"))
        with refused(503, "'tiny' is no longer served here"):
            async for _ in stream:
                pass
        pace.allow(100)
        await unloading


async def test_a_replica_that_ends_says_so_and_a_failed_step_ends_its_answers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_decoder(1)
    async with serving_one("tiny@1") as (_, replica):
        step = SlotEngine.step

        def fail(engine: SlotEngine) -> list[TokenEvent]:
            raise RuntimeError("secret")

        _, stream = await begin(replica)
        monkeypatch.setattr(SlotEngine, "step", fail)
        with pytest.raises(InferenceError, match="failed") as failed:
            async for _ in stream:
                pass
        assert (failed.value.status, "secret" in str(failed.value)) == (500, False)
        monkeypatch.setattr(SlotEngine, "step", step)
        assert served(replica).counts.snapshot().versions[1].statuses == {500: 1}
        _, stream = await begin(replica)
        await replica.close()
        with refused(503, "'tiny' is closing"):
            async for _ in stream:
                pass
        with pytest.raises(InferenceError, match="closing"):
            await write(replica)


async def test_a_model_of_hugging_face_writes_and_keeps_its_own_attention(tmp_path: Path) -> None:
    """Its Task's network takes tensors by position: an engine takes the class of transformers below it."""
    import transformers

    from shoal.libs.hf.transfer import pull

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, eos_token_id=0, **sizes)
    network = transformers.LlamaForCausalLM(config).eval()
    network.save_pretrained(tmp_path / "model")
    make_tokenizer_files(tmp_path / "model")
    pull(str(tmp_path / "model"), "tiny")
    async with serving_one("tiny@champion") as (_, replica):
        found = await write(replica, max_tokens=6, stop_tokens=())
        assert list_tokens(found) == continue_greedily(network, PROMPT, 6)
        module = served(replica).router.stable.module  # type: ignore[union-attr]
        assert isinstance(module, nn.Module)
        assert module.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
        [vector], _ = await get_text(replica).embed([PROMPT], CALL)
        hidden = network.model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0).detach()
        assert np.allclose(vector, nn.functional.normalize(hidden, dim=0).numpy(), atol=1e-5)


@pytest.mark.parametrize(("length", "expected"), [(None, 60), (80, 80), (1000, 96)])
async def test_texts_are_as_long_as_half_of_the_memory_allows_or_as_they_are_to_be(
    monkeypatch: pytest.MonkeyPatch, length: int | None, expected: int
) -> None:
    register_decoder(1, "champion")
    monkeypatch.setattr(prepared, "count_memory", lambda device: 2 * 60 * (4 + 2) * TOKEN_BYTES)
    async with serving_one("tiny@1", model={"text": {"slots": 4, "length": length}}) as (_, replica):
        assert get_text(replica).context == expected


async def test_adapters_of_a_base_write_beside_it() -> None:
    base = register_decoder(1, "champion")
    first, second = (make_adapter("poet", base, seed) for seed in (1, 2))
    Registry().promote("poet@1")
    make_adapter("wide", base, 4, width=16)
    wrong = Registry().register(  # a run's, which has other weights than its source
        *("tiny", make_weights(2)),
        **{"model": DECODER, "signature": SIGNATURE, "aliases": (), "run_id": "one", "lineage": {"source": base.ref}},
    )
    make_adapter("stray", wrong, 5)
    key = Caller("bard", models=frozenset({"tiny:poet"}))
    text = {"adapters": ["*", "named@champion"], "slots": 4}
    async with serving_one("tiny@1", model={"text": text}) as (_, replica):
        texts = find_texts(replica)
        _, base_stream = await begin(replica)
        adapters = served(replica).streams.adapters  # type: ignore[union-attr]
        together = await asyncio.gather(*(adapters.find("poet", None) for _ in range(3)))
        assert len({*together}) == 1  # else each would replace the last, under running answers
        [events, pinned, plain] = await asyncio.gather(
            write_as(replica, "tiny:poet", CALL), write_as(replica, "tiny:poet", TextCall(ANYONE, 2)), write(replica)
        )
        for found, adapter, version in ((events, first, 1), (pinned, second, 2), (plain, None, 1)):
            assert list_tokens(found)[:12] == continue_greedily(adapt(make_decoder(1), adapter), PROMPT, 12)
            assert found[-1].spans[0][0] == version
        assert len([each async for each in base_stream]) == 79  # nothing was stopped
        assert [each.name for each in texts.list(ANYONE)] == ["tiny", "tiny:named", "tiny:poet"]
        assert [each.name for each in texts.list(key)] == ["tiny:poet"]
        assert texts.get("tiny:poet", key).name == "tiny:poet"
        with pytest.raises(InferenceError, match="is not for the model"):
            texts.get("tiny", key)
        for name, status, problem in (
            ("stray", 409, "is of tiny@2, and here answers tiny@1"),
            ("wide", 422, "does not fit a layer of shape"),
            ("tiny", 422, "tiny@1 is no adapter"),
            ("nothing", 404, "nothing"),
        ):
            with refused(status, problem):
                await write_as(replica, f"tiny:{name}", CALL)
        counted = served(replica).counts.snapshot().versions[1].statuses
        assert counted == {200: 4}  # an adapter's answers count for its base


async def test_of_many_adapters_those_leave_that_no_answer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (text_engine, registered_adapters):
        monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    base = register_decoder(1, "champion")
    pairs = {name: make_adapter(name, base, seed) for seed, name in enumerate(("poet", "bard", "scribe"))}
    async with serving_one("tiny@1", model={"text": {"adapters": ["*"], "slots": 4}}) as (_, replica):
        expected = {name: continue_greedily(adapt(make_decoder(1), pair), PROMPT, 12) for name, pair in pairs.items()}
        assert list_tokens(await write_as(replica, "tiny:poet", CALL))[:12] == expected["poet"]
        [engine] = served(replica).streams._engines.values()  # type: ignore[union-attr]
        engine._streams[-1] = RequestStream(TextRequest(PROMPT, adapter="poet"), 0.0)  # an answer that never ends
        for name in ("bard", "scribe", "bard"):
            assert list_tokens(await write_as(replica, f"tiny:{name}", CALL))[:12] == expected[name]
        assert list(engine._adapters) == ["poet", "bard"]
        assert [each.name for each in find_texts(replica).list(ANYONE)] == ["tiny", "tiny:scribe", "tiny:bard"]
        engine._streams[-2] = RequestStream(TextRequest(PROMPT, adapter="bard"), 0.0)
        with pytest.raises(InferenceError, match="2 adapters of this model are in use"):
            await write_as(replica, "tiny:scribe", CALL)
        engine._streams.clear()
        assert list_tokens(await write_as(replica, "tiny:scribe", CALL))[:12] == expected["scribe"]
        assert list(engine._adapters) == ["bard", "scribe"]


def make_adapter(name: str, base: ModelVersion, seed: int, width: int = 32) -> dict[str, torch.Tensor]:
    """Register the next version, as a run that trains adapters does."""
    torch.manual_seed(seed)
    layer = "block1.attention.query"
    pair = {
        f"{layer}.lora_A.default.weight": torch.randn(4, width),
        f"{layer}.lora_B.default.weight": torch.randn(32, 4),
    }
    Registry().register(
        name,
        WeightSnapshot.of(1, {each: tensor.numpy() for each, tensor in pair.items()}),
        model=ModelFactory(factory="a:b", kwargs={"args": {"lora": {"rank": 4, "alpha": 8}}}),
        signature=SIGNATURE,
        lineage={"base": base.ref, "base_sha256": base.manifest.sha256},
        aliases=["champion"],
    )
    return pair


def adapt(decoder: nn.Module, pair: Mapping[str, torch.Tensor] | None) -> nn.Module:
    if pair is not None:
        down, up = pair.values()
        decoder.get_parameter("block1.attention.query.weight").data += 2.0 * up @ down
    return decoder


async def write_as(replica: EndpointReplica, name: str, call: TextCall) -> list[TokenEvent]:
    return [each async for each in find_texts(replica).get(name, ANYONE).generate(TextRequest(PROMPT), call)]


async def test_a_cold_model_writes_once_it_is_loaded_here_or_elsewhere(tmp_path: Path) -> None:
    """Memory for one model at a time: each replica loads it, or has the other one answer."""
    from transformers import AutoTokenizer

    make_tokenizer_files(tmp_path)
    decode = AutoTokenizer.from_pretrained(tmp_path).decode
    sizes = [
        register_decoder(1).manifest.size_bytes,
        register_decoder(2, name="other").manifest.size_bytes,
    ]
    models = model_from_ref("tiny@1"), model_from_ref("other@1")
    async with ReplicaSet(*models, memory=max(sizes)) as endpoint:
        replicas = await endpoint.start(2)
        await until(lambda: all(each.rollout.is_open for each in endpoint.controller.state.models.values()))
        expected = {
            name: continue_greedily(make_decoder(seed), PROMPT, 6) for name, seed in (("tiny", 1), ("other", 2))
        }
        for name in ("tiny", "other", "tiny"):
            for replica in replicas:
                asked = {"model": name, "prompt": list(PROMPT), "max_tokens": 6, "temperature": 0}
                answer = await ask(replica, "POST", "/v1/completions", asked)
                assert answer.status == 200, answer.body
                assert answer.body["choices"][0]["text"] == decode(expected[name])
                assert answer.version == 1
        assert endpoint.num_forwarded >= 1
        token = await ask(replicas[0], "POST", "/v1/completions", asked, shoal_peer="guessed")
        assert token.status == 401
        unknown = await ask(replicas[0], "POST", "/v1/completions", asked | {"model": "nothing"})
        assert (unknown.status, unknown.body["error"]["code"]) == (404, "model_not_found")
        unknown = await ask(replicas[0], "POST", "/v1/completions", asked | {"model": "other@9"})
        assert (unknown.status, unknown.body["error"]["code"]) == (404, "model_not_found")


async def test_a_model_that_writes_is_not_idle(pace: Pace) -> None:
    size = register_decoder(1).manifest.size_bytes
    async with serving_one("tiny@1", memory=2 * size) as (endpoint, replica):
        await until(lambda: all(each.rollout.is_open for each in endpoint.controller.state.models.values()))
        pace.allow(4)
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 50, "stream": True}
        answering = asyncio.create_task(exchange(replica, "POST", "/v1/completions", {}, json.dumps(asked).encode()))
        await until(lambda: pace.num_steps >= 3)
        use = replica.manager.on_demand.get_use("tiny")
        use.since_s -= 100.0
        residency = replica.report().models["tiny"].residency
        assert residency.idle_s == 0.0
        pace.allow(100)
        assert (await answering)[0] == 200


async def test_a_shadow_writes_what_callers_got_and_counts_other_tokens() -> None:
    for seed in (1, 2, 1):
        register_decoder(seed)
    async with serving_one("tiny@1") as (endpoint, replica):
        for version, disagreed in ((2, 3), (3, 0)):
            await endpoint.administer("shadow", "tiny", version=version, percent=100)
            await until(lambda expected=version: served(replica).router.candidate_version == expected)
            for temperature in (0.0, 1.0, 1.0):
                assert versions_of(await write(replica, max_tokens=6, sampling=Sampling(temperature))) == {1}

            def count(of: int = version) -> VersionCounts:
                return served(replica).counts.snapshot().versions.get(of, VersionCounts())

            await until(lambda: count().compared == 3)
            assert count().disagreed == disagreed
            written = served(replica).streams.list_metrics()["shoal_text_new_tokens_total"].value  # type: ignore
            assert written == 18 * (version - 1)  # those for callers alone
            await endpoint.administer("rollback", "tiny")
            await until(lambda: not served(replica).router.candidate_version)
