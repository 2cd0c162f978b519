"""Answers of a request while they come: text apart from tool calls, versions, and what ends them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

from shoal.errors import InferenceError
from shoal.libs.language.api.bodies import Json
from shoal.libs.language.api.prompt import Job
from shoal.libs.language.api.tools import ToolCall, ToolCallReader
from shoal.libs.language.engine.request import TokenEvent
from shoal.libs.language.engine.text import TextStream
from shoal.libs.language.text_model import TextCall

Events = AsyncGenerator[tuple[int, TokenEvent], None]
# Ends that are errors: a client repeats 409, and gets the answer from the new weights.
_FAILURES = {
    "cancelled": (503, "the answer was cancelled"),
    "deadline": (504, "the deadline has passed"),
    "swapped": (409, "the weights were replaced, and swap = 'refuse'"),
    "error": (500, "the model failed"),
}


@dataclass
class TextAnswer:
    """One answer so far.

    shown:    events whose tokens belong to the text for certain, until a stream takes them
    pending:  those that a stop text may yet cut
    stopped:  the stop text that was met
    shows_all: events are shown at once, those that a stop text cuts included
    """

    index: int
    reader: ToolCallReader | None
    shows_all: bool
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    num_tokens: int = 0
    finish: str = ""
    spans: list[list[int | str]] = field(default_factory=list)
    unsent: list[tuple[int | str, list[int]]] = field(default_factory=list)  # versions, and the tokens that each wrote
    shown: list[TokenEvent] = field(default_factory=list)
    pending: list[TokenEvent] = field(default_factory=list)
    num_chars: int = 0  # of the engine's text, calls included
    stopped: str = ""

    def take(self, event: TokenEvent) -> str:
        """Add an event; returns the text to show. Raises InferenceError for an end that is a failure."""
        if event.token is not None:
            self.num_tokens += 1
            if not self.unsent or self.unsent[-1][0] != event.version:
                self.unsent.append((event.version, []))
            self.unsent[-1][1].append(event.token)
            self.pending.append(event)
        self.num_chars += len(event.text)
        is_all = self.shows_all or (event.finish is not None and not event.stopped)
        while self.pending and (is_all or self.pending[0].offset < self.num_chars):
            self.shown.append(self.pending.pop(0))
        text = event.text if self.reader is None else self.reader.push(event.text)
        if event.finish in _FAILURES:
            status, problem = _FAILURES[event.finish]
            raise InferenceError(status, f"{problem}: {event.problem}" if event.problem else problem)
        if event.finish:
            self.finish, self.stopped = event.finish, event.stopped
            if self.reader is not None:
                rest, self.calls = self.reader.finish(is_truncated=event.finish == "length" or bool(event.stopped))
                text += rest
                if self.calls and not self.reader.is_truncated:
                    self.finish = "tool_calls"
            for version, num in event.spans:  # those of the engine, which may have continued others
                if self.spans and self.spans[-1][0] == version:
                    num += cast(int, self.spans.pop()[1])
                self.spans.append([version, num])
        self.text += text
        return text

    def replay(self, job: Job) -> None:
        """Take what the client has of a cut answer."""
        (request,) = job.requests
        text = TextStream(job.model.tokenizer.decode, request.prompt, request.stop)
        for version, tokens in job.body.given:
            for token in tokens:
                self.take(TokenEvent(0, 0, token, version=version, text=text.push(token)))
        self.spans = [[version, len(tokens)] for version, tokens in self.unsent]
        self.unsent = []
        self.pending = []
        self.shown = []


@dataclass
class Answers:
    """All answers of a job. `first` came before the head of the HTTP answer, which names its version.

    can_resume: a client that has the tokens of the events can have the rest from another replica
    count:      called for each token
    """

    job: Job
    first: tuple[int, TokenEvent]
    rest: Events
    all: list[TextAnswer]
    can_resume: bool
    count: Callable[[], None]

    async def read(self) -> AsyncIterator[tuple[TextAnswer, str]]:
        """The answer and the text to show, as they come. Raises InferenceError."""
        yield self._take(*self.first)
        async for number, event in self.rest:
            yield self._take(number, event)

    async def finish(self) -> None:
        """Read them to their end. Raises InferenceError."""
        async for _ in self.read():
            pass

    def _take(self, number: int, event: TokenEvent) -> tuple[TextAnswer, str]:
        answer = self.all[number * self.job.body.n + event.index]
        if event.token is not None:
            self.count()
        return answer, answer.take(event)

    def describe_progress(self, answer: TextAnswer) -> Json:
        """For an event of a stream: what a client sends as `given`, of the tokens since the last one."""
        given, answer.unsent = answer.unsent, []
        return {"shoal": {"given": given}} if given and self.can_resume else {}

    def describe_prompt(self, answer: TextAnswer) -> Json:
        """vLLM's `prompt_token_ids`, if they are asked for: what the model has read."""
        request = self.job.requests[answer.index // self.job.body.n]
        return {"prompt_token_ids": request.prompt} if self.job.body.return_token_ids else {}

    def describe_sampled(self, answer: TextAnswer, events: Sequence[TokenEvent], **shoal: object) -> Json:
        """vLLM's `token_ids` of these events, if they are asked for. `shoal` has what vLLM lacks: versions at the end,
        and log-probabilities under the distribution that was sampled from, where it was not the model's own."""
        sampled: Json = {}
        if self.job.body.return_token_ids:
            sampled["token_ids"] = [event.token for event in events]
            likely = [event.behaviour_logprob for event in events if event.behaviour_logprob is not None]
            shoal |= {"behaviour_logprobs": likely} if likely else {}
        shoal |= {"spans": answer.spans} if answer.finish else {}
        return sampled | ({"shoal": shoal} if shoal else {})

    def describe_single(self) -> Json:
        """The same of the only answer, for APIs without a place for log-probabilities."""
        (answer,) = self.all
        logprobs = [event.logprob for event in answer.shown]
        return self.describe_sampled(answer, answer.shown, **{"logprobs": logprobs} if answer.shows_all else {})

    @property
    def num_new_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.all)

    def count_usage(self) -> dict[str, int]:
        """As the chat API has it."""
        before, new = self.job.num_prompt_tokens, self.num_new_tokens
        return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}


async def begin(job: Job, events: Events, resume: str, count: Callable[[], None]) -> Answers:
    """Wait for the first event. Raises InferenceError with the API's name of a field."""
    try:
        first = await anext(events)
    except InferenceError as error:
        field = "model" if error.status == 404 else error.field  # a version that is unknown
        name = (job.names or {}).get(field, field)
        message = re.sub(f"^{re.escape(error.field)}\\b", name, error.message)
        raise InferenceError(error.status, message, error.retry_after_s, name) from error
    numbers = range(len(job.requests) * job.body.n)
    answers = [TextAnswer(number, job.use.make_reader(job.template), job.body.return_token_ids) for number in numbers]
    return Answers(job, first, events, answers, bool(resume) and len(answers) == 1, count)


async def merge_events(job: Job, call: TextCall) -> Events:
    """Events of all prompts with the prompt's number, no more of each than the reader takes. Closing it cancels all."""
    calls = [call] * len(job.requests)
    if call.resume and len(calls) > 1:  # each prompt is continued by itself
        calls = [replace(call, resume=f"{call.resume}/{number}") for number in range(len(calls))]
    generators = map(job.model.generate, job.requests, calls)
    streams = [cast(AsyncGenerator[TokenEvent, None], each) for each in generators]
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                if (newest := task.result()) is not None:
                    waiting[asyncio.ensure_future(anext(streams[number], None))] = number
                    yield number, newest
    finally:
        for unread in waiting:
            unread.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
