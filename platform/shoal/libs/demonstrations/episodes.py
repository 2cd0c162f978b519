"""Records whole episodes at a gateway: segments are collected in its thread, files are written in another.

| queue          | capacity                    | what blocks                    | who unblocks | close()            |
|----------------|-----------------------------|--------------------------------|--------------|--------------------|
| whole episodes | MAX_QUEUED, and their bytes | nothing: more are not recorded | the thread   | writes for CLOSE_S |
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from shoal.extend.rl import DemonstrationSite, RecordSpec
from shoal.libs.demonstrations.files import EPISODES, PER_STEP, Demonstration
from shoal.libs.demonstrations.recorder import CLOSE_S, RecordedFolder
from shoal.store import Mirror
from shoal.wire import Segment

MAX_QUEUED = 64
MAX_OPEN_BYTES = 64 * 2**20  # of the segments of episodes that have not ended; as many of those that wait
MAX_GOING = 100_000  # episodes without numbers whose segments are followed
IDLE_FACTOR = 9  # the thread rests that many times as long as it computes: a gateway has one interpreter
_log = logging.getLogger(__name__)
Key = tuple[str, int]


@dataclass(eq=False)
class _Open:
    """An episode that is recorded, until it ends."""

    number: int
    version: int
    settings: Mapping[str, Any]
    pieces: list[Segment] = field(default_factory=list)
    num_bytes: int = 0


class EpisodeCollector:
    """An EpisodeRecorder: episodes in the folder of `site`, and in `$SHOAL_STORE`."""

    def __init__(self, site: DemonstrationSite, spec: RecordSpec) -> None:
        self._limit = spec.share * 2**32
        self._files = RecordedFolder(site, EPISODES, spec.max_mb, spec.newest)
        self._max_bytes = min(MAX_OPEN_BYTES, int(spec.max_mb * 2**20))
        self._open: dict[Hashable, _Open] = {}  # by actor and number; the oldest first
        self._open_bytes = 0
        self._put_bytes, self._done_bytes = 0, 0  # of whole episodes; the thread counts those that it is done with
        # The open ones whose segments have no numbers, by actor and the hash of their last observation.
        self._going: dict[tuple[Key, int], list[int]] = {}
        self._numbers: dict[Key, int] = {}  # the highest
        self._counts = {"recorded": 0, "skipped": 0, "failed": 0}
        for info in self._files.infos.values():
            key = info.actor_id, info.incarnation
            self._numbers[key] = max(info.seq, self._numbers.get(key, 0))
        self._problem = ""
        self._waiting = deque[tuple[Key, _Open]]()
        self._is_closed = False
        self._writer = Mirror("episodes", self._write)

    def add(self, key: Key, segment: Segment, version: int, settings: Mapping[str, Any]) -> None:
        number = self._count(key, segment) if segment.episode is None else segment.episode
        identity = (key, number, segment.episode is None)
        if hash(identity) & 0xFFFFFFFF >= self._limit:
            return
        ends = segment.terminated or segment.truncated
        if (episode := self._open.pop(identity, None)) is None:
            if self._is_behind:  # what is copied now would not be written
                self._counts["skipped"] += ends
                return
            episode = _Open(number, version, settings)
        piece = _copy(segment)
        episode.pieces.append(piece)
        num_bytes = sum(each.nbytes for each in _list_arrays(piece))
        episode.num_bytes += num_bytes
        self._open_bytes += num_bytes
        self._open[identity] = episode
        if ends:
            self._open_bytes -= self._open.pop(identity).num_bytes
            self._put(key, episode)
        while self._open_bytes > self._max_bytes:
            self._open_bytes -= self._open.pop(next(iter(self._open))).num_bytes

    def get_counts(self) -> dict[str, int]:
        return {"episodes": len(self._files), **self._counts}

    def close(self) -> None:
        self._is_closed = True
        self._writer.close(CLOSE_S)
        self._files.close()

    def _count(self, key: Key, segment: Segment) -> int:
        """The number of the segment's episode, of an actor that sends none: the one whose last observation is the first
        of this segment; of several, the earliest."""
        first, last = ((key, hash(segment.observations[at].tobytes())) for at in (0, -1))
        if numbers := self._going.pop(first, []):
            number, *others = numbers
            self._going |= {first: others} if others else {}
        else:
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
        if not (segment.terminated or segment.truncated):
            self._going.setdefault(last, []).append(number)
        if len(self._going) > MAX_GOING:
            self._going.pop(next(iter(self._going)))
        return number

    def _put(self, key: Key, episode: _Open) -> None:
        """Let the thread write it, if it is whole: not one that was under way when this gateway began, and not one in
        which the policy has no part: that was shown."""
        last, rewards = episode.pieces[-1], np.concatenate([each.rewards for each in episode.pieces])
        total, length = float(rewards.sum(dtype=np.float64)), len(rewards)
        if all(each.behaviour for each in episode.pieces):
            return
        # An episode that went on under a new number has an earlier return.
        is_other = abs(total - (last.episode_return or 0.0)) > 1e-4 * (1 + np.abs(rewards).sum())
        if length != last.episode_length or is_other or self._is_behind:
            self._counts["skipped"] += 1
            return
        self._put_bytes += episode.num_bytes
        self._waiting.append((key, episode))
        self._writer.wake()

    @property
    def _is_behind(self) -> bool:
        return len(self._waiting) >= MAX_QUEUED or self._put_bytes - self._done_bytes >= self._max_bytes

    # -- the thread that writes ---------------------------------------------------------------------------------

    def _write(self) -> None:
        while self._waiting:
            key, episode = self._waiting.popleft()
            before_s = time.thread_time()
            try:
                info, segment = Demonstration.join(key, episode.number, episode.pieces)
                values = {**episode.settings} if episode.settings or not episode.version else None
                facts = {"settings": episode.version, "values": values, "skipped": self._counts["skipped"]}
                made = Demonstration(msgspec.structs.replace(info, **facts), segment)
                self._files.write(made)
                self._counts["recorded"] += 1
            except OSError as error:  # as of a full disk
                self._counts["failed"] += 1
                if self._problem != str(error):
                    self._problem = str(error)
                    _log.warning("an episode could not be recorded: %s", error)
            self._done_bytes += episode.num_bytes
            if not self._is_closed:
                time.sleep(IDLE_FACTOR * (time.thread_time() - before_s))


def _list_arrays(segment: Segment) -> list[np.ndarray]:
    return [segment.observations, *(getattr(segment, name) for name in PER_STEP), *segment.extras.values()]


def _copy(segment: Segment) -> Segment:
    """The arrays are parts of larger ones, of a message or of all agents."""
    copies: dict[str, Any] = {name: getattr(segment, name).copy() for name in ("observations", *PER_STEP)}
    return replace(segment, **copies, extras={name: each.copy() for name, each in segment.extras.items()})
