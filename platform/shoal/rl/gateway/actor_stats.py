"""The progress of the actors: episodes, steps, lag and events; for the display and the run record.

Used by the gateway's thread only; other threads get copies through `Gateway.stats()`.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from shoal.rl.experience.segment_ledger import ActorKey
from shoal.weights import WeightSnapshot
from shoal.wire.segment import Segment

EPISODE_WINDOW = 100
MAX_DISCONNECTED_ACTORS = 100  # that are remembered
REJECTIONS_INTERVAL_S = 10.0  # between two events of rejected actors
SHORTAGES_INTERVAL_S = 60.0  # likewise, of credit that has run out


@dataclass
class ActorProgress:
    """One actor, across its reconnects; a new incarnation starts from zero.

    invalid: its segments and messages that were rejected for what they are, by drop reason or error code
    """

    actor_id: str
    incarnation: int
    connected: bool = True
    steps: int = 0
    segments: int = 0
    invalid: dict[str, int] = field(default_factory=dict)
    weights_version: int = 0
    is_awaited: bool = False  # with a segment that found no slot in the queue
    settings: int = 0  # the version of the game's settings that it was sent

    def to_dict(self, newest: WeightSnapshot | None) -> dict[str, Any]:
        """Its fields and its lag in versions, which is 0 for a disconnected actor."""
        lag = int(newest.measure_lag(self.weights_version)) if newest is not None and self.connected else 0
        return {**self.__dict__, "invalid": dict(self.invalid), "lag": lag}


class ActorTable:
    """The connected actors of a run, and the last MAX_DISCONNECTED_ACTORS that disconnected."""

    def __init__(self) -> None:
        self._actors: dict[ActorKey, ActorProgress] = {}
        self._incarnations: dict[str, set[int]] = {}  # of these actors, by actor id
        self._disconnected: dict[ActorKey, None] = {}  # in the order of disconnecting

    def __iter__(self) -> Iterator[ActorProgress]:
        return iter(self._actors.values())

    def join(self, key: ActorKey) -> ActorProgress:
        """Add a new or returning actor."""
        progress = self._actors.setdefault(key, ActorProgress(*key))
        self._incarnations.setdefault(key[0], set()).add(key[1])
        self._disconnected.pop(key, None)
        progress.connected = True
        return progress

    def find(self, key: ActorKey) -> ActorProgress | None:
        """This actor, unless it is forgotten."""
        return self._actors.get(key)

    def leave(self, key: ActorKey) -> None:
        """Mark it as disconnected; beyond the maximum, the first to leave is forgotten."""
        self._actors[key].connected = False
        self._disconnected[key] = None
        if len(self._disconnected) > MAX_DISCONNECTED_ACTORS:
            self._remove(next(iter(self._disconnected)))

    def remove_older(self, key: ActorKey) -> list[ActorProgress]:
        """Remove the earlier incarnations of this actor, which have disconnected, and return them."""
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
    """Counts of the run, over all incarnations of its gateway. `solved_s`: from the first segment until the mean return
    of the last EPISODE_WINDOW finished episodes reached `target_return`, without the time between two incarnations."""

    target_return: float | None = None
    steps: int = 0
    episodes: int = 0
    first_segment_at: float | None = None
    solved_s: float | None = None
    solved_steps: int | None = None
    elapsed_before_s: float = 0.0  # in earlier incarnations
    _started_at: float | None = None  # first segment of this incarnation, by time.monotonic(): clocks can be reset
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))
    successes: deque[bool] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))  # of episodes that say so
    by_opponent: dict[int, deque[float]] = field(default_factory=dict)  # with self-play: the returns against a version
    settings: int = 0  # the newest version of the game's settings
    by_settings: dict[int, tuple[int, float]] = field(default_factory=dict)  # of each: episodes, and their returns' sum
    opponent_names: Mapping[int, str] = field(default_factory=dict)  # of registered ones
    protocol_errors: Counter[str] = field(default_factory=Counter)
    events: deque[tuple[float, str, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=1000))
    quarantined: dict[str, str] = field(default_factory=dict)  # actors of whom an event was recorded
    _rejected_at: dict[str, float] = field(default_factory=dict)  # of the last event of a code
    _shortage_at: float = -math.inf  # of the last event

    def record_event(self, kind: str, **details: Any) -> None:
        """Add an event; beyond 1,000 unread events the oldest is dropped."""
        self.events.append((time.time(), kind, details))

    def record_rejected_actor(self, actor_id: str, code: str) -> None:
        """Name an actor whose hello was rejected. A flood makes few events, so that it displaces no others."""
        if time.monotonic() >= self._rejected_at.get(code, -math.inf) + REJECTIONS_INTERVAL_S:
            self._rejected_at[code] = time.monotonic()
            self.record_event("actor_refused", actor_id=actor_id, reason=code, count=self.protocol_errors[code])

    def record_shortage(self, shortage: Mapping[str, Any] | None) -> None:
        """Record that credit has run out, and who holds it."""
        if shortage is not None and time.monotonic() >= self._shortage_at + SHORTAGES_INTERVAL_S:
            self._shortage_at = time.monotonic()
            self.record_event("credit_exhausted", **shortage)

    def record_quarantine(self, quarantined: Mapping[str, str]) -> None:
        """Record an event for each actor that has been put in quarantine, with the reason, or has been released."""
        for actor_id in quarantined.keys() - self.quarantined.keys():
            self.record_event("actor_quarantined", actor_id=actor_id, reason=quarantined[actor_id])
        for actor_id in self.quarantined.keys() - quarantined.keys():
            self.record_event("actor_released", actor_id=actor_id)
        self.quarantined = dict(quarantined)

    def record_rejection(self, actor: ActorProgress, reason: str, detail: str, count: int = 1) -> None:
        """Count rejected segments or messages, and record an event for the actor's first of this reason."""
        if reason not in actor.invalid:
            self.record_event("invalid_segment", actor_id=actor.actor_id, reason=reason, detail=detail)
        actor.invalid[reason] = actor.invalid.get(reason, 0) + count

    def record_segment(self, actor: ActorProgress, segment: Segment) -> None:
        """Count a valid segment, accepted or too old, and the episodes that it ends or names."""
        if self.first_segment_at is None:
            self.first_segment_at, self._started_at = time.time(), time.monotonic()
        actor.steps += segment.num_steps
        actor.segments += 1
        actor.weights_version = int(segment.versions[-1])
        self.steps += segment.num_steps
        version = segment.settings if 0 < segment.settings <= self.settings else actor.settings or self.settings
        for each in segment.unrecorded:
            self._record_episode(each.episode_return, each.episode_length, each.opponent, each.success, version)
        if segment.episode_return is not None and not segment.assisted:
            length = segment.episode_length or segment.num_steps
            self._record_episode(segment.episode_return, length, segment.opponent, segment.success, version)

    def change_settings(self, values: Mapping[str, Any]) -> None:
        """The mean return is of episodes with these settings of the game."""
        episodes, total = self.by_settings.get(self.settings, (0, 0.0))
        before = {"episodes_before": episodes, "return_before": total / episodes} if episodes else {}
        self.settings += 1
        self.record_event("settings_changed", version=self.settings, settings=dict(values), **before)
        self.forget_window()

    def forget_window(self) -> None:
        """The mean return is of episodes that end from now on."""
        for window in (self.returns, self.lengths, self.successes):
            window.clear()

    def _record_episode(
        self, episode_return: float, length: int, opponent: int, success: bool | None, settings: int
    ) -> None:
        self.episodes += 1
        count, total = self.by_settings.get(settings, (0, 0.0))
        self.by_settings[settings] = count + 1, total + episode_return
        if settings != self.settings:
            return
        self.returns.append(episode_return)
        self.lengths.append(length)
        if success is not None:
            self.successes.append(success)
        if opponent:
            self.by_opponent.setdefault(opponent, deque(maxlen=EPISODE_WINDOW)).append(episode_return)
        full = len(self.returns) == EPISODE_WINDOW
        if self.target_return is not None and self.solved_s is None and full and self.mean_return >= self.target_return:
            self.solved_s = self.elapsed_s
            self.solved_steps = self.steps

    @property
    def elapsed_s(self) -> float:
        """From the first segment on, over all incarnations."""
        return self.elapsed_before_s + (0.0 if self._started_at is None else time.monotonic() - self._started_at)

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        """(time, kind, details) of the events since the last call."""
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
            "episode_spread": self._measure_spread(),
            "first_segment_at": self.first_segment_at,
            "elapsed_s": self.elapsed_s,
            "solved_s": self.solved_s,
            "solved_steps": self.solved_steps,
            "protocol_errors": dict(self.protocol_errors),
            "settings_version": self.settings,
            "by_settings": {
                version: {"episodes": count, "mean_return": total / count}
                for version, (count, total) in self.by_settings.items()
            },
            "opponents": {
                version: {
                    "episodes": len(returns),
                    "win_rate": sum(each > 0 for each in returns) / len(returns),
                    "mean_return": sum(returns) / len(returns),
                    **({"name": self.opponent_names[version]} if version in self.opponent_names else {}),
                }
                for version, returns in sorted(self.by_opponent.items())
            },
        }

    def dump_state(self) -> str:
        """The state for the next incarnation."""
        windows = list(self.returns), list(self.lengths), list(self.successes)
        return json.dumps([self.steps, self.episodes, self.elapsed_s, *windows, list(self.by_settings.items())])

    @classmethod
    def merge(cls, states: Sequence[str], target_return: float | None) -> Self:
        """Of several gateways, by their `dump_state`: each window has the newest of each, in equal shares. It is solved
        where the full window's mean return is at the target now."""
        merged = cls(target_return)
        share = EPISODE_WINDOW // len(states)
        for text in states:
            steps, episodes, elapsed_s, returns, lengths, successes, settings = json.loads(text)
            merged.steps += steps
            merged.episodes += episodes
            merged.elapsed_before_s = max(merged.elapsed_before_s, elapsed_s)
            merged.returns.extend(returns[-share:])
            merged.lengths.extend(lengths[-share:])
            merged.successes.extend(successes[-share:])
            for version, (count, total) in settings:
                known_count, known_total = merged.by_settings.get(version, (0, 0.0))
                merged.by_settings[version] = known_count + count, known_total + total
        is_full = len(merged.returns) == share * len(states)
        if target_return is not None and is_full and merged.mean_return >= target_return:
            merged.solved_s = merged.elapsed_s
            merged.solved_steps = merged.steps
        return merged

    def restore(self, text: str) -> None:
        """Continue from `dump_state` of an earlier incarnation."""
        self.steps, self.episodes, self.elapsed_before_s, returns, lengths, successes, settings = json.loads(text)
        self.returns.extend(returns)
        self.lengths.extend(lengths)
        self.successes.extend(successes)
        self.by_settings = {version: (count, total) for version, (count, total) in settings}

    def _measure_spread(self) -> dict[str, float]:
        """Of the episodes in the window: the metrics `episode/...`."""
        if not self.returns:
            return {}
        returns, lengths = np.array(self.returns), np.array(self.lengths)
        spread = {"return_std": returns.std(), "return_min": returns.min(), "return_max": returns.max()}
        spread |= {"length": lengths.mean(), "length_std": lengths.std()}
        if self.successes:
            spread["success_rate"] = sum(self.successes) / len(self.successes)
        return {name: float(value) for name, value in spread.items()}

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns) if self.returns else float("nan")
