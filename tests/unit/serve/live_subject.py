"""Live versions whose models are made up: what they answer, how long they take and whether they fit is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.errors import WeightsError
from shoal.serve.messages.desired_state import NEWEST, NO_SHARES, ModelPlan, TrafficShares
from shoal.serve.model.column_drift import CountColumns
from shoal.serve.replica.fallback_predictor import Answered, FallbackPredictor
from shoal.serve.replica.live_versions import LiveVersionSelector
from shoal.serve.replica.model_statistics import ForwardTimes
from shoal.serve.replica.version_router import Answering
from shoal.serve.spec.model_options import GuardOptions
from shoal.weights import WeightSnapshot

FINE = "fine"
BROKEN = "broken"
UNFIT = "unfit"
POISON = -1.0


class FakeLoaded:
    """Answers with its version, unless it is broken or is asked something that no version can answer."""

    def __init__(self, version: int, kind: str, clock: Clock | None = None, seconds: float = 0.0) -> None:
        self.version = version
        self.kind = kind
        self._clock = clock
        self.seconds = seconds
        self.num_asked = 0

    def predict_batch(self, requests: Sequence[Any], count_columns: CountColumns | None = None) -> list[Any]:
        self.num_asked += 1
        if count_columns is not None:
            count_columns(self.version, {})
        if self._clock is not None:
            self._clock.now_s += self.seconds
        if self.kind == BROKEN or POISON in requests:
            raise RuntimeError(f"{self.version} on purpose")
        return [{"y": np.array([self.version])} for _ in requests]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Subject:
    """A LiveVersionSelector with models whose kinds are chosen by version."""

    def __init__(self, num_older: int = 0, **guard: Any) -> None:
        self.kinds: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        self.clock, self.forwards = Clock(), ForwardTimes()
        self.points: list[Answering] = []
        self.num_told = 0
        options = GuardOptions.parse({"min_requests": 10, **guard})
        load: Any = self._load
        self.live = LiveVersionSelector(options, load, self._point, self.forwards, num_older, self.clock)
        self.live.changed = self._told

    def _load(self, snapshot: WeightSnapshot) -> FakeLoaded:
        kind = self.kinds.get(snapshot.version, FINE)
        if kind == UNFIT:
            raise WeightsError("does not fit")
        return FakeLoaded(snapshot.version, kind, self.clock, self.seconds.get(snapshot.version, 0.001))

    def _point(self, answering: Answering) -> None:
        self.points.append(answering)

    @property
    def shares(self) -> TrafficShares | None:
        """What the candidate gets; None where there is none."""
        last = self.points[-1]
        return None if last.candidate is None else last.shares

    def _told(self) -> None:
        self.num_told += 1

    def publish(self, version: int, kind: str = FINE, seconds: float = 0.001) -> bool:
        self.kinds[version], self.seconds[version] = kind, seconds
        return self.live.take(weights(version))

    def predict(self, requests: list[float], for_candidate: bool = False) -> Answered:
        """As the batch of a call that was admitted for the candidate, or for nobody in particular."""
        last = self.points[-1]
        chosen = last.candidate if for_candidate and last.candidate is not None else last.stable
        assert chosen is not None
        if isinstance(chosen, FallbackPredictor):
            return chosen.predict(requests)  # type: ignore[arg-type]
        return Answered(chosen.predict_batch(requests), chosen.version, True)  # type: ignore[arg-type]

    def ask(self, num: int = 1, for_candidate: bool = False) -> int:
        """The version that answers a batch, whose time is kept as the batcher's would be."""
        started_s = self.clock()
        answered = self.predict([0.0] * num, for_candidate)
        if answered.is_alone:
            self.forwards.add(answered.version, num, self.clock() - started_s)
        assert {int(outputs["y"][0]) for outputs in answered.outputs} == {answered.version}
        return answered.version


def weights(version: int) -> WeightSnapshot:
    """A run that publishes one each second."""
    return WeightSnapshot(version, b"", "", float(version))


def plan(pinned: int = 0, newest: TrafficShares | None = None, **fields: Any) -> ModelPlan:
    """Of a model that follows a run: what is pinned, and what the newest gets beside it."""
    candidate = 0 if newest is None else NEWEST
    return ModelPlan("m", "", {}, pinned or NEWEST, candidate, newest or NO_SHARES, **fields)


def slower() -> tuple[Subject, FallbackPredictor, FakeLoaded]:
    """A version that takes three times as long as the one before, which has been asked: its trial, and that one."""
    subject = Subject(max_latency_ratio=2.0)
    subject.publish(1, seconds=0.001)
    for _ in range(10):
        subject.ask()
    subject.publish(2, seconds=0.003)
    now = subject.live._trial
    assert now is not None
    assert now.before is not None
    before: Any = now.before
    return subject, now, before
