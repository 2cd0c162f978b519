"""A small setting for tests of the reinforcement-learning room: a spec, segments that fit it, and weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.experience.segment_log import SegmentLog
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.spec import GatewaySpec
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


class Parts:
    """A gateway and what is around it, without a learner. log: where its segments are, with `durable: store`"""

    def __init__(self, folder: Path | None = None, log: Store | None = None, **spec: object) -> None:
        self.store = WeightStore()
        self.store.publish(weights(1))
        self.ledger = Ledger(folder / "ledger.sqlite" if folder else None)
        self.spec = GatewaySpec.parse({"heartbeat_s": 0.2, "timeout_s": 60.0, **spec})
        self.queue = ExperienceQueue(self.spec.queue_capacity, self.ledger)
        commit = None if log is None else GroupCommit(SegmentLog(log, EXPERIENCE), self.queue)
        setting = GatewaySetting(self.spec, EXPERIENCE, TOKEN, "run-1", 475.0)
        self.gateway = Gateway(setting, self.queue, self.store, group_commit=commit)

    @property
    def address(self) -> str:
        return self.gateway.address


@contextmanager
def serving(folder: Path | None = None, log: Store | None = None, **spec: object) -> Iterator[Parts]:
    """A gateway that serves; at the end its books must balance, with nothing queued."""
    parts = Parts(folder, log, **spec)
    parts.gateway.start()
    try:
        yield parts
    finally:
        parts.store.close()  # wakes the gateway's thread that waits for weights
        parts.gateway.close()
        totals = parts.ledger.get_totals()
        parts.ledger.close()
        assert totals.is_balanced, totals
