"""What the gateway knows of the actors' progress: episodes, steps, lag and events; for the display and the run record.

Called by the gateway's thread only; others get copies through `Gateway.stats()`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from shoal.wire.segment import Segment

EPISODE_WINDOW = 100


@dataclass
class ActorProgress:
    """One actor, across its reconnects; a new incarnation starts anew."""

    actor_id: str
    incarnation: int
    connected: bool = True
    steps: int = 0
    segments: int = 0
    weights_version: int = 0

    def to_dict(self, published_version: int) -> dict[str, Any]:
        return {**self.__dict__, "lag": max(0, published_version - self.weights_version)}


@dataclass
class Progress:
    """Counts since the gateway started. `solved_s`: from the first segment to the first moment at which the mean
    return of the last EPISODE_WINDOW finished episodes was at least `target_return`."""

    target_return: float | None = None
    steps: int = 0
    episodes: int = 0
    first_segment_at: float | None = None
    solved_s: float | None = None
    solved_steps: int | None = None
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))
    protocol_errors: Counter[str] = field(default_factory=Counter)
    events: deque[tuple[float, str, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=1000))

    def event(self, kind: str, **details: Any) -> None:
        """Note that something happened; the oldest of 1,000 unread events gives way."""
        self.events.append((time.time(), kind, details))

    def segment(self, actor: ActorProgress, segment: Segment) -> None:
        """Count a valid segment, whether it was accepted or too old."""
        now = time.time()
        if self.first_segment_at is None:
            self.first_segment_at = now
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
            self.solved_s = now - self.first_segment_at
            self.solved_steps = self.steps

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns) if self.returns else float("nan")
