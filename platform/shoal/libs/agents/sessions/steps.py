"""Groups that are over become steps of the learner: written, handed over as a whole, and counted when it is through."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.extend.rl import Segment
from shoal.libs.agents.sessions.credit import SessionCredit
from shoal.libs.agents.sessions.groups import GroupOutcome, make_segments
from shoal.libs.agents.sessions.session import AgentSession
from shoal.libs.agents.sessions.store import (
    SessionStore,
    Statement,
    change_session,
    close_step,
    count,
    insert_step,
    renumber_step,
)


@dataclass
class Step:
    """Segments that are learnt together. num_sessions: of its groups, dropped ones too, whose credit it holds"""

    number: int
    segments: list[Segment] = field(default_factory=list)
    num_sessions: int = 0


class StepOutcome(NamedTuple):
    """What the ledger says of a step's segments: how many were learnt, and dropped by reason."""

    num_learnt: int
    dropped: Mapping[str, int]


class LearnerSteps:
    """num_groups: of a step. emit: takes a step with segments. counts: of the run, `tokens/` and `drops/`"""

    def __init__(
        self,
        store: SessionStore,
        num_groups: int,
        credit: SessionCredit,
        emit: Callable[[Step], None],
        counts: Counter[str],
    ) -> None:
        self._store = store
        self._num_groups = num_groups
        self._credit = credit
        self._emit = emit
        self._counts = counts
        self._waiting: list[GroupOutcome] = []  # of the next step
        self._steps: dict[int, Step] = {}  # handed over, by number
        self._num_steps = 0
        self._lock = asyncio.Lock()  # of one step that is handed over

    def add(self, outcome: GroupOutcome) -> None:
        """A group is over."""
        self._waiting.append(outcome)

    async def hand_over(self) -> None:
        """Hand over the steps that are complete. Raises InferenceError (503): they wait."""
        async with self._lock:
            while len(self._waiting) >= self._num_groups:
                await self._write(self._waiting[: self._num_groups])
                del self._waiting[: self._num_groups]

    async def _write(self, groups: Iterable[GroupOutcome]) -> None:
        step = Step(self._num_steps + 1)
        dropped = Counter[tuple[str, int]]()
        drops = Counter[str]()
        statements = [insert_step(step.number)]
        for group in groups:
            step.segments += group.segments
            step.num_sessions += group.num_reserved + group.num_sessions.total()
            dropped += group.dropped
            drops.update({reason: num for reason, num in group.num_sessions.items() if reason})
            statements += [
                change_session(each.id, step=step.number, advantage=each.advantage, deviation=each.deviation)
                for each in group.members
            ]
        await self._record(statements, dropped, drops)
        self._num_steps = step.number
        self._steps[step.number] = step
        if step.segments:
            self._emit(step)
        else:
            await self.record_outcome(step.number, StepOutcome(0, {}))

    async def record_outcome(self, number: int, outcome: StepOutcome) -> None:
        """The learner is through with a step: count its tokens, and give back its credit.

        Where only some of its segments were dropped, the last ones count as those.
        """
        step = self._steps.pop(number)
        reasons = ["learned"] * outcome.num_learnt
        reasons += [reason for reason, num in outcome.dropped.items() for _ in range(num)]
        tokens = Counter[tuple[str, int]]()
        for segment, reason in zip(step.segments, reasons, strict=True):
            for version in segment.versions[segment.extras["trains"][:-1]].tolist():
                tokens[reason, version] += 1
        self._credit.give_back(step.num_sessions)
        await self._record([close_step(number)], tokens, outcome.dropped)
        self._counts["steps"] += 1  # then its accounts can be read

    def restore(self, load: Callable[[AgentSession], AgentSession], was_lost: Callable[[int], bool]) -> list[Step]:
        """The steps that the learner is not through with. was_lost: whether the segments of a step are to be queued
        again, under another number. Before the event loop runs."""
        records = self._store.records
        self._num_steps = records.find_last_step()
        for number in records.list_open_steps():
            step = Step(number)
            groups = set[str]()
            for session in map(load, records.list_of_step(number)):
                if session.group not in groups:
                    groups.add(session.group)
                    step.num_sessions += session.opening.group_size
                if session.advantage is not None:
                    step.segments += make_segments(session)
            if was_lost(number):
                self._num_steps += 1
                step.number = self._num_steps
                self._store.write_first(*renumber_step(number, step.number))
            self._credit.available -= step.num_sessions
            self._steps[step.number] = step
        return list(self._steps.values())

    async def _record(
        self, statements: list[Statement], tokens: Mapping[tuple[str, int], int], drops: Mapping[str, int]
    ) -> None:
        """Write what became of tokens, by that and by version, and count them and the sessions that were dropped."""
        accounts = [count(what, version, num) for (what, version), num in tokens.items()]
        await self._store.write(*statements, *accounts)
        for (what, _), num in tokens.items():
            self._counts[f"tokens/{what}"] += num
        for reason, num in drops.items():
            self._counts[f"drops/{reason}"] += num
