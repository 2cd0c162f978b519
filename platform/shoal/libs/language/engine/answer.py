"""One answer of a request, and the slots of the cache, as an engine keeps them between steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.errors import ConfigError
from shoal.libs.language.engine.grammar import Matcher
from shoal.libs.language.engine.request import FinishReason, TextRequest, TokenEvent
from shoal.libs.language.engine.sampling import Row, Sampled, draw_uniform
from shoal.libs.language.engine.text import Decode, TextStream
from shoal.libs.language.engine.weights import Weights


@dataclass(eq=False)
class AnswerState:
    """known:    the prompt, and what follows so far
    slot, fill: the slot whose cells it decodes from; that which new weights fill for it meanwhile
    source:     a slot, and its owner, that is computing the first `num_shared` cells of this answer as well
    """

    request: TextRequest
    number: int
    index: int
    order: int
    seed: int
    max_tokens: int
    stop_tokens: frozenset[int]
    known: list[int]
    begin_at_s: float | None
    end_at_s: float | None
    text: TextStream | None = None
    matcher: Matcher | None = None
    weights: Weights | None = None
    slot: int | None = None
    fill: int | None = None
    source: tuple[int, AnswerState] | None = None
    num_shared: int = 0
    spans: list[tuple[int | str, int]] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    prompt_tokens: frozenset[int] = frozenset()
    is_over: bool = False

    def __lt__(self, other: AnswerState) -> bool:
        return (-self.request.priority, self.order) < (-other.request.priority, other.order)

    @property
    def num_new(self) -> int:
        """Tokens of the answer so far, with those that were given."""
        return len(self.known) - len(self.request.prompt)

    @property
    def stopped(self) -> str:
        """The stop text that was met; "" for none."""
        return "" if self.text is None else self.text.stopped

    def is_late(self, now_s: float) -> bool:
        """Whether a deadline has passed: of the last token, or of the first."""
        is_over = self.end_at_s is not None and now_s > self.end_at_s
        return is_over or (self.begin_at_s is not None and now_s > self.begin_at_s and not self.spans)

    def make_row(self) -> Row:
        """What its next token is sampled by."""
        sampling = self.request.sampling
        allowed = None
        if self.matcher is not None:
            assert self.weights is not None
            allowed = self.matcher.allow(self.weights.model.num_tokens, self.weights.model.device)
        uniform = draw_uniform(self.seed, self.index, self.num_new) if sampling.temperature else 0.0
        wanted = self.request.top_logprobs, self.request.behaviour
        return Row(sampling, self.counts, self.prompt_tokens, allowed, uniform, *wanted)

    def add(self, token: int) -> str:
        """Append a token; returns text that is certain. A token that ends the answer is no text."""
        self.known.append(token)
        if self.request.sampling.presence_penalty or self.request.sampling.frequency_penalty or self.prompt_tokens:
            self.counts[token] += 1
        if self.matcher is not None:
            self.matcher.advance(token)
        return "" if self.text is None or token in self.stop_tokens else self.text.push(token)

    def take_given(self) -> None:
        """Append the tokens that are given. Raises ConfigError for those behind which nothing comes."""
        given = self.request.given
        for token in given:
            self.add(token)
        if given and self.matcher is not None and self.matcher.problem:
            raise ConfigError("given", f"{len(given)} tokens", f"do not follow the grammar: {self.matcher.problem}")
        is_stopped = not self.stop_tokens.isdisjoint(given) or bool(self.stopped)
        if given and (is_stopped or (self.matcher is not None and self.matcher.is_complete)):
            raise ConfigError("given", f"{len(given)} tokens", "are a whole answer already")

    def take(self, choice: Sampled, version: int | str) -> TokenEvent:
        """Append a token that this version has chosen."""
        offset = 0 if self.text is None else self.text.num_chars
        text = self.add(choice.token)
        num_before = self.spans.pop()[1] if self.spans and self.spans[-1][0] == version else 0
        self.spans.append((version, num_before + 1))
        known = choice.token, choice.logprob, choice.top_logprobs, version, text
        behaviour = choice.behaviour_logprob
        return TokenEvent(self.number, self.index, *known, offset=offset, behaviour_logprob=behaviour)

    def find_end(self, token: int) -> FinishReason | None:
        """Why it ends with the token that it has just taken; None where it goes on."""
        if token in self.stop_tokens or self.stopped:
            return "stop"
        return "length" if self.num_new >= self.max_tokens else None

    def end(self, event: TokenEvent, finish: FinishReason, problem: str = "") -> TokenEvent:
        """Its last event, with the rest of the text."""
        self.is_over = True
        rest = self.text.finish() if self.text is not None else ""
        more = {"text": event.text + rest, "finish": finish, "problem": problem, "spans": tuple(self.spans)}
        return msgspec.structs.replace(event, **more, stopped=self.stopped)

    @property
    def num_waiting(self) -> int:
        """Tokens that count to the queue: a group's prompt counts once."""
        return len(self.known) if self.index == 0 else 0


def make_answers(
    request: TextRequest,
    max_tokens: int,
    seed: int,
    stop_tokens: frozenset[int],
    decode: Decode | None,
    matcher: Matcher | None = None,
) -> list[AnswerState]:
    """Those of a request, before they have a number. stop_tokens: where the request has none. Raises ConfigError."""
    now_s = time.monotonic()
    stops = stop_tokens if request.stop_tokens is None else frozenset(request.stop_tokens)
    seen = frozenset(request.prompt) if request.sampling.repetition_penalty != 1.0 else frozenset[int]()
    answers = []
    for index in range(request.num_answers):
        answer = AnswerState(
            request=request,
            number=0,
            index=index,
            order=0,
            seed=seed,
            max_tokens=max_tokens,
            stop_tokens=stops,
            known=list(request.prompt),
            begin_at_s=None if request.begin_s is None else now_s + request.begin_s,
            end_at_s=None if request.end_s is None else now_s + request.end_s,
            matcher=None if matcher is None else matcher.fork(),
            prompt_tokens=seen,
        )
        if decode is not None:
            answer.text = TextStream(decode, request.prompt, request.stop)
        answer.take_given()
        answers.append(answer)
    return answers


@dataclass(eq=False)
class CacheSlot:
    """tokens: those of the filled cells, under `weights`. They stay valid after the answer is gone, until another
    takes the slot. num_aligned: of these, written by full chunks from the first cell on."""

    tokens: list[int] = field(default_factory=list)
    weights: Weights | None = None
    owner: AnswerState | None = None
    used_at: int = 0
    num_aligned: int = 0

    def clear(self) -> None:
        self.tokens, self.num_aligned = [], 0


def count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:  # the first `low` agree, the first `high` do not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
