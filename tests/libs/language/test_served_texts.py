"""Whole replicas that write text: versions, tracks, ends, metrics; no Ray, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny_language import VOCABULARY, continue_greedily, list_tokens, make_decoder, make_tokenizer_files
from torch import nn

from serving.replica_set import ReplicaSet, ask, infer, register, until
from shoal.errors import InferenceError
from shoal.extend.serve import Caller, ServedModel
from shoal.libs.language.app import TextApp
from shoal.libs.language.engine import Sampling, TextRequest, TokenEvent
from shoal.libs.language.served import text_engine
from shoal.libs.language.text_model import TextCall, TextModel, TextModels
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.serve.protocol.prometheus import render
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
from shoal.weights import WeightSnapshot, WeightStore

ANYONE = Caller("")
CALL = TextCall(ANYONE)
PROMPT = tuple(b"Once upon a time")
DECODER = ModelFactory(
    factory="shoal.models.decoder:Decoder",
    kwargs={"num_tokens": VOCABULARY, "context": 96, "width": 32, "depth": 2, "heads": 4},
)
SIGNATURE = Signature(
    inputs=[TensorSignature(name="ids", datatype="INT64", shape=[-1, -1])],
    outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, -1, VOCABULARY])],
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    return make_tokenizer_files(tmp_path_factory.mktemp("tokenizer"))


def make_weights(seed: int) -> WeightSnapshot:
    return WeightSnapshot.of(seed, {name: each.numpy() for name, each in make_decoder(seed).state_dict().items()})


def register_decoder(files: Mapping[str, bytes], seed: int, *aliases: str) -> ModelVersion:
    """The next version, with the weights of this seed."""
    return Registry().register(
        "tiny", make_weights(seed), model=DECODER, signature=SIGNATURE, files=files, aliases=aliases
    )


def find_texts(replica: EndpointReplica) -> TextModels:
    [app] = [app for prefix, app in replica.app._others if prefix == "/v1/"]
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


async def test_a_registered_version_writes_text_and_answers_tensors(files: Mapping[str, bytes]) -> None:
    register_decoder(files, 1, "champion")
    register("linear")
    async with ReplicaSet(model_from_ref("tiny@champion"), model_from_ref("linear@1")) as endpoint:
        [replica] = await endpoint.start()
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
        assert loaded is not None and loaded.module is not None
        mine, its = loaded.module.state_dict(), engine._current[""].model.module.state_dict()
        assert {name: each.data_ptr() for name, each in mine.items()} == {
            name: each.data_ptr() for name, each in its.items()
        }

        counts = served(replica).counts.snapshot()["versions"]["1"]
        assert counts["statuses"] == {"200": 4}  # two texts, the tensors, the vectors
        lines = render([replica.report()]).decode()
        assert 'shoal_text_prompt_tokens_total{model="tiny",replica="r1"} 32' in lines
        assert 'shoal_text_first_token_seconds_count{model="tiny",replica="r1"} 2' in lines
        assert replica.measure_load()["requests"] > 20


async def test_wrong_requests_are_refused_before_a_token(files: Mapping[str, bytes]) -> None:
    register_decoder(files, 1)
    async with ReplicaSet(model_from_ref("tiny@1"), model_from_ref("tiny@1")) as endpoint:
        [replica] = await endpoint.start()
        with pytest.raises(InferenceError, match="top_p") as wrong:
            await write(replica, sampling=Sampling(top_p=2.0))
        assert (wrong.value.status, wrong.value.field) == (400, "top_p")
        with pytest.raises(InferenceError, match="version") as wrong:
            await write(replica, TextCall(ANYONE, version=7))
        assert wrong.value.status == 404
        with pytest.raises(InferenceError) as wrong:
            find_texts(replica).get("tiny", Caller("key", models=frozenset({"other"})))
        assert wrong.value.status == 403
        with pytest.raises(InferenceError) as wrong:
            find_texts(replica).get("unknown", ANYONE)
        assert wrong.value.status == 404
        assert served(replica).counts.snapshot()["refused"] == {"400": 1, "404": 1}


async def test_a_version_without_a_tokenizer_is_not_listed() -> None:
    register_decoder({}, 1)
    async with ReplicaSet(model_from_ref("tiny@1")) as endpoint:
        [replica] = await endpoint.start()
        assert find_texts(replica).list(ANYONE) == []
        with pytest.raises(InferenceError, match="no language model with a tokenizer"):
            get_text(replica)


async def test_a_roll_out_under_streams_cuts_none_and_names_each_tokens_version(files: Mapping[str, bytes]) -> None:
    register_decoder(files, 1, "champion")
    async with ReplicaSet(model_from_ref("tiny@champion")) as endpoint:
        [replica] = await endpoint.start()
        streams = {each: await begin(replica, swap=each) for each in ("continue", "finish", "refuse")}
        register_decoder(files, 2)
        Registry().promote("tiny@2")
        await until(lambda: served(replica).version == 2)
        found = {name: events + [each async for each in stream] for name, (events, stream) in streams.items()}
        ends = {name: events[-1] for name, events in found.items()}
        for events in found.values():
            runs: dict[int, int] = {}
            for event in events:
                if event.token is not None:
                    runs[int(event.version)] = runs.get(int(event.version), 0) + 1
            assert tuple(runs.items()) == events[-1].spans
        assert (ends["finish"].finish, ends["finish"].spans) == ("length", ((1, 80),))
        if len(ends["continue"].spans) > 1:  # the roll-out came before its end
            assert ends["refuse"].finish == "swapped"
            before = list_tokens(found["continue"])[: ends["continue"].spans[0][1]]
            rest = continue_greedily(make_decoder(2), (*PROMPT, *before), 80 - len(before))
            assert list_tokens(found["continue"]) == before + rest
        assert versions_of(await write(replica, max_tokens=3)) == {2}
