"""The replicas of an endpoint as a sampler: tokens in and out by the completions API, with vLLM's names of fields.

An answer whose replica has died goes on at another: the request is repeated with what has come. Implements `Sampler`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx2
import msgspec

from shoal.errors import ConnectionLost, InferenceError
from shoal.libs.language.engine.request import TextRequest, TokenEvent
from shoal.libs.language.text_model import TextCall

PATIENCE_S = 60.0  # without a token, while replicas are on their way back
PAUSE_S = 0.5
Json = dict[str, Any]


class EndpointSampler:
    """find_url: the endpoint's address, asked for again after a failure; model: its name there; token: a key of it

    Used on one event loop. Close it.
    """

    is_alive = True

    def __init__(self, find_url: Callable[[], str], model: str, token: str, context: int) -> None:
        self.context = context
        self._find_url = find_url
        self._model = model
        self._newest = 0  # version that has answered
        self._http = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(None, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`. Several answers are as many requests."""
        if request.num_answers == 1:
            async with aclosing(self._continue(request, call, 0)) as events:
                async for event in events:
                    yield event
            return
        single = replace(request, num_answers=1)
        queue: asyncio.Queue[TokenEvent | asyncio.Task[None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._fill(queue, single, call, index)) for index in range(request.num_answers)]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        running = len(tasks)
        try:
            while running:
                got = await queue.get()
                if isinstance(got, asyncio.Task):  # that has ended, and may have failed
                    got.result()
                    continue
                running -= got.finish is not None
                yield got
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def pin(self, version: int) -> None:
        """The endpoint has the newest version and the one before it; another one is refused with the answer."""

    def retain(self, versions: Collection[int]) -> None:
        """The endpoint follows the run by itself."""

    def stop(self) -> None:
        """Answers in progress end with their connections."""

    async def close(self) -> None:
        await self._http.aclose()

    async def _fill(
        self,
        queue: asyncio.Queue[TokenEvent | asyncio.Task[None]],
        request: TextRequest,
        call: TextCall,
        index: int,
    ) -> None:
        async for event in self._continue(request, call, index):
            queue.put_nowait(event)

    async def _continue(self, request: TextRequest, call: TextCall, index: int) -> AsyncGenerator[TokenEvent]:
        """One answer, through the deaths of replicas. Raises InferenceError."""
        body = build_body(self._model, request, call)
        headers = {"idempotency-key": secrets.token_hex(16)}
        given: list[tuple[int, list[int]]] = []
        heard_s = time.monotonic()
        while True:
            try:
                async with aclosing(self._stream(body | ({"given": given} if given else {}), headers)) as choices:
                    async for choice, spans in choices:
                        heard_s = time.monotonic()
                        given += spans
                        self._newest = max(self._newest, *(version for version, _ in spans), 0)
                        for event in read_events(choice, spans, index):
                            yield event
                        if choice["finish_reason"] is not None:
                            return
                status, problem = 503, "the stream ended before its answer"
            except (httpx2.TransportError, ConnectionLost) as error:
                status, problem = 503, str(error) or type(error).__name__
            except InferenceError as error:
                # One that no replica has answered by, or the newest one, may be on its way to this replica.
                is_coming = error.status == 404 and call.version is not None and call.version >= self._newest
                if error.status not in (429, 502, 503) and not is_coming:
                    raise
                status, problem = 404 if is_coming else 503, error.message
            if time.monotonic() - heard_s > PATIENCE_S:
                problem = f"no replica has answered for {PATIENCE_S:g} s: {problem}"
                raise InferenceError(status, problem, 1.0, "model" if status == 404 else "")
            await asyncio.sleep(PAUSE_S)

    async def _stream(
        self, body: Json, headers: dict[str, str]
    ) -> AsyncGenerator[tuple[Json, list[tuple[int, list[int]]]]]:
        """The choices of a stream's chunks, each with the versions that wrote its tokens."""
        url = f"{self._find_url()}/v1/completions"
        async with self._http.stream("POST", url, json=body, headers=headers) as reply:
            if reply.status_code != 200:
                raise _read_error(await reply.aread(), reply.status_code)
            async for data in _read_data(reply.aiter_lines()):
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise _read_error(data, 500)
                spans = [(int(version), tokens) for version, tokens in event.get("shoal", {}).get("given", ())]
                for choice in event["choices"]:
                    yield choice, spans


async def _read_data(lines: AsyncIterator[str]) -> AsyncGenerator[bytes]:
    async for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line[6:].encode()


def build_body(model: str, request: TextRequest, call: TextCall) -> Json:
    """The request as the completions API takes it."""
    body: Json = {
        "model": model if call.version is None else f"{model}@{call.version}",
        "prompt": list(request.prompt),
        "stream": True,
        "return_token_ids": True,
        "max_tokens": request.max_tokens or 1 << 30,
        "stop": list(request.stop),
        **msgspec.to_builtins(request.sampling),
    }
    body["logit_bias"] = {str(token): bias for token, bias in request.sampling.logit_bias.items()}
    if request.swap is not None:
        body["swap"] = request.swap
    if request.end_s is not None:
        body["deadline_s"] = request.end_s
    match request.grammar:
        case ("json_schema", schema):
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        case ("lark", grammar):
            body["grammar"] = grammar
        case (kind, value):
            body[kind] = value
    return {name: value for name, value in body.items() if value is not None}


def read_events(choice: Json, spans: list[tuple[int, list[int]]], index: int) -> list[TokenEvent]:
    """The events of a chunk: the text comes with its last token."""
    tokens = choice.get("token_ids") or []
    versions = [version for version, written in spans for _ in written]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    behaviour = choice.get("shoal", {}).get("behaviour_logprobs") or [None] * len(tokens)
    columns = zip(tokens, logprobs, versions, behaviour, strict=True)
    events = [
        TokenEvent(0, index, token, logprob, version=version, behaviour_logprob=own)
        for token, logprob, version, own in columns
    ]
    last = events.pop() if events else TokenEvent(0, index)
    finish = choice["finish_reason"]
    return [*events, msgspec.structs.replace(last, text=choice["text"], finish=finish)]


def _read_error(data: bytes, status: int) -> InferenceError:
    try:
        error = msgspec.json.decode(data)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return InferenceError(status, data[:200].decode(errors="replace"))
    return InferenceError(error.get("status", status), error["message"], field=error.get("param") or "")
