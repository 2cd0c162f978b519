"""What the gateway knows of the actors' progress: episodes, steps, lag and events; for the display and the run record.

Called by the gateway's thread only; others get copies through `Gateway.stats()`.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.rl.experience.segment_ledger import ActorKey
from shoal.wire.segment import Segment

EPISODE_WINDOW = 100
MAX_DISCONNECTED_ACTORS = 100  # that are remembered after they disconnected
REJECTIONS_INTERVAL_S = 10.0  # between two events that tell of refused actors


@dataclass
class ActorProgress:
    """One actor, across its reconnects; a new incarnation starts anew.

    invalid: its segments that broke the spec, by the reason for which they were dropped
    """

    actor_id: str
    incarnation: int
    connected: bool = True
    steps: int = 0
    segments: int = 0
    invalid: dict[str, int] = field(default_factory=dict)
    weights_version: int = 0

    def to_dict(self, published_version: int) -> dict[str, Any]:
        """Its fields and its lag in versions, which is 0 for one that is gone."""
        lag = max(0, published_version - self.weights_version) if self.connected else 0
        return {**self.__dict__, "invalid": dict(self.invalid), "lag": lag}


class ActorTable:
    """The actors of a run: everyone who is connected, and the last MAX_GONE_ACTORS who were."""

    def __init__(self) -> None:
        self._actors: dict[ActorKey, ActorProgress] = {}
        self._incarnations: dict[str, set[int]] = {}  # of those, by actor id
        self._disconnected: dict[ActorKey, None] = {}  # in the order in which they left

    def __iter__(self) -> Iterator[ActorProgress]:
        return iter(self._actors.values())

    def join(self, key: ActorKey) -> ActorProgress:
        """A new actor, or one that is back."""
        progress = self._actors.setdefault(key, ActorProgress(*key))
        self._incarnations.setdefault(key[0], set()).add(key[1])
        self._disconnected.pop(key, None)
        progress.connected = True
        return progress

    def leave(self, key: ActorKey) -> None:
        """It disconnected; of too many of those the first to leave is forgotten."""
        self._actors[key].connected = False
        self._disconnected[key] = None
        if len(self._disconnected) > MAX_DISCONNECTED_ACTORS:
            self._remove(next(iter(self._disconnected)))

    def remove_older(self, key: ActorKey) -> list[ActorProgress]:
        """Forget the earlier incarnations of this actor, and return them. They have left."""
        actor_id, incarnation = key
        older = sorted(each for each in self._incarnations.get(actor_id, ()) if each < incarnation)
        return [self._remove((actor_id, each)) for each in older]

    def _remove(self, key: ActorKey) -> ActorProgress:
        actor_id, incarnation = key
        self._incarnations[actor_id].discard(incarnation)
        if not self._incarnations[actor_id]:
            del self._incarnations[actor_id]
        del self._disconnected[key]
        return self._actors.pop(key)


@dataclass
class RunProgress:
    """Counts of the run, over all lives of its gateway. `solved_s`: from the first segment to the first moment at which
    the mean return of the last EPISODE_WINDOW finished episodes was at least `target_return`, without the time between
    two lives."""

    target_return: float | None = None
    steps: int = 0
    episodes: int = 0
    first_segment_at: float | None = None
    solved_s: float | None = None
    solved_steps: int | None = None
    elapsed_before_s: float = 0.0  # in earlier lives
    _started_at: float | None = None  # with the first segment of this life, by time.monotonic(): clocks are set
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))
    protocol_errors: Counter[str] = field(default_factory=Counter)
    events: deque[tuple[float, str, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=1000))
    _rejections_reported_at: float = -math.inf

    def record_event(self, kind: str, **details: Any) -> None:
        """Note that something happened; the oldest of 1,000 unread events gives way."""
        self.events.append((time.time(), kind, details))

    def record_rejected_actor(self, actor_id: str) -> None:
        """Note one who came without the token, and how many have by now; a flood must not displace other events."""
        if time.monotonic() >= self._rejections_reported_at + REJECTIONS_INTERVAL_S:
            self._rejections_reported_at = time.monotonic()
            count = self.protocol_errors["bad_token"]
            self.record_event("actor_refused", actor_id=actor_id, reason="bad_token", count=count)

    def record_invalid_segment(self, actor: ActorProgress, reason: str, detail: str) -> None:
        """Count a segment that broke the spec, and tell of the actor's first for this reason."""
        actor.invalid[reason] = actor.invalid.get(reason, 0) + 1
        if actor.invalid[reason] == 1:
            self.record_event("invalid_segment", actor_id=actor.actor_id, reason=reason, detail=detail)

    def record_segment(self, actor: ActorProgress, segment: Segment) -> None:
        """Count a valid segment, whether it was accepted or too old."""
        if self.first_segment_at is None:
            self.first_segment_at, self._started_at = time.time(), time.monotonic()
        actor.steps += segment.num_steps
        actor.segments += 1
        actor.weights_version = int(segment.versions[-1])
        self.steps += segment.num_steps
        if segment.episode_return is None:
            return
        self.episodes += 1
        self.returns.append(segment.episode_return)
        self.lengths.append(segment.episode_length or segment.num_steps)
        full = len(self.returns) == EPISODE_WINDOW
        if self.target_return is not None and self.solved_s is None and full and self.mean_return >= self.target_return:
            self.solved_s = self.elapsed_s
            self.solved_steps = self.steps

    @property
    def elapsed_s(self) -> float:
        """From the first segment on, in all lives."""
        return self.elapsed_before_s + (0.0 if self._started_at is None else time.monotonic() - self._started_at)

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        """(time, kind, details) of what happened since the last call."""
        events = list(self.events)
        self.events.clear()
        return events

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "steps": self.steps,
            "episodes": self.episodes,
            "mean_return": self.mean_return,
            "episodes_in_window": len(self.returns),
            "first_segment_at": self.first_segment_at,
            "solved_s": self.solved_s,
            "solved_steps": self.solved_steps,
            "protocol_errors": dict(self.protocol_errors),
        }

    def to_json(self) -> str:
        """What the next life must know."""
        returns, lengths = list(self.returns), list(self.lengths)
        return json.dumps([self.steps, self.episodes, self.elapsed_s, returns, lengths])

    def restore(self, text: str) -> None:
        """Go on from the `to_json` of an earlier life."""
        self.steps, self.episodes, self.elapsed_before_s, returns, lengths = json.loads(text)
        self.returns.extend(returns)
        self.lengths.extend(lengths)

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns) if self.returns else float("nan")
