"""The sessions of a run, and their groups: how each ends, and what becomes of its tokens. Pure: times are given.

A session is one episode of an agent elsewhere. Sessions of one task are a group: its baseline is computed when the
group is over, once, and travels in the segments.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, cast

import msgspec
import numpy as np
from msgspec import Meta

from shoal.errors import InferenceError
from shoal.extend.rl import Segment
from shoal.libs.agents.baselines import Baseline, compute_advantages, measure_deviation
from shoal.libs.agents.sessions.store import StoredSession
from shoal.libs.agents.sessions.token_tree import TokenTree, TrainingSegment, Turn

MAX_TASK_BYTES = 65_536
State = Literal["open", "ended", "failed", "expired", "evicted"]
Reward = Annotated[float, Meta(ge=-1e30, le=1e30)]  # finite, also as the float32 of a sum
Seconds = Annotated[float, Meta(gt=0, le=30 * 24 * 3600)]


class Opening(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /shoal/v1/sessions`.

    group:      of the same task; "" for a group of its own
    group_size: sessions in the group
    task:       any JSON, stored and shown
    idle_s:     without a request, after which the session expires
    deadline_s: of the whole episode, by the clock
    version:    of the weights, from begin to end, for `eval` alone; None: the newest at the opening
    """

    group: Annotated[str, Meta(max_length=256)] = ""
    group_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    task: Any = None
    idle_s: Seconds = 600.0
    deadline_s: Seconds = 3600.0
    purpose: Literal["train", "eval"] = "train"
    version: Annotated[int, Meta(ge=1)] | None = None


class Ending(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /shoal/v1/sessions/ID/end`: a reward, or why there is none.

    truncated: the episode was cut off by a limit of steps or time
    """

    reward: Reward | None = None
    failed: Annotated[str, Meta(max_length=1000)] = ""
    truncated: bool = False

    def require_valid(self) -> None:
        """Raises InferenceError (400): no reward is no reward, and never a low one."""
        if (self.reward is None) != bool(self.failed):
            raise InferenceError(400, "give a reward, or as `failed` why there is none", field="reward")


@dataclass(eq=False)
class AgentSession:
    """One session.

    key:         SHA-256 of its key
    seen_at:     of its last request; times are seconds since 1970
    num_running: its requests in progress, during which it does not idle
    why:         of an end without a reward
    rewards:     of single answers, by the id of the turn, of several the last one
    closing:     one end is written at a time
    """

    id: str
    key: bytes
    opening: Opening
    opened_at: float
    tree: TokenTree
    seen_at: float
    group: str
    state: State = "open"
    why: str = ""
    ending: Ending | None = None
    num_running: int = 0
    rewards: dict[int, float] = field(default_factory=dict)
    closing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def from_row(cls, row: StoredSession, tree: TokenTree, now_s: float) -> Self:
        """What the file of sessions has of it, and its turns."""
        return cls(
            row.id,
            row.key,
            msgspec.json.decode(row.opening, type=Opening),
            row.opened_at,
            tree,
            now_s,
            row.group_name,
            cast("State", row.state),
            row.why,
            None if row.ending is None else msgspec.json.decode(row.ending, type=Ending),
            rewards=msgspec.json.decode(row.rewards, type=dict[int, float]),
        )

    def to_row(self) -> StoredSession:
        """As it is opened."""
        opening = msgspec.json.encode(self.opening)
        return StoredSession(
            self.id, self.key, self.opened_at, opening, self.group, self.state, "", None, None, b"{}", None, None, None
        )

    @property
    def expires_at(self) -> float:
        return self.opened_at + self.opening.deadline_s

    @property
    def reward(self) -> float | None:
        """That of its end, and of its turns; None without an end that has one."""
        if self.ending is None or self.ending.reward is None:
            return None
        return self.ending.reward + sum(self.rewards.values())

    def describe_lapse(self, now_s: float) -> str:
        """Why it expires now; "" where it does not."""
        if now_s >= self.expires_at:
            return f"deadline_s = {self.opening.deadline_s:g} has passed"
        if not self.num_running and now_s >= self.seen_at + self.opening.idle_s:
            return f"idle_s = {self.opening.idle_s:g} has passed without a request"
        return ""


@dataclass(eq=False)
class SessionGroup:
    """Sessions of one task. num_unopened: those that may still join"""

    name: str
    num_unopened: int
    members: list[AgentSession] = field(default_factory=list)
    first_end_at: float | None = None

    def is_complete(self, now_s: float, group_s: float) -> bool:
        """Whether all have ended, or the others have had their time."""
        has_open = self.num_unopened or any(each.state == "open" for each in self.members)
        return self.first_end_at is not None and (not has_open or now_s >= self.first_end_at + group_s)


@dataclass
class GroupOutcome:
    """What becomes of a group.

    segments:  to learn, with their advantages
    members:   each session with its advantage; None for one that is dropped
    deviation: see `measure_deviation`
    dropped:  sampled tokens that are not learnt, by reason and version
    num_sessions: by reason; "" of those that are learnt
    num_reserved: sessions that were never opened
    """

    segments: list[Segment] = field(default_factory=list)
    members: list[tuple[AgentSession, float | None]] = field(default_factory=list)
    deviation: float = 1.0
    dropped: Counter[tuple[str, int]] = field(default_factory=Counter)
    num_sessions: Counter[str] = field(default_factory=Counter)
    num_reserved: int = 0


@dataclass(frozen=True)
class GroupRules:
    """How groups are compared.

    baseline:  see `compute_advantages`
    group_s:   after a group's first end, within which the others must end
    min_group: sessions with a reward that suffice then; None: half, at least 2
    truncated: whether an episode that was cut off is learnt
    """

    baseline: Baseline
    group_s: float = 600.0
    min_group: int | None = None
    truncated: Literal["train", "drop"] = "train"

    def count_needed(self, size: int) -> int:
        """How many rewards make a group of this size worth comparing."""
        return 1 if size == 1 else max(2, self.min_group or math.ceil(size / 2))

    def compare(self, group: SessionGroup) -> GroupOutcome:
        """Compare the sessions that have a reward; what the others have sampled is dropped with the reason."""
        graded = [each for each in group.members if each.reward is not None and not self._is_truncated(each)]
        rewards = np.array([each.reward for each in graded], np.float32)
        outcome = GroupOutcome(num_reserved=group.num_unopened)
        size = group.num_unopened + len(group.members)
        for each in group.members:
            if each not in graded:
                self._drop(outcome, each, "truncated" if each.state == "ended" else each.state)
        if len(graded) < self.count_needed(size):
            for each in graded:
                self._drop(outcome, each, "group_incomplete")
            return outcome
        advantages = compute_advantages(rewards, self.baseline)
        outcome.deviation = measure_deviation(rewards, self.baseline)
        # An answer of the mean reward has no gradient either, but its tokens count in the loss's denominator. With the
        # baseline "global" the learner takes the mean of the batch.
        has_signal = advantages.any() or self.baseline == "global"
        for session, advantage in zip(graded, advantages, strict=True):
            if has_signal:
                self._emit(outcome, session, float(advantage))
            else:
                self._drop(outcome, session, "no_signal")
        return outcome

    def _is_truncated(self, session: AgentSession) -> bool:
        return self.truncated == "drop" and session.ending is not None and session.ending.truncated

    def _drop(self, outcome: GroupOutcome, session: AgentSession, reason: str) -> None:
        outcome.members.append((session, None))
        outcome.num_sessions[reason] += 1
        for version, num_tokens in count_versions(session.tree.turns.values()).items():
            outcome.dropped[reason, version] += num_tokens

    def _emit(self, outcome: GroupOutcome, session: AgentSession, advantage: float) -> None:
        outcome.members.append((session, advantage))
        outcome.num_sessions[""] += 1
        outcome.segments += make_segments(session, advantage, outcome.deviation)
        for turn in session.tree.turns.values():
            if not turn.trains:
                outcome.dropped += Counter({(turn.why_not, version): num for version, num in turn.spans})


def count_versions(turns: Iterable[Turn]) -> Counter[int]:
    """How many tokens each version has sampled."""
    counts = Counter[int]()
    for turn in turns:
        for version, num_tokens in turn.spans:
            counts[version] += num_tokens
    return counts


def make_segments(session: AgentSession, advantage: float, deviation: float) -> list[Segment]:
    """What is learnt of a session that has a reward. advantage, deviation: A_i and d of `baselines`"""
    assert session.reward is not None
    segments = []
    for given in session.tree.segments():
        path = [session.tree.turns[number] for number in given.turns]
        sizes = [len(turn.prompt) + len(turn.tokens) for turn in path]
        earlier = [sum(reward for number, reward in session.rewards.items() if number < turn.id) for turn in path]
        segments.append(make_segment(given, session.reward, advantage, np.repeat(earlier, sizes) / deviation))
    return segments


def make_segment(given: TrainingSegment, reward: float, advantage: float, passed: np.ndarray | float = 0.0) -> Segment:
    """The steps of a text: the observation is a token, the action the next one.

    advantage: of the episode; passed: float [T], what is less in that of a token, for rewards before it
    Ends with the last token that is trained. Others count as of the newest version of the segment, so that only what
    is trained can be too old.
    """
    end = int(np.flatnonzero(given.trains)[-1]) + 1
    tokens, trains = given.tokens[:end].astype(np.int32), given.trains[:end]
    versions = np.where(trains, given.versions[:end], given.versions[:end][trains].max())
    rewards = np.zeros(end - 1, np.float32)
    rewards[-1] = reward
    return Segment(
        observations=tokens,
        actions=tokens[1:],
        rewards=rewards,
        log_probabilities=np.where(trains, given.logprobs[:end], 0).astype(np.float32)[1:],
        versions=versions.astype(np.int64)[1:],
        terminated=True,
        episode_return=reward,
        episode_length=int(trains.sum()),
        extras={
            "trains": np.append(trains[1:], False),
            "advantage": np.append((advantage - passed * np.ones(len(given.tokens)))[1:end], advantage).astype(
                np.float32
            ),
        },
    )
