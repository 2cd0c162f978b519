"""The model that a session's agent talks to: prompts continue the tokens that were sampled, and answers become turns.

One `SessionText` answers one request. Implements `TextModel` on a sampler, which has the newest weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.errors import InferenceError
from shoal.extend.serve import Caller, HttpRequest, Send
from shoal.libs.agents.sessions.service import SessionService
from shoal.libs.agents.sessions.session import AgentSession
from shoal.libs.agents.sessions.token_tree import Plan, TokenTree, Turn
from shoal.libs.language.api.answers import TextAnswer
from shoal.libs.language.api.bodies import Json
from shoal.libs.language.api.tools import ToolUse
from shoal.libs.language.engine.request import Sampling, TextRequest, TokenEvent, TokenIds
from shoal.libs.language.text_model import TextCall, TextModel

PLAIN = Sampling(temperature=1.0)


class SessionTexts:
    """The models of one request within a session: whichever name it asks for. Implements `TextModels`.

    turns: that its answer has brought, once it is complete
    """

    replica = "gateway"

    def __init__(self, service: SessionService, session: AgentSession) -> None:
        self.service = service
        self.session = session
        self.turns: list[Turn] = []

    def list(self, caller: Caller) -> list[TextModel]:
        return [self.get("model", caller)]

    def get(self, name: str, caller: Caller) -> TextModel:
        return SessionText(name, self)

    def is_peer(self, token: bytes) -> bool:
        return False

    async def load(self, name: str, request: HttpRequest, send: Send) -> None:
        """The sampler's model is loaded."""


@dataclass
class _Sampled:
    """One answer so far."""

    reader: TextAnswer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""

    def take(self, event: TokenEvent) -> None:
        if event.token is not None:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob if event.behaviour_logprob is None else event.behaviour_logprob)
            self.versions.append(int(event.version))
        self.reader.take(event)
        self.finish = event.finish or ""

    @property
    def message(self) -> Json:
        """As `read_messages` would give it."""
        message: Json = {"role": "assistant", "content": self.reader.text}
        if self.reader.calls:
            calls = [{"name": each.name, "arguments": _read_json(each.arguments)} for each in self.reader.calls]
            message["tool_calls"] = [{"id": "", "type": "function", "function": each} for each in calls]
        return message


class SessionText:
    """Implements `TextModel`, for one request."""

    created_s = 0.0

    def __init__(self, name: str, texts: SessionTexts) -> None:
        self.name = name
        self._texts = texts
        self.tokenizer = texts.service.tokenizer
        self.context = texts.service.sampler.context
        self._plan: Plan | None = None
        self._use = ToolUse()

    def continue_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        fields: Mapping[str, Any],
    ) -> TokenIds:
        """The prompt of a history: the tokens that were sampled, as far as it agrees with a turn."""
        self._use = ToolUse([dict(each["function"]) for each in tools or ()])
        self._plan = self._texts.session.tree.plan(
            [dict(each) for each in messages], [dict(each) for each in tools] if tools else None, fields
        )
        self._texts.service.counts["branches"] += self._plan.is_branch
        return self._plan.prompt

    async def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`. The turns are known before the last event."""
        texts = self._texts
        tree = texts.session.tree
        plan = self._plan or plan_prompt(tree, request.prompt)
        request, why_not = _apply_rules(request, texts.session, texts.service)
        call = replace(call, version=texts.session.opening.version)  # whatever the request's `model` says
        template = self.tokenizer.chat_template or ""
        answers = [
            _Sampled(TextAnswer(number, self._use.make_reader(template), shows_all=False))
            for number in range(request.num_answers)
        ]
        try:
            async with aclosing(texts.service.sampler.generate(request, call)) as events:
                async for event in events:
                    texts.service.find(texts.session.id)  # raises once it is over
                    answers[event.index].take(event)
                    if all(each.finish for each in answers):
                        texts.turns += [self._add(plan, each, why_not) for each in answers]
                        answers = []
                    yield event
        finally:
            is_learnt = texts.service.rules.cancelled == "train"
            why_not = why_not or ("" if is_learnt else "cancelled")
            texts.turns += [self._add(plan, each, why_not) for each in answers if each.tokens]  # its client has left

    def _add(self, plan: Plan, answer: _Sampled, why_not: str) -> Turn:
        return self._texts.session.tree.add(
            plan, answer.message, answer.tokens, answer.logprobs, answer.versions, not why_not, why_not, answer.finish
        )

    async def embed(self, prompts: Sequence[TokenIds], call: TextCall) -> tuple[list[np.ndarray], int]:
        raise InferenceError(400, "a session has no embeddings", field="model")


def plan_prompt(tree: TokenTree, prompt: TokenIds) -> Plan:
    """That of a prompt without messages: a branch, whose prompt is context."""
    key = hashlib.blake2b(np.array(prompt, "<i4").tobytes(), digest_size=16).digest()
    return Plan(prompt, None, 0, bool(tree.turns), key)


def _apply_rules(request: TextRequest, session: AgentSession, service: SessionService) -> tuple[TextRequest, str]:
    """The request as a training session samples it, and why its answer is not learnt ("": it is)."""
    if (most := service.spec.max_tokens) is not None:
        request = replace(request, max_tokens=min(request.max_tokens or most, most))
    if request.swap == "refuse":  # its 409 would be repeated
        request = replace(request, swap="continue")
    if not session.trains:
        return request, "eval"
    sampling = replace(PLAIN, temperature=service.algorithm.temperature)
    if replace(request.sampling, seed=None) not in (PLAIN, sampling):  # a client without a wish has the API's default
        service.counts["sampling_overridden"] += 1
    request = replace(request, sampling=sampling, behaviour=sampling != PLAIN)
    return request, "sampling" if request.grammar is not None else ""


def _read_json(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text
