"""A registered version that writes text in this process: no endpoint, no Ray.

The bodies are those of the HTTP API, and so are fields, refusals and events: what is tried here behaves so at an
endpoint. The engine steps while one of its texts is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.errors import ConfigError, InferenceError
from shoal.extend.registry import ModelVersion
from shoal.extend.serve import PATHS, Caller, LoadedModel, ModelOptions, build_body
from shoal.libs.language.api.answers import TextAnswer, begin, merge_events
from shoal.libs.language.api.app import APIS
from shoal.libs.language.api.bodies import ChatBody, read_body
from shoal.libs.language.api.prompt import Job
from shoal.libs.language.engine import SlotEngine, TextRequest, TokenEvent
from shoal.libs.language.served.prepared import VersionPreparation, embed, has_tokenizer
from shoal.libs.language.text_model import TextCall

T = TypeVar("T")
MAX_AHEAD = 64  # answers that wait for a slot while others are computed
_CALL = TextCall(Caller(""))


def check_version(version: ModelVersion, options: ModelOptions, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for a version that writes no text, as far as its files say, and for fields of the API that do
    not fit many texts."""
    if not (options.text.tokenizer or has_tokenizer(version.manifest.files)):
        remedy = "options.text.tokenizer names one for a language model without"
        raise ConfigError("text", version.ref, "writes no text: it has no tokenizer", remedy)
    try:
        read_body(msgspec.json.encode(build_body(version.name, "messages", "", fields)), ChatBody)
    except InferenceError as error:
        raise ConfigError("generate", dict(fields), error.message) from None


class LocalTexts:
    """Implements `TextModel`. Not for several threads; several texts may be read by turns.

    name, registry: of the version, whose files have the tokenizer; options: device, `text`
    Raises ConfigError for a model that writes no text.
    """

    def __init__(self, name: str, registry: str, options: ModelOptions, loaded: LoadedModel) -> None:
        self.name, self._version, self._slots = name, loaded.version, options.text.slots
        self._prepared = prepared = VersionPreparation().open(name, registry, options, loaded)
        self.tokenizer, self.context, self.created_s = prepared.tokenizer, prepared.context, prepared.created_s
        self._open()

    def _open(self) -> None:
        prepared = self._prepared
        self._events: dict[int, deque[TokenEvent]] = {}
        self._engine = SlotEngine(
            prepared.module,
            self._version,
            prepared.tokenizer,
            prepared.stop_tokens,
            slots=self._slots,
            length=prepared.context,
        )

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.tokenizer.chat_template)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[bytes]:
        """The server-sent events of an answer whose first token has come; `path` is such as chat/completions.

        Raises InferenceError, as an endpoint answers.
        """
        chunks = self._write(path, body)
        next(chunks)
        return chunks

    def _write(self, path: str, body: Mapping[str, Any]) -> Generator[bytes]:
        job = self._prepare(path, body)
        events = merge_events(job, _CALL)
        try:
            frames = APIS[path].stream(_run(begin(job, events)))
            yield b""
            while (frame := _run(anext(frames, None))) is not None:
                yield frame
        finally:
            _run(events.aclose())

    def answer_all(
        self, given: Sequence[Any], fields: Mapping[str, Any]
    ) -> Iterator[tuple[int, TextAnswer | InferenceError]]:
        """An answer to each text or list of messages, or why there is none, with its index: many at once, as they end.
        Without a chat template, texts are continued. fields: of the API, for each."""
        waiting, running = deque(enumerate(given)), dict[int, tuple[int, TextAnswer]]()
        while waiting or running:
            while waiting and len(running) < self._slots + MAX_AHEAD:
                index, text = waiting[0]
                try:
                    kind = "prompt" if isinstance(text, str) and not self.has_chat else "messages"
                    job = self._prepare(PATHS[kind], {**build_body(self.name, kind, text, {}), **fields})
                    number = self._submit(job.requests[0])
                except InferenceError as error:
                    if error.status == 429 and running:  # long prompts fill the queue
                        break
                    yield index, error
                else:
                    running[number] = index, TextAnswer(0, job.use.make_reader(job.template))
                waiting.popleft()
            self._step(self._engine)
            for number, (index, answer) in list(running.items()):
                outcome: TextAnswer | InferenceError = answer
                try:
                    while self._events[number]:
                        answer.take(self._events[number].popleft())
                except InferenceError as error:
                    outcome = error
                if answer.finish or outcome is not answer:
                    del running[number], self._events[number]
                    yield index, outcome

    async def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`."""
        engine, number, running = self._engine, self._submit(request), request.num_answers
        events = self._events[number]
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

    async def embed(self, prompts: Sequence[tuple[int, ...]], call: TextCall) -> tuple[list[np.ndarray], int]:
        """See `TextModel`."""
        return [embed(self._prepared.module, each).numpy() for each in prompts], self._version

    def _prepare(self, path: str, body: Mapping[str, Any]) -> Job:
        api = APIS[path]
        try:
            return api.prepare(self, read_body(msgspec.json.encode({"model": self.name, **body}), api.body))
        except ConfigError as error:
            raise InferenceError(400, str(error), field=error.field) from None

    def _submit(self, request: TextRequest) -> int:
        try:
            number = self._engine.submit(request)
        except ConfigError as error:
            raise InferenceError(400, str(error), field=error.field) from None
        self._events[number] = deque()
        return number

    def _step(self, engine: SlotEngine) -> None:
        if engine is not self._engine:
            raise InferenceError(503, "an interruption has ended this text")
        try:
            found = engine.step()
        except BaseException:  # such as Ctrl-C within a step: what it left cannot be known
            self._open()
            raise
        for event in found:
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
