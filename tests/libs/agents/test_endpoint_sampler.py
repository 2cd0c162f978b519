"""An endpoint's replicas as a sampler: the events are those of the engine, also where the replica changes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.libs.language.tiny_served import EngineModel, Models, serve_tiny

from shoal.errors import ConnectionLost, InferenceError
from shoal.extend.serve import Caller
from shoal.libs.agents.sessions.endpoint_sampler import EndpointSampler
from shoal.libs.language.engine import Sampling, TextRequest, TokenEvent
from shoal.libs.language.text_model import TextCall

CALL = TextCall(Caller("agent"))
REQUEST = TextRequest((1, 2, 3), Sampling(temperature=1.0, seed=7), max_tokens=12)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture(scope="module")
def port(models: Models) -> Iterator[int]:
    with serve_tiny(models) as port:
        yield port


async def collect(events: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in events]


def sample(port: int, request: TextRequest, model: str = "tiny") -> list[TokenEvent]:
    async def ask() -> list[TokenEvent]:
        sampler = EndpointSampler(lambda: f"http://127.0.0.1:{port}", model, "x", 2048)
        try:
            return await collect(sampler.generate(request, CALL))
        finally:
            await sampler.close()

    return asyncio.run(ask())


def test_the_events_are_those_of_the_engine(port: int) -> None:
    model = EngineModel("tiny")
    expected = asyncio.run(collect(model.generate(REQUEST, CALL)))
    got = sample(port, REQUEST)
    for name in ("token", "version"):
        assert [getattr(each, name) for each in got] == [getattr(each, name) for each in expected]
    assert [each.logprob for each in got] == pytest.approx([each.logprob for each in expected], abs=1e-5)
    assert "".join(each.text for each in got) == "".join(each.text for each in expected)
    assert got[-1].finish == "length"


def test_how_likely_a_token_was_where_sampling_is_not_plain(port: int) -> None:
    cold = replace(REQUEST, sampling=Sampling(temperature=0.5, seed=7), behaviour=True)
    assert all(each.behaviour_logprob is not None for each in sample(port, cold))
    assert {each.behaviour_logprob for each in sample(port, REQUEST)} == {None}


def test_several_answers_are_as_many_requests(port: int) -> None:
    got = sample(port, replace(REQUEST, sampling=Sampling(temperature=1.0), num_answers=3))
    assert sorted(each.index for each in got if each.finish) == [0, 1, 2]
    assert [sum(each.index == index for each in got) for index in range(3)] == [12] * 3


def test_an_answer_that_cannot_be_read_ends_all(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_off(*_: object) -> AsyncIterator[Any]:
        raise KeyError("choices")
        yield

    monkeypatch.setattr(EndpointSampler, "_stream", break_off)
    with pytest.raises(KeyError, match="choices"):
        sample(port, replace(REQUEST, num_answers=3))


def test_a_refusal_names_its_field(port: int) -> None:
    with pytest.raises(InferenceError, match="context") as caught:
        sample(port, replace(REQUEST, prompt=(1,) * 4000))
    assert caught.value.status == 400


def test_an_answer_is_of_the_version_that_is_asked_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the replicas do not have yet is waited for, one that they have no more is refused by its number."""
    stream = EndpointSampler._stream
    asked: list[str] = []

    async def come_late(self: EndpointSampler, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[Any]:
        asked.append(body["model"])
        late = {"model": "tiny@2"} if len(asked) == 1 else {}
        async for choice in stream(self, body | late, headers):
            yield choice

    async def ask() -> list[TokenEvent]:
        sampler = EndpointSampler(lambda: f"http://127.0.0.1:{port}", "tiny", "x", 2048)
        try:
            events = await collect(sampler.generate(REQUEST, replace(CALL, version=3)))
            with pytest.raises(InferenceError, match="has no version 2; it serves 3") as caught:
                await collect(sampler.generate(REQUEST, replace(CALL, version=2)))
            assert caught.value.status == 404
            return events
        finally:
            await sampler.close()

    monkeypatch.setattr(EndpointSampler, "_stream", come_late)
    assert {each.version for each in asyncio.run(ask())} == {3}
    assert asked == ["tiny@3", "tiny@3", "tiny@2"]


def test_an_answer_goes_on_where_its_replica_has_died(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream breaks off once, in the middle: the tokens are those of an answer that was not cut."""
    expected = [each.token for each in sample(port, REQUEST)]
    stream = EndpointSampler._stream
    given: list[int] = []

    async def break_off(self: EndpointSampler, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[Any]:
        given.append(sum(len(tokens) for _, tokens in body.get("given", ())))
        async for number, choice in enumerate_async(stream(self, body, headers)):
            yield choice
            if len(given) == 1 and number == 4:
                raise ConnectionLost("the replica has died")

    monkeypatch.setattr(EndpointSampler, "_stream", break_off)
    assert [each.token for each in sample(port, REQUEST)] == expected
    assert given == [0, 5]


async def enumerate_async(items: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    number = 0
    async for item in items:
        yield number, item
        number += 1
