"""Generates text for many requests at once: continuous batching over slots of a cache, with a version on every token.

    engine = SlotEngine(model, tokenizer=tokenizer)
    number = engine.submit(TextRequest(prompt=tuple(tokenizer.encode("Once"))))
    while engine.has_work:
        for event in engine.step():
            print(event.text, end="")

It has no thread: its owner calls `step`, always from one thread at a time; the other calls may come from any, and take
effect with the next step. What it guarantees, and at what price, is in docs/generation.md.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.libs.language.engine.admission import QueueAdmission
from shoal.libs.language.engine.answer import AnswerState, make_answers
from shoal.libs.language.engine.cells import CacheCells, TokenSegment, Work
from shoal.libs.language.engine.grammar import GrammarCompiler
from shoal.libs.language.engine.models import CausalModel, open_model
from shoal.libs.language.engine.request import (
    FinishReason,
    Limits,
    Observation,
    TextRequest,
    TokenEvent,
    TokenIds,
    check_request,
)
from shoal.libs.language.engine.sampling import Sampled, sample
from shoal.libs.language.engine.slots import SlotTable
from shoal.libs.language.engine.text import remember
from shoal.libs.language.engine.weights import CurrentWeights


class SlotEngine:
    """A causal model, and what it needs to continue many texts at once.

    model:         see `open_model`; the engine takes it over
    version:       of its weights
    tokenizer:     decodes tokens to text: `decode(list[int]) -> str`, as tokenizers of transformers do; None: events
                   have no text, and stop texts and grammars are refused
    stop_tokens:   those that end answers whose request names none
    slots:         answers that are computed at the same time
    length:        tokens of an answer with its prompt, at most; None: what the model knows
    chunk:         tokens of prompts that a step computes at most, besides a token of each running answer
    spare:         further slots, in which new weights fill the cache of running answers
    deterministic: forwards of fixed shapes: the bits of tokens and log-probabilities do not depend on other requests
    max_queued, max_queued_tokens: answers, and tokens of their prompts, that may wait for a slot

    Raises ConfigError.
    """

    def __init__(
        self,
        model: nn.Module,
        version: int | str = 0,
        tokenizer: Any = None,
        stop_tokens: TokenIds = (),
        slots: int = 16,
        length: int | None = None,
        chunk: int = 128,
        spare: int = 1,
        deterministic: bool = False,
        max_queued: int = 256,
        max_queued_tokens: int = 65_536,
    ) -> None:
        opened = open_model(model)
        most = opened.context or length or 2048
        if length is not None and not 2 <= length <= most:
            raise ConfigError("length", length, f"expected 2 to {most}, the model's context")
        # A cache that is filled again by a quarter of a chunk in a step must grow faster than its answer.
        for name, value, least in (("slots", slots, 1), ("chunk", chunk, 8), ("spare", spare, 1)):
            if value < least:
                raise ConfigError(name, value, f"must be at least {least}")
        self._limits = Limits(opened.num_tokens, length or most, max_queued, tokenizer is not None)
        self._tokenizer, self._stop_tokens = tokenizer, frozenset(stop_tokens)
        self._decode = None if tokenizer is None else remember(tokenizer.decode)
        self._grammars: GrammarCompiler | None = None
        self._grammar_lock = threading.Lock()
        self._chunk, self._deterministic = chunk, deterministic
        self._weights = CurrentWeights(opened, version)
        self._cells = CacheCells(slots + spare, self._limits.length)
        self._slots = SlotTable(self._cells, slots, spare, chunk, deterministic)
        self._admission = QueueAdmission(max_queued, max_queued_tokens, slots, chunk)
        self._queue: list[AnswerState] = []  # a heap: by priority, then by arrival
        self._running: list[AnswerState] = []
        self._totals, self._numbers = Counter[str](), itertools.count(1)
        self._random = random.Random()  # the system's numbers would cost a call, in which threads change
        self.last_step = 0, 0.0, 0  # its tokens, seconds and models, which are two while answers go over to another
        self._lock = threading.Lock()  # of what other threads leave for the next step:
        self._submitted: list[AnswerState] = []
        self._cancelled: set[int] = set()

    # ---------------------------------------------------------------- from any thread

    def submit(self, request: TextRequest) -> int:
        """Queue a request; returns the number that its events have.

        Raises ConfigError for a field that does not fit, InferenceError 429 for a full queue, and 504 for a deadline
        that cannot be met. Whatever is raised, no token was computed.
        """
        return self.queue(self.prepare(request))

    def prepare(self, request: TextRequest) -> list[AnswerState]:
        """What `queue` takes. This compiles a grammar and decodes the tokens that are given, so it may take a second;
        any thread may call it. Raises ConfigError."""
        check_request(request, self._limits)
        if request.adapter not in (known := self._weights.names):
            raise ConfigError("adapter", request.adapter, "is unknown", f"known: {', '.join(sorted(known - {''}))}")
        room = self._limits.length - len(request.prompt)
        seed = request.sampling.seed if request.sampling.seed is not None else self._random.getrandbits(63)
        matcher = self._get_grammars().start(*request.grammar) if request.grammar is not None else None
        most = min(request.max_tokens or room, room)
        return make_answers(request, most, seed, self._stop_tokens, self._decode, matcher)

    def queue(self, answers: list[AnswerState]) -> int:
        """The second half of `submit`, which takes no time. Raises InferenceError."""
        self._admission.admit(answers[0].request, answers[0].max_tokens)
        with self._lock:
            number = next(self._numbers)
            for index, answer in enumerate(answers):
                answer.number, answer.order = number, number * self._limits.max_answers + index
            self._submitted += answers
        return number

    def cancel(self, number: int) -> None:
        """End a request; its slots are free before the next step computes anything. Unknown numbers are ignored."""
        with self._lock:
            self._cancelled.add(number)

    def set_weights(
        self, version: int | str, weights: nn.Module | Mapping[str, Tensor], adapter: str = "", scale: float = 1.0
    ) -> None:
        """Let the next step have other weights: a network like the first, or its tensors by name; or, with a name,
        those of a LoRA adapter (`scale`: alpha / rank) of the present base.

        The tensors become the engine's: they must not change afterwards. A request decides by `swap` what becomes of
        its running answers. At most two versions of the base are in memory: until the older of two is no longer used,
        a third waits, and the last that came replaces one that waits. Adapters leave with their base. Raises
        ConfigError for tensors that do not fit.
        """
        self._weights.set(version, weights, adapter, scale)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Its running answers continue, its queued ones end. Unknown names are ignored."""
        self._weights.remove(name)

    def observe(self) -> Observation:
        """Counts, now and since the engine was made."""
        running = list(self._running)
        used = sum(len(answer.known) for answer in running)
        return Observation(
            running=len(running),
            queued=self._admission.queued,
            queued_tokens=self._admission.queued_tokens,
            cells_used=used / (self._slots.num_answers * self._limits.length),
            versions=Counter(answer.weights.version for answer in running if answer.weights is not None),
            current=self._weights.base.version,
            pending=self._weights.pending,
            shared_tokens=self._slots.num_shared_tokens,
            step_s=self._admission.step_s(self._slots.num_answers + self._chunk),
            **{name: self._totals[name] for name in _TOTALS},
        )

    def list_step_times(self) -> list[tuple[int, float]]:
        """(tokens, seconds) of steps, ascending; empty before the first."""
        return self._admission.list_step_times()

    @property
    def length(self) -> int:
        """Tokens of an answer with its prompt, at most."""
        return self._limits.length

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._queue or self._submitted or self._weights.has_incoming or self._cancelled)

    def close(self) -> None:
        """Nothing outlives it."""

    # ---------------------------------------------------------------- from the thread of the owner

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Apply what came since the last step, then compute a chunk of prompts and a token of each running answer."""
        begin_s = time.monotonic()
        events: list[TokenEvent] = []
        with self._lock:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, set()
        for answer in submitted:
            heapq.heappush(self._queue, answer)
        for answer in [*self._queue, *self._running]:
            if answer.number in cancelled:
                events.append(self._end(answer, "cancelled"))
            elif answer.is_late(begin_s):
                events.append(self._end(answer, "deadline"))
        if any(answer.is_over for answer in self._queue):
            self._queue = [answer for answer in self._queue if not answer.is_over]
            heapq.heapify(self._queue)
        self._apply_weights(events)
        self._fill_slots(events)
        segments = self._plan()
        num_tokens, models = 0, set[CausalModel]()
        for weights_model, some, padded in self._arrange(segments):
            num_tokens += self._compute(weights_model, some, padded, events)
            models.add(weights_model)
        if num_tokens:
            now_s = time.monotonic()
            self.last_step = num_tokens, now_s - begin_s, len(models)
            remaining = [answer.max_tokens - answer.num_new for answer in self._running]
            self._admission.observe_step(num_tokens, now_s - begin_s, now_s, remaining)
        return events

    def run(self, requests: list[TextRequest]) -> list[list[TokenEvent]]:
        """Submit and step until all are over; the events of each request in order. For scripts and tests."""
        numbers = [self.submit(request) for request in requests]
        events: dict[int, list[TokenEvent]] = {number: [] for number in numbers}
        while self.has_work:
            for event in self.step():
                events[event.request].append(event)
        return [events[number] for number in numbers]

    # ---------------------------------------------------------------- inside

    def _get_grammars(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise ConfigError("grammar", None, "needs an engine with a tokenizer")
        with self._grammar_lock:  # made once: it takes about a second for a large vocabulary
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer, self._limits.num_tokens, tuple(self._stop_tokens))
            return self._grammars

    def _apply_weights(self, events: list[TokenEvent]) -> None:
        """Make new weights the current ones, where memory allows, and let running answers follow by their policy."""
        self._weights.apply({answer.weights.model for answer in self._running if answer.weights is not None})
        current = self._weights.current
        self._slots.forget(current.values())
        for answer in list(self._running):
            target = current.get(answer.request.adapter)
            if target is None or target is answer.weights or answer.request.swap == "finish":
                continue
            if answer.request.swap == "refuse":
                events.append(self._end(answer, "swapped"))
            else:
                self._slots.follow(answer, target)

    def _fill_slots(self, events: list[TokenEvent]) -> None:
        while self._queue:
            answer = self._queue[0]
            if len(self._running) == self._slots.num_answers:
                last = max(self._running)
                if self._deterministic or last.request.priority >= answer.request.priority:
                    return  # a cache that is computed again has the same tokens, but not the same bits
                self._preempt(last)
            heapq.heappop(self._queue)
            self._admission.leave(1, answer.num_waiting)
            target = self._weights.current.get(answer.request.adapter)
            if answer.weights is not None and answer.request.swap == "finish":
                target = answer.weights
            if target is None:
                events.append(self._end(answer, "swapped", "the adapter went with its base"))
            elif answer.weights not in (None, target) and answer.request.swap == "refuse":
                events.append(self._end(answer, "swapped"))
            else:
                self._slots.take(answer, target)
                self._running.append(answer)

    def _preempt(self, answer: AnswerState) -> None:
        self._slots.release(answer)
        self._running.remove(answer)
        heapq.heappush(self._queue, answer)
        self._admission.leave(-1, -answer.num_waiting)
        self._totals["preempted"] += 1

    def _plan(self) -> list[tuple[AnswerState, TokenSegment]]:
        """What each answer computes in this step, of a chunk's tokens in all."""
        self._running.sort(key=lambda answer: answer.order)
        switching = any(answer.fill is not None for answer in self._running)
        # While caches are filled again a step is two forwards.
        most = self._chunk // 4 if switching and not self._deterministic else self._chunk
        budget = {False: most, True: most}
        planned: list[tuple[AnswerState, TokenSegment]] = []
        for answer in self._running:
            self._slots.share(answer)
            into = answer.slot if answer.fill is None else answer.fill
            assert into is not None
            segment = None
            if answer.source is None:
                segment = self._plan_segment(answer, into, budget, answer.fill is not None)
            if segment is not None:
                planned.append((answer, segment))
            if answer.fill is not None and not self._is_last_of_fill(answer, segment):
                assert answer.slot is not None
                row = self._plan_segment(answer, answer.slot, budget, False)
                assert row is not None
                planned.append((answer, row))
        return planned

    def _is_last_of_fill(self, answer: AnswerState, segment: TokenSegment | None) -> bool:
        """Whether the old slot rests in this step. A deterministic fill never computes the last token with others, so
        it needs a step in which no further one comes."""
        if segment is None:
            return False
        return segment.start + len(segment.tokens) >= len(answer.known) - self._deterministic

    def _plan_segment(
        self, answer: AnswerState, slot: int, budget: dict[bool, int], is_fill: bool
    ) -> TokenSegment | None:
        start = len(self._slots[slot].tokens)
        missing, num = len(answer.known) - start, 1
        if missing > 1 and not self._slots.is_replayed(answer, slot):
            end = len(answer.known) if is_fill else len(answer.request.prompt)
            most = min(end - 1 - start, self._chunk) if self._deterministic else missing
            if not budget[is_fill] or (self._deterministic and most > budget[is_fill]):
                return None
            num = most if self._deterministic else min(missing, budget[is_fill])
            budget[is_fill] -= num
            self._totals["refilled_tokens" if is_fill or answer.spans else "prompt_tokens"] += num
        weights = self._slots[slot].weights
        assert weights is not None
        return TokenSegment(slot, start, answer.known[start : start + num], num == missing, weights.adapter)

    def _arrange(
        self, planned: list[tuple[AnswerState, TokenSegment]]
    ) -> Iterator[tuple[CausalModel, dict[int, tuple[AnswerState, TokenSegment]], int]]:
        """Forwards: one for each version of the base; deterministic, also one for each chunk, all of fixed sizes."""
        groups: dict[tuple[int, int], tuple[CausalModel, dict[int, tuple[AnswerState, TokenSegment]], int]] = {}
        for answer, segment in planned:
            weights = self._slots[segment.slot].weights
            assert weights is not None
            alone, padded = -1, 0
            if self._deterministic:
                is_row = segment.wants_logits or self._slots.is_replayed(answer, segment.slot)
                alone, padded = (-1, self._slots.num_answers) if is_row else (segment.slot, self._chunk)
            group = groups.setdefault((id(weights.model), alone), (weights.model, {}, padded))
            group[1][segment.slot] = answer, segment
        return iter(groups.values())

    def _compute(
        self,
        model: CausalModel,
        some: dict[int, tuple[AnswerState, TokenSegment]],
        padded: int,
        events: list[TokenEvent],
    ) -> int:
        segments = [segment for _, segment in some.values()]
        at_least = padded or model.pad_rows(sum(len(each.tokens) for each in segments))
        work = Work(self._cells, segments, model.device, self._deterministic, at_least)
        wanted = work.wanted
        if padded and len(wanted):  # every row, so that this product and the sums of the softmax have a fixed shape too
            wanted = torch.arange(padded, device=model.device)
        elif missing := model.pad_rows(len(wanted)) - len(wanted):
            wanted = nn.functional.pad(wanted, (0, missing))
        logits = model.compute(work, wanted)
        answers = []
        for segment in work.segments:
            self._slots.note(segment)
            if segment.wants_logits:
                answer = some[segment.slot][0]
                self._slots.switch(answer, segment.slot)
                answers.append(answer)
        if answers:
            for answer, choice in zip(answers, sample(logits, [each.make_row() for each in answers]), strict=True):
                events.append(self._take(answer, choice))
        return work.num_tokens

    def _take(self, answer: AnswerState, choice: Sampled) -> TokenEvent:
        """Append a token to an answer, and see whether it ends."""
        assert answer.weights is not None
        if choice.token < 0:
            return self._end(answer, "error", "the model's logits are not finite")
        event = answer.take(choice, answer.weights.version)
        self._totals["new_tokens"] += 1
        problem = answer.matcher.problem if answer.matcher is not None else ""
        if problem:
            return self._end(answer, "error", problem, event)
        finish = answer.find_end(choice.token)
        if finish != "stop" and answer.matcher is not None and answer.matcher.is_complete:
            finish = "stop"
        return event if finish is None else self._end(answer, finish, event=event)

    def _end(
        self, answer: AnswerState, finish: FinishReason, problem: str = "", event: TokenEvent | None = None
    ) -> TokenEvent:
        if answer.slot is not None:
            self._slots.release(answer)
            self._running.remove(answer)
        elif answer in self._queue:
            self._admission.leave(1, answer.num_waiting)
        if finish in ("stop", "length"):
            self._admission.observe_end(answer.num_new / answer.max_tokens)
        version = answer.weights.version if answer.weights is not None else self._weights.base.version
        return answer.end(event or TokenEvent(answer.number, answer.index, version=version), finish, problem)


_TOTALS = ("prompt_tokens", "new_tokens", "refilled_tokens", "preempted")
