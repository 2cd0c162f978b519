"""A session: one episode of an agent elsewhere, as it lives in the gateway and as its file has it. Pure: times are
given."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.errors import InferenceError
from shoal.libs.agents.sessions.token_tree import TokenTree, Turn

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
    """One session. Times are seconds since 1970.

    key:       SHA-256 of its key
    group:     its name, of a session's own group too
    why:       of an end without a reward
    rewards:   of single answers, by the id of the turn, of several the last one
    step:      of the learner, that has taken it; None before
    advantage: of its total reward; None where it is not learnt. deviation: of its group, see `measure_deviation`

    In the gateway alone:
    tree:        its turns
    seen_at:     of its last request
    num_running: its requests in progress, during which it does not idle
    closing:     one end is written at a time
    """

    id: str
    key: bytes
    opened_at: float
    opening: Opening
    group: str
    state: State = "open"
    why: str = ""
    ending: Ending | None = None
    end_time: float | None = None
    rewards: dict[int, float] = field(default_factory=dict)
    step: int | None = None
    advantage: float | None = None
    deviation: float = 1.0
    tree: TokenTree = field(default_factory=lambda: TokenTree(None))
    seen_at: float = 0.0
    num_running: int = 0
    closing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def expires_at(self) -> float:
        return self.opened_at + self.opening.deadline_s

    @property
    def trains(self) -> bool:
        return self.opening.purpose == "train"

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

    def describe(self) -> dict[str, Any]:
        """What a list says of it. versions: that have sampled its tokens, each with its tokens"""
        versions = count_versions(self.tree.turns.values())
        return {
            "id": self.id,
            "state": self.state,
            "why": self.why,
            "group": self.group,
            "purpose": self.opening.purpose,
            "task": self.opening.task,
            "turns": len(self.tree.turns),
            "tokens": versions.total(),
            "versions": sorted(versions.items()),
            "reward": self.reward,
            "opened_at": self.opened_at,
        }

    def export(self) -> dict[str, Any]:
        """All of it, as plain values: how it was opened and has ended, and its segments."""
        names = ("tokens", "trains", "logprobs", "versions")
        segments = [{name: getattr(each, name).tolist() for name in names} for each in self.tree.segments()]
        opened, ended = msgspec.to_builtins((self.opening, self.ending))
        return {**opened, **self.describe(), "ending": ended, "segments": segments}


def count_versions(turns: Iterable[Turn]) -> Counter[int]:
    """How many tokens each version has sampled."""
    counts = Counter[int]()
    for turn in turns:
        for version, num_tokens in turn.spans:
            counts[version] += num_tokens
    return counts
