"""The sessions of a run as texts, from the files in its folder, while it goes on or later: for verbs and reports.

Needs neither torch nor the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec

from shoal.errors import RunError, needs_extra
from shoal.extend.runs import Run, format_number
from shoal.libs.agents.sessions.session import AgentSession
from shoal.libs.agents.sessions.store import TOKENIZER, SessionRecords


class Transcripts:
    """The sessions of one run. Raises RunError for one that has none on this host."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.records = SessionRecords(run.folder)
        if not self.records.path.is_file():
            raise RunError(f"run {run.id} has no sessions here: those of `shoal run agents` are on the gateway's host")

    @cached_property
    def _tokenizer(self) -> Any:
        with needs_extra("language"):
            from tokenizers import Tokenizer
        return Tokenizer.from_file(str(self.run.folder / TOKENIZER))

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, with its special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def describe_turns(self, session: AgentSession) -> Iterator[dict[str, Any]]:
        """The turns of a session. prompt: what is new behind the turn that it continues; versions: with their tokens"""
        for turn in session.tree.turns.values():
            yield {
                "id": turn.id,
                "parent": turn.parent,
                "prompt": self.decode(turn.prompt.tolist()),
                "answer": self.decode(turn.tokens.tolist()),
                "tokens": len(turn.tokens),
                "versions": turn.spans,
                "finish": turn.finish,
                "trains": turn.trains,
                "why_not": turn.why_not,
            }

    def make_samples(self, session: AgentSession) -> Iterator[dict[str, str]]:
        """The prompt and completion of each answer that has come to its end, for fine-tuning."""
        begin = self._tokenizer.encode("").ids  # is added again there
        texts: dict[int | None, list[int]] = {None: []}
        for turn in session.tree.turns.values():
            prompt = [*texts[turn.parent], *turn.prompt.tolist()]
            texts[turn.id] = [*prompt, *turn.tokens.tolist()]
            if turn.finish == "stop":
                if prompt[: len(begin)] == begin:
                    prompt = prompt[len(begin) :]
                yield {"prompt": self.decode(prompt), "completion": self.decode(turn.tokens.tolist())}


def format_task(task: Any) -> str:
    """A task as one reads it: the text of its last message, or its JSON."""
    if isinstance(task, dict) and isinstance(messages := task.get("messages"), list) and messages:
        return str(messages[-1].get("content", ""))
    return task if isinstance(task, str) else msgspec.json.encode(task).decode()


def format_reward(reward: float | None) -> str:
    """A reward; `-` for a session without one."""
    return "-" if reward is None else format_number(reward)
