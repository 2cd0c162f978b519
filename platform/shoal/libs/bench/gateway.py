"""Simulated actors: many sessions of a gateway in one thread.

Each sends segments of random numbers in the run's format, as fast as it has credit, or as a game of so many steps a
second would. It pulls every version of the weights, and computes nothing. Called by `shoal bench`, and by benchmarks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from shoal.extend.rl import ActorClient, ReceivedWeights
from shoal.libs.bench.endpoint import BUSY, BUSY_WARNING, measure
from shoal.libs.bench.sender import allow_connections
from shoal.wire import ExperienceSpec, Segment, TensorSpec, WeightsMessage

MAX_SOCKETS = 65_536
ROUND_S = 0.002  # between two rounds in which nothing was sent
LOG_DENSITY = 20.0  # above that of any action: who claims too little comes into quarantine


class _VersionsOnly(ReceivedWeights):
    """Pulls as an actor of another machine does, and decodes nothing."""

    def set_machine(self, is_gateways: bool) -> None:
        pass

    def take(self, message: WeightsMessage, frames: list[bytes]) -> int:
        self.latest = message.version, {}
        return message.version


class SimulatedActor(ActorClient):
    """One session. due_s: when its next segment is complete"""

    def __init__(self, number: int, context: zmq.Context[Any], address: str, token: str, server_key: str) -> None:
        super().__init__(address, token, f"bench-{number}", server_key=server_key, context=context)
        self._weights = _VersionsOnly(0)
        self.segment: Segment
        self.due_s = 0.0
        self.is_waiting = False

    def reset(self, due_s: float) -> None:
        """Count from now on."""
        self.acknowledged = dict.fromkeys(self.acknowledged, 0)
        self.drops = {}
        self.versions = set[int]()
        self.waits_s = list[float]()
        self.due_s = due_s

    def step(self, segment_s: float) -> bool:
        """Receive what has come, and send the segment that is due; False where none was sent."""
        newer = self.newer_weights(0)
        now_s = time.monotonic()
        if newer is None or now_s < self.due_s:
            return False
        self.versions.add(newer[0])
        if not self.has_credit:
            self.is_waiting = True
            return False
        self.waits_s.append((now_s - self.due_s) * self.is_waiting)
        self.is_waiting = False
        self.due_s = now_s + segment_s
        self.send(replace(self.segment, versions=np.full(self.segment.num_steps, newer[0])))
        return True


class SimulatedActors:
    """Connected from `connect` until `close`.

    steps_per_s: of each actor; 0: as its credit allows
    """

    def __init__(
        self, address: str, token: str, num_actors: int, steps_per_s: float = 0.0, server_key: str = ""
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.actors = [
            SimulatedActor(number, self._context, address, token, server_key) for number in range(num_actors)
        ]
        self._steps_per_s = steps_per_s

    def connect(self) -> None:
        """Raises ConnectionLost, Refused."""
        allow_connections()
        for actor in self.actors:
            actor.segment = make_segment(actor.connect())

    def close(self) -> None:
        for actor in self.actors:
            actor.close(drain_timeout_s=0.0)
        self._context.destroy(linger=200)

    def run(self, seconds: float) -> dict[str, Any]:
        """Play for so long, and count. Raises as `connect`."""
        actors = self.actors
        length = actors[0].segment.num_steps
        segment_s = length / self._steps_per_s if self._steps_per_s else 0.0
        used_s = time.thread_time()
        begin_s = time.monotonic()
        end_s = begin_s + seconds
        for number, actor in enumerate(actors):
            actor.reset(begin_s + segment_s * number / len(actors))
        while time.monotonic() < end_s:
            if not sum(actor.step(segment_s) for actor in actors):
                time.sleep(ROUND_S)
        cpu_share = (time.thread_time() - used_s) / seconds
        accepted = np.sort([actor.acknowledged["accepted"] for actor in actors])
        waits_s = np.concatenate([[*actor.waits_s, *[end_s - actor.due_s] * actor.is_waiting] for actor in actors])
        outcomes = sum((Counter(actor.drops) for actor in actors), Counter(accepted=int(accepted.sum())))
        return {
            "steps_per_s": float(accepted.sum()) * length / seconds,
            "segments": dict(outcomes),
            "versions": sorted(set[int]().union(*(actor.versions for actor in actors))),
            "slowest_tenth": float(accepted[: len(actors) // 10 or 1].mean() / max(1.0, np.median(accepted))),
            "wait_share": float(waits_s.sum()) / len(actors) / seconds,
            "times": [measure("waits for credit", waits_s)],
            "reconnects": sum(actor.reconnects for actor in actors),
            "cpu_share": cpu_share,
            "warnings": [BUSY_WARNING] if cpu_share > BUSY else [],
        }


def make_segment(spec: ExperienceSpec) -> Segment:
    """One of the greatest length, in the middle of an episode: no return of the run has it."""
    length, policy = spec.segment_length, spec.policy
    highs = policy.action_high or [size - 1 for size in policy.action_sizes]
    extras = {}
    for each in spec.extras:
        shape = (each.count_rows(length), *each.tensor.shape)
        extras[each.name] = np.full(shape, each.tensor.dtype == "bool", each.tensor.numpy_dtype())  # masks allow all
    return Segment(
        _draw(spec.observation, length + 1),
        _draw(spec.action, length, policy.action_low, highs),
        np.zeros(length, np.float32),
        np.full(length, LOG_DENSITY if "float" in spec.action.dtype else 0.0, np.float32),
        np.ones(length, np.int64),
        extras=extras,
    )


def _draw(tensor: TensorSpec, num_rows: int, lows: Sequence[float] = (), highs: Sequence[float] = ()) -> np.ndarray:
    """Numbers from 0 to 1, of integers to 255, as far as the bounds allow."""
    low = np.reshape(lows, tensor.shape) if lows else -np.inf if tensor.low is None else tensor.low
    high = np.reshape(highs, tensor.shape) if highs else np.inf if tensor.high is None else tensor.high
    top = 1 if "float" in tensor.dtype else 256
    drawn = np.random.default_rng(0).uniform(np.clip(0, low, high), np.clip(top, low, high), (num_rows, *tensor.shape))
    return drawn.astype(tensor.numpy_dtype())
