"""The engine of one track of a served model, such as its stable version: its steps, and the streams of its answers.

Lives on the event loop. Its steps run in the batcher's thread (`StepQueue`), and read the track's version once, as a
batch of tensors does: a change of version is a change of the engine's weights.

| queue                  | capacity     | beyond it                             | who empties it   | close()     |
|------------------------|--------------|---------------------------------------|------------------|-------------|
| events of an answer    | `MAX_UNREAD` | the request is cancelled, with 408    | who reads it     | 503         |
| requests of the engine | the engine's | 429                                   | a step           | 503         |

`TextShadow`: the candidate of a shadow also writes a share of the stable version's texts, and the tokens are compared.
As for tensors: the client has its answer before, the steps have the smallest weight, and what cannot be computed is
dropped. Sampled texts are drawn from the same uniform numbers, so that equal models write equal tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from shoal.errors import Closed, ConfigError, InferenceError
from shoal.extend.serve import SHADOW_WEIGHT, LoadedModel, ServedModel, Track
from shoal.libs.language.engine import TextRequest, TokenEvent
from shoal.libs.language.served.prepared import PreparedVersion, TextGenerator, VersionPreparation, open_engine
from shoal.libs.language.served.registered_adapters import MAX_ADAPTERS, RegisteredAdapter
from shoal.libs.language.served.step_queue import StepQueue
from shoal.libs.language.served.text_statistics import TextStatistics

MAX_UNREAD = 4096
T = TypeVar("T")


class RequestStream:
    """The events of one request, from the engine's steps to its reader."""

    def __init__(self, request: TextRequest, arrived_s: float) -> None:
        self.events: deque[TokenEvent] = deque()
        self.error: InferenceError | None = None
        self.running = request.num_answers  # answers that have not ended
        self.adapter = request.adapter
        self.number = 0
        self.version = 0  # of the last event
        self.base_version = 0  # of an adapter's, which failures count for
        self.at_s = dict.fromkeys(range(request.num_answers), arrived_s)  # of each answer's last token
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> TokenEvent | None:
        """The next event; None after the last. Raises the InferenceError that ends the stream."""
        while not self.events:
            if self.error is not None:
                raise self.error
            if not self.running:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.events.popleft()

    def push(self, event: TokenEvent) -> None:
        self.version = int(event.version)
        self.running -= event.finish is not None
        self.events.append(event)
        self._wake()

    def fail(self, error: InferenceError) -> None:
        """End it, after what was computed."""
        self.error = self.error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TextEngine:
    """Opened by the first request. `is_retired`: it takes no more requests, and ends with its last one."""

    def __init__(
        self,
        served: ServedModel,
        track: Track,
        preparation: VersionPreparation,
        statistics: TextStatistics,
        weight: float | None = None,
    ) -> None:
        self.track, self.is_retired = track, False
        self._loop = asyncio.get_running_loop()
        self._served = served
        self._preparation = preparation
        self._statistics = statistics
        self._loaded: LoadedModel | None = None  # that the engine computes with
        self._tokenizer: object = None
        self._adapters: dict[str, RegisteredAdapter] = {}  # in the engine, beside its base; the last used one last
        self.engine: TextGenerator | None = None
        self._opening: asyncio.Future[TextGenerator] | None = None
        self._streams: dict[int, RequestStream] = {}
        self._num_pending = 0  # submissions, and what is run besides steps
        self._steps: StepQueue[list[TokenEvent]] = StepQueue(
            served.batcher,
            f"{served.name} text",
            served.options.weight if weight is None else weight,
            self._step,
            lambda: self.engine is not None and (self.engine.has_work or self.track.model is not self._loaded),
            self._deliver,
            self._fail,
        )

    @property
    def is_idle(self) -> bool:
        return not (self._streams or self._num_pending)

    async def submit(
        self, request: TextRequest, arrived_s: float, adapter: RegisteredAdapter | None = None
    ) -> RequestStream:
        """Raises ConfigError and InferenceError, as `SlotEngine.submit`; 409, 422 for an adapter that does not fit."""
        stream = RequestStream(request, arrived_s)
        self._num_pending += 1
        try:
            engine = await self._open()
            if adapter is not None:
                await self._add_adapter(engine, adapter)
                stream.base_version = self._loaded.version if self._loaded is not None else 0
            is_slow = request.grammar is not None or request.given
            answers = await asyncio.to_thread(engine.prepare, request) if is_slow else engine.prepare(request)
            stream.number = engine.queue(answers)  # on the loop, so that no event comes before the stream is known
            if self._steps.is_closed:
                raise Closed
            self._streams[stream.number] = stream
        finally:
            self._num_pending -= 1
            self._close_if_over()
        self._steps.wake()
        return stream

    def release(self, stream: RequestStream) -> None:
        """Its reader has left: cancel what is still computed."""
        if self._streams.pop(stream.number, None) is not None and stream.running and self.engine is not None:
            self.engine.cancel(stream.number)
            self._steps.wake()
        self._close_if_over()

    async def run(self, function: Callable[[], T]) -> T:
        """Compute something else of the model among the steps."""
        self._num_pending += 1
        try:
            return await self._steps.run(function)
        finally:
            self._num_pending -= 1
            self._close_if_over()

    def wake(self) -> None:
        """The track may have another version."""
        self._steps.wake()

    def close(self, problem: str) -> None:
        """End all streams with 503. Idempotent."""
        self.is_retired = True
        for stream in self._streams.values():
            stream.fail(InferenceError(503, problem, retry_after_s=1.0))
        self._end()

    def _close_if_over(self) -> None:
        if self.is_retired and self.is_idle:
            self._end()

    def _end(self) -> None:
        self._steps.close()
        if self.engine is not None:
            self.engine.close()

    async def _add_adapter(self, engine: TextGenerator, adapter: RegisteredAdapter) -> None:
        key, loaded = adapter.key, self._adapters  # another dict from the next base on
        if loaded.get(key) is not adapter:
            if key not in loaded and len(loaded) >= MAX_ADAPTERS:
                used = {each.adapter for each in self._streams.values()}
                unused = next((each for each in loaded if each not in used), None)  # for the longest time
                if unused is None:
                    raise InferenceError(503, f"{MAX_ADAPTERS} adapters of this model are in use", retry_after_s=1.0)
                del loaded[unused]
                engine.remove_adapter(unused)
            try:
                await asyncio.to_thread(engine.set_weights, adapter.version, adapter.state, key)
            except ConfigError as error:
                raise InferenceError(422, f"adapter {key!r} does not fit its base: {error}", field="model") from None
        loaded.pop(key, None)
        loaded[key] = adapter
        prepared = None if self._loaded is None else self._preparation.find(self._loaded)
        if prepared is None or not adapter.fits(prepared.source):  # the track has got another version meanwhile
            raise InferenceError(409, f"adapter {key!r} is of another base than answers now", field="model")

    async def _open(self) -> TextGenerator:
        if self.engine is None:
            if self._opening is None or (self._opening.done() and self._opening.exception()):
                self._opening = asyncio.ensure_future(asyncio.to_thread(self._make_engine))
            self.engine = await asyncio.shield(self._opening)
        return self.engine

    def _make_engine(self) -> TextGenerator:
        self._served.predictor.set_torch_threads()
        loaded, options = self.track.model, self._served.options.text
        prepared = self._preparation.find(loaded)
        assert prepared is not None  # else it is no TextModel
        self._loaded, self._tokenizer = loaded, prepared.tokenizer
        return open_engine(prepared, loaded.version, options, self._wake_later)

    def _wake_later(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._steps.wake)

    # -- in the batcher's thread ----------------------------------------------------------------------------------

    def _step(self) -> list[TokenEvent] | None:
        engine, loaded = self.engine, self.track.model
        assert engine is not None
        if loaded is not self._loaded:
            self._loaded = loaded
            self._follow(engine, loaded.version, self._preparation.find(loaded))
        if not engine.has_work:
            return None
        events = engine.step()
        versions = {int(event.version) for event in events if event.token is not None}
        num_tokens, seconds, num_models = engine.last_step
        if num_models == len(versions) == 1:
            self._served.record_step(versions.pop(), num_tokens, seconds)
        return events

    def _follow(self, engine: TextGenerator, version: int, prepared: PreparedVersion | None) -> None:
        """Take the weights of another version; one that has another network or tokenizer has an engine of its own."""
        if prepared is None or prepared.tokenizer is not self._tokenizer:
            self.is_retired = True
            return
        try:
            self._adapters = {}  # they leave with their base
            engine.set_weights(version, prepared.module)
        except ConfigError:
            self.is_retired = True

    # -- on the event loop ----------------------------------------------------------------------------------------

    def _deliver(self, events: list[TokenEvent]) -> None:
        now_s = time.monotonic()
        for event in events:
            stream = self._streams.get(event.request)
            if stream is None:  # its reader has left
                continue
            if event.token is not None:
                self._statistics.count_token(now_s - stream.at_s[event.index], is_first=stream.version == 0)
                stream.at_s[event.index] = now_s
            stream.push(event)
            if not stream.running:
                del self._streams[event.request]
            elif len(stream.events) > MAX_UNREAD:
                stream.fail(InferenceError(408, f"{MAX_UNREAD} tokens were not read in time"))
                self.release(stream)
        self._close_if_over()

    def _fail(self, error: Exception) -> None:
        """A step has failed: what it left cannot be known, so all its answers end."""
        self.is_retired = True
        loaded = self._loaded
        answer = self._served.describe_failure(error, loaded.version if loaded is not None else 0)
        for stream in self._streams.values():
            stream.version = loaded.version if loaded is not None else 0  # at fault, also before the first token
            stream.fail(answer)
        self._end()


class Tokens:
    """Those of all answers of a request, and whether one version wrote them to their end."""

    def __init__(self, num_answers: int) -> None:
        self.by_answer: defaultdict[int, list[int]] = defaultdict(list)
        self._running, self._versions = num_answers, set[int | str]()

    def add(self, event: TokenEvent) -> None:
        if event.token is not None:
            self.by_answer[event.index].append(event.token)
            self._versions.add(event.version)
        self._running -= event.finish in ("stop", "length")

    @property
    def is_complete(self) -> bool:
        return not self._running and len(self._versions) == 1


class TextShadow:
    """The shadow of one model's texts. Lives on the event loop."""

    def __init__(self, served: ServedModel, preparation: VersionPreparation) -> None:
        self._served, self._preparation = served, preparation
        self._engine: TextEngine | None = None

    def draw(self, request: TextRequest) -> tuple[TextRequest, Tokens | None]:
        """By chance, the request as it can be computed twice, and what is to collect its tokens."""
        if not self._served.shadow.percent or not self._served.shadow.draw():
            return request, None
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        return request, Tokens(request.num_answers)

    def start(self, request: TextRequest, expected: Tokens) -> None:
        """Let the candidate write what the stable version has written."""
        if expected.is_complete:
            self._served.shadow.start(self._compare(request, expected))

    def follow(self) -> None:
        """Other versions answer from now on."""
        if self._engine is not None and not self._served.shadow.percent:
            self.close()

    def close(self) -> None:
        """Drop what is computed. Idempotent."""
        if self._engine is not None:
            self._engine.close("the shadow has ended")
            self._engine = None

    async def _compare(self, request: TextRequest, expected: Tokens) -> None:
        shadow = self._served.shadow
        candidate = shadow.candidate
        if candidate is None:
            return
        loaded = candidate.model
        if self._preparation.find(loaded) is None:
            return  # it writes no text
        if self._engine is None or self._engine.is_retired:
            statistics = TextStatistics(self._served.options.text.slots)  # its tokens are no load of callers
            self._engine = TextEngine(self._served, candidate, self._preparation, statistics, SHADOW_WEIGHT)
        written, engine = Tokens(request.num_answers), self._engine
        try:
            stream = await engine.submit(replace(request, begin_s=None, end_s=None), time.monotonic())
            try:
                while (event := await stream.read()) is not None:
                    written.add(event)
            finally:
                engine.release(stream)
        except Closed:
            return
        except ConfigError:  # the stable version took it
            shadow.count_failure(candidate, loaded, 400)
        except InferenceError as error:
            shadow.count_failure(candidate, loaded, error.status)
        else:
            if written.is_complete and stream.version == loaded.version:
                shadow.count(candidate, loaded, agrees=written.by_answer == expected.by_answer)
