"""A registered version that writes text in this process: no endpoint, no Ray. Bodies, refusals and events are those of
the HTTP API: what is tried here behaves so at an endpoint. The engine steps while one of its texts is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.client import StreamedText
from shoal.errors import ConfigError, InferenceError
from shoal.extend.registry import ModelVersion
from shoal.extend.serve import PATHS, Caller, LoadedModel, ModelOptions, build_body
from shoal.libs.language.api.answers import begin, merge_events
from shoal.libs.language.api.app import APIS
from shoal.libs.language.api.bodies import ChatBody, read_fields
from shoal.libs.language.engine import TextRequest, TokenEvent
from shoal.libs.language.engine.request import TokenIds
from shoal.libs.language.served.prepared import (
    TextGenerator,
    VersionPreparation,
    embed,
    has_tokenizer,
    open_engine,
)
from shoal.libs.language.text_model import TextCall

T = TypeVar("T")


def check_version(version: ModelVersion, options: ModelOptions, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for a version whose files have no tokenizer, and for wrong fields of the API."""
    if not (options.text.tokenizer or has_tokenizer(version.manifest.files)):
        remedy = "options.text.tokenizer names one for a language model without"
        raise ConfigError("text", version.ref, "writes no text: it has no tokenizer", remedy)
    try:
        read_fields(msgspec.json.encode(build_body(version.name, "messages", "", fields)), ChatBody)
    except InferenceError as error:
        raise ConfigError("generate", dict(fields), error.message) from None


class LocalTexts:
    """Implements `TextModel`. Not for several threads; several texts may be read by turns.

    registry: of the version, whose files have the tokenizer. Raises ConfigError for a model that writes no text.
    """

    def __init__(self, name: str, registry: str, options: ModelOptions, loaded: LoadedModel) -> None:
        self.name = name
        self._version = loaded.version
        self._options = options.text
        self._prepared = prepared = VersionPreparation().open(name, registry, options, loaded)
        self.tokenizer = prepared.tokenizer
        self.context = prepared.context
        self.created_s = prepared.created_s
        self.has_chat = bool(prepared.tokenizer.chat_template)
        self._open()

    def _open(self) -> None:
        self._events: dict[int, deque[TokenEvent]] = {}
        self._engine = open_engine(self._prepared, self._version, self._options)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[bytes]:
        """The server-sent events of an answer whose first token has come; `path` is such as chat/completions.

        Raises InferenceError, as an endpoint answers.
        """
        chunks = self._write(path, body)
        next(chunks)
        return chunks

    def _write(self, path: str, body: Mapping[str, Any]) -> Generator[bytes]:
        job = APIS[path].prepare(self, read_fields(msgspec.json.encode(body), APIS[path].body))
        events = merge_events(job, TextCall(Caller("")))
        try:
            answers = _run(begin(job, events, "", lambda: None))
            if job.body.given:
                answers.all[0].replay(job)
            frames = APIS[path].stream(answers)
            yield b""
            while (frame := _run(anext(frames, None))) is not None:
                yield frame
        finally:
            _run(events.aclose())

    def answer_all(
        self, given: Sequence[Any], fields: Mapping[str, Any]
    ) -> Iterator[tuple[int, StreamedText | InferenceError]]:
        """An answer to each text or list of messages, or why there is none, with its index: many at once, as they end.
        Without a chat template, texts are continued. fields: of the API, for each."""
        waiting, running = deque(enumerate(given)), dict[int, tuple[StreamedText, Iterator[str]]]()
        while waiting or running:
            index = -1
            try:
                while waiting and len(running) < self._options.slots:
                    index, value = waiting.popleft()
                    kind = "prompt" if isinstance(value, str) and not self.has_chat else "messages"
                    body = {**build_body(self.name, kind, value, {}), **fields}
                    text = StreamedText(self.stream(PATHS[kind], body))
                    running[index] = text, iter(text)
                for index, (text, parts) in list(running.items()):
                    if next(parts, None) is None:
                        del running[index]
                        yield index, text
            except InferenceError as error:
                running.pop(index, None)
                yield index, error

    async def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`."""
        engine, running = self._engine, request.num_answers
        try:
            number = engine.submit(request)
        except ConfigError as error:
            raise InferenceError(400, str(error), field=error.field) from None
        events = self._events[number] = deque()
        try:
            while running:
                while not events:
                    self._step(engine)
                event = events.popleft()
                running -= event.finish is not None
                yield event
        finally:
            self._events.pop(number, None)
            engine.cancel(number)

    async def embed(self, prompts: Sequence[TokenIds], call: TextCall) -> tuple[list[np.ndarray], int]:
        """See `TextModel`."""
        return [embed(self._prepared.module, each).numpy() for each in prompts], self._version

    def _step(self, engine: TextGenerator) -> None:
        if engine is not self._engine:
            raise InferenceError(503, "an interruption has ended this text")
        try:
            events = engine.step()
        except BaseException:  # such as Ctrl-C within a step: what it left cannot be known
            self._open()
            raise
        for event in events:
            if event.request in self._events:
                self._events[event.request].append(event)


def _run(work: Awaitable[T]) -> T:
    """What an event loop would run: nothing of it suspends here."""
    try:
        next(iter(work.__await__()))
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise AssertionError("a text in this process was suspended")
