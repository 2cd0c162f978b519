"""An engine in the gateway's process, which follows the run's weights: for one machine, without an endpoint.

Its thread steps while there is work. Implements `Sampler`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import torch

from shoal.errors import ConfigError, InferenceError
from shoal.libs.language.engine import SlotEngine, TextRequest, TokenEvent
from shoal.libs.language.text_model import TextCall
from shoal.weights import WeightSnapshot
from shoal.weights.tensor_files import read_tensors

BATCH = 16  # events: a session that is over meanwhile is seen by them
IDLE_S = 0.2  # between two looks for newer weights, without work


class LocalSampler:
    """module: a causal network of transformers, whose weights, or adapters, are replaced by those of `get_weights`.

    get_weights: the newest snapshot, or None before the first
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tokenizer: Any,
        stop_tokens: tuple[int, ...],
        get_weights: Callable[[], WeightSnapshot | None],
        slots: int,
        length: int | None = None,
        torch_threads: int = 1,
    ) -> None:
        self._engine = SlotEngine(module, 0, tokenizer, stop_tokens, slots, length, chunk=512, max_queued=4096)
        self.context = self._engine.length
        self._get_weights = get_weights
        self._torch_threads = torch_threads
        self._events: dict[int, asyncio.Queue[TokenEvent | Exception]] = {}  # used on the event loop alone
        self._batched = dict[int, list[TokenEvent]]()  # by request: events that nobody waits for one by one
        self._loop: asyncio.AbstractEventLoop | None = None  # of its requests
        self._lock = threading.Lock()  # no request comes after the end
        self._has_work = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`."""
        events, running = asyncio.Queue[TokenEvent | Exception](), request.num_answers
        self._loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_closed:
                raise InferenceError(503, "the sampler is closing", retry_after_s=1.0)
            try:
                number = self._engine.submit(request)
            except ConfigError as error:
                raise InferenceError(400, str(error), field=error.field) from None
            self._events[number] = events
            if not call.is_stream:
                self._batched[number] = []
        self._has_work.set()
        try:
            while running:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                running -= event.finish is not None
                yield event
        finally:
            del self._events[number]
            self._batched.pop(number, None)
            if running:
                self._engine.cancel(number)
                self._has_work.set()

    def stop(self) -> None:
        """End what runs with 503. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._has_work.set()
        self._thread.join()

    async def close(self) -> None:
        """After `stop`."""

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)
        version = 0
        error = InferenceError(503, "the sampler is closing", retry_after_s=1.0)
        try:
            while not self._is_closed:
                snapshot = self._get_weights()
                if snapshot is not None and snapshot.version != version:
                    version = snapshot.version
                    self._engine.set_weights(version, read_tensors(snapshot))
                if not (version and self._engine.has_work):
                    self._has_work.wait(IDLE_S)
                    self._has_work.clear()
                    continue
                events = [due for event in self._engine.step() for due in self._batch(event)]
                if events and self._loop is not None:
                    self._loop.call_soon_threadsafe(self._deliver, events)  # a wake-up for all of a step
        except Exception as failure:
            error = InferenceError(500, f"the sampler has failed: {failure}")
            raise
        finally:
            with self._lock:
                self._is_closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._fail, error)

    def _batch(self, event: TokenEvent) -> Sequence[TokenEvent]:
        """The events that are due: of an answer that is wanted whole, some together."""
        if (batch := self._batched.get(event.request)) is None:
            return [event]
        batch.append(event)
        if event.finish is None and len(batch) < BATCH:
            return ()
        due = batch[:]
        batch.clear()
        return due

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if (waiting := self._events.get(event.request)) is not None:
                waiting.put_nowait(event)

    def _fail(self, error: Exception) -> None:
        for waiting in self._events.values():
            waiting.put_nowait(error)
