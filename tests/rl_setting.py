"""A small setting for tests of the reinforcement-learning room: a spec, segments that fit it, and weights."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.rl.experience.demonstrations import DemonstrationSite
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.experience.segment_log import SegmentLog
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.gateway.remote_episodes import Answers
from shoal.rl.gateway.remote_inference import RemoteInference
from shoal.rl.gateway.state import GatewaySetting, GatewayState
from shoal.rl.part_specs import DemonstrationsSpec, GatewaySpec
from shoal.store import Store
from shoal.weights import WeightSnapshot, WeightStore
from shoal.wire import ExperienceSpec, PolicySpec, Segment, TensorSpec

TOKEN = "a token of the tests"
POLICY = PolicySpec("mlp_categorical", "tanh", (("policy.0.weight", "policy.0.bias"),))
EXPERIENCE = ExperienceSpec(TensorSpec("float32", (4,), -10.0, 10.0), TensorSpec("int64", (), 0, 1), 16, POLICY)


def weights(version: int, size: int = 4) -> WeightSnapshot:
    """Weights that MlpPolicy can act with; their numbers tell the version."""
    arrays = {"policy.0.weight": np.full((2, size), version, np.float32), "policy.0.bias": np.zeros(2, np.float32)}
    return WeightSnapshot.of(version, arrays)


def segment(length: int = 8, version: int = 1, **changes: object) -> Segment:
    """A valid segment of `length` steps."""
    whole = Segment(
        np.linspace(-1, 1, 4 * (length + 1), dtype=np.float32).reshape(length + 1, 4),
        np.zeros(length, np.int64),
        np.ones(length, np.float32),
        np.full(length, np.log(0.5), np.float32),
        np.full(length, version, np.int64),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def random_batch(
    seed: int, lengths: list[int], terminated: list[bool] | None = None, size: int = 4, **arrays: Any
) -> ExperienceBatch:
    """Segments of these lengths with normal observations and rewards, and two actions; `arrays` in place of some."""
    random, steps = np.random.default_rng(seed), sum(lengths)
    drawn: dict[str, Any] = {
        "observations": random.normal(size=(steps + len(lengths), size)).astype(np.float32),
        "actions": random.integers(0, 2, steps),
        "rewards": random.normal(size=steps).astype(np.float32),
        "log_probabilities": np.log(random.uniform(0.05, 1.0, steps)).astype(np.float32),
        "versions": np.ones(steps, np.int64),
        "lengths": np.array(lengths, np.int64),
        "terminated": random.random(len(lengths)) < 0.5 if terminated is None else np.array(terminated),
    }
    return ExperienceBatch(1, **{**drawn, **arrays})


class RecordingClient:
    """An actor's connection without a gateway: it takes every segment."""

    actor_id = "actor-0"
    run_id = "run.policy"
    behaviour = ""
    finished = is_synchronous = False
    has_credit = True
    settings_version = 0

    def __init__(self, spec: ExperienceSpec = EXPERIENCE, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self.spec = spec
        self.arrays = dict(arrays or weights(1).tensors())
        self.offers: dict[str, Any] = {}
        self.segments: list[Segment] = []

    def wait_for_weights(self, *_: Any) -> tuple[int, dict[str, np.ndarray]]:
        return 1, self.arrays

    def newer_weights(self, than: int) -> Any:
        """None: there are no others."""

    def received_weights(self, than: int) -> Any:
        """None, too."""

    def wait_for_opponents(self) -> None:
        """They have come."""

    def send(self, segment: Segment, timeout_s: float | None = None) -> None:
        self.segments.append(segment)

    def close(self, drain_timeout_s: float) -> None:
        """Nothing waits."""


class RemoteRounds:
    """Remote inference without a gateway: its rounds are run here. segments: that it has stored"""

    def __init__(
        self, experience: ExperienceSpec, newest: WeightSnapshot | None = None, seed: int | None = None
    ) -> None:
        self.state = GatewayState(GatewaySetting(GatewaySpec(), experience, TOKEN), ExperienceQueue(64, Ledger()))
        self.state.weights = newest
        self.segments: list[Segment] = []
        self._woken = threading.Event()
        self.inference = RemoteInference(
            self.state, lambda key, progress, segment: self.segments.append(segment), self._woken.set, seed
        ).start()

    def settle(self) -> Answers:
        """What is answered until nothing but the queue is waited for."""
        found: Answers = []
        while True:
            self._woken.clear()
            found += self.inference.run_round()
            counts = self.inference._queue.counts()
            if counts.submitted == counts.answered + counts.failed:
                return found
            assert self._woken.wait(60.0)


class Parts:
    """A gateway and what is around it, without a learner.

    log:       where its segments are, with `durable: store`
    setting:   further fields of GatewaySetting; others are the spec's
    """

    def __init__(
        self,
        folder: Path | None = None,
        log: Store | None = None,
        experience: ExperienceSpec = EXPERIENCE,
        opponents: OpponentPool | None = None,
        setting: Mapping[str, Any] | None = None,
        run_id: str = "run-1",
        **spec: object,
    ) -> None:
        self.store = WeightStore()
        self.store.publish(weights(1))
        self.ledger = Ledger(folder / "ledger.sqlite" if folder else None)
        self.spec = GatewaySpec.parse({"heartbeat_s": 0.2, "timeout_s": 60.0, **spec})
        self.queue = ExperienceQueue(self.spec.queue_capacity or 96, self.ledger)
        commit = None if log is None else GroupCommit(SegmentLog(log, experience), self.queue)
        site = DemonstrationSite(DemonstrationsSpec(), experience, folder) if folder else None
        made = GatewaySetting(self.spec, experience, TOKEN, run_id, 475.0, demonstrations=site, **(setting or {}))
        self.gateway = Gateway(made, self.queue, self.store, opponents, commit)

    @property
    def address(self) -> str:
        return self.gateway.address

    def take(
        self, min_steps: int = 1, max_steps: int = 10_000, max_segments: int = 1_000, timeout_s: float = 60.0
    ) -> ExperienceBatch:
        """The next batch, as the learner takes it; there must be one in this time."""
        batch = self.queue.take("learner", BatchRequest(min_steps, max_steps, max_segments, timeout_s))
        assert batch is not None
        return batch


@contextmanager
def serving(folder: Path | None = None, log: Store | None = None, **fields: Any) -> Iterator[Parts]:
    """A gateway that serves; at the end its books must balance, with nothing queued. fields: of `Parts`"""
    parts = Parts(folder, log, **fields)
    parts.gateway.start()
    try:
        yield parts
    finally:
        parts.store.close()  # wakes the gateway's thread that waits for weights
        parts.gateway.close()
        totals = parts.ledger.get_totals()
        parts.ledger.close()
        assert totals.is_balanced, totals
