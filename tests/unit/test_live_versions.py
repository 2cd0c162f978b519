"""Which version of a live model answers, whatever comes and fails: no request fails that one of them could answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.errors import InferenceError, WeightsError
from shoal.serve.forwards import ForwardTimes
from shoal.serve.guard import NUM_COMPARED
from shoal.serve.live_versions import OLDER_EVERY_S, LiveVersions
from shoal.serve.options import GuardOptions
from shoal.serve.report import MAX_LEFT
from shoal.serve.rollout import LivePlan
from shoal.weights import WeightSnapshot

FINE, BROKEN, UNFIT = "fine", "broken", "unfit"
POISON = -1.0


class FakeLoaded:
    """Answers with its version, unless it is broken or is asked something that no version can answer."""

    def __init__(self, version: int, kind: str, clock: Clock | None = None, seconds: float = 0.0) -> None:
        self.version, self.kind, self._clock, self.seconds = version, kind, clock, seconds
        self.num_asked = 0

    def predict_batch(self, requests: Sequence[Any]) -> list[Any]:
        self.num_asked += 1
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
    """LiveVersions with models whose kinds are chosen by version."""

    def __init__(self, num_older: int = 0, **guard: Any) -> None:
        self.kinds: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        self.clock, self.forwards = Clock(), ForwardTimes()
        self.flips: list[tuple[int, int]] = []
        self.num_told = 0
        options = GuardOptions.parse({"min_requests": 10, **guard})
        load: Any = self._load
        self.live = LiveVersions(options, load, self._flip, self.forwards, num_older, self.clock)
        self.live.changed = self._told

    def _load(self, snapshot: WeightSnapshot) -> FakeLoaded:
        kind = self.kinds.get(snapshot.version, FINE)
        if kind == UNFIT:
            raise WeightsError("does not fit")
        return FakeLoaded(snapshot.version, kind, self.clock, self.seconds.get(snapshot.version, 0.001))

    def _flip(self, now: Any, before: Any) -> None:
        self.flips.append((now.version, before.version if before else 0))

    def _told(self) -> None:
        self.num_told += 1

    def publish(self, version: int, kind: str = FINE, seconds: float = 0.001) -> bool:
        self.kinds[version], self.seconds[version] = kind, seconds
        return self.live.take(weights(version))

    def ask(self, num: int = 1) -> int:
        """The version that answers a batch, whose time is kept as the batcher's would be."""
        started_s = self.clock()
        answered = self.live.predict([0.0] * num)  # type: ignore[list-item]
        if answered.is_alone:
            self.forwards.add(answered.version, num, self.clock() - started_s)
        assert {int(outputs["y"][0]) for outputs in answered.outputs} == {answered.version}
        return answered.version


def weights(version: int) -> WeightSnapshot:
    """A run that publishes one each second."""
    return WeightSnapshot(version, b"", "", float(version))


class Life(RuleBasedStateMachine):
    """A run that publishes, clients that ask, a controller that wants things."""

    @initialize()
    def begin(self) -> None:
        self.subject = Subject()
        self.live = self.subject.live
        self.newest = 0
        self.plan = LivePlan()
        self.kept = 0
        self.banned: set[int] = set()  # versions that must not answer any more while another could
        self._publish(FINE)

    def _publish(self, kind: str) -> None:
        self.newest += 1
        before, left = self.live.version, set(self.plan.left)
        try:
            is_taken = self.subject.publish(self.newest, kind)
        except WeightsError:
            assert kind == UNFIT
            is_taken = False
        held_still = self.plan.frozen or (self.plan.pinned and before == self.plan.pinned)
        assert is_taken == (kind != UNFIT and not held_still and self.newest not in left)
        assert self.live.version == (self.newest if is_taken else before)

    @rule(kind=st.sampled_from([FINE, FINE, BROKEN, UNFIT]))
    def publish(self, kind: str) -> None:
        self._publish(kind)

    @rule(num=st.integers(1, 8))
    def ask(self, num: int) -> None:
        report = self.live.report()
        can = [version for version in report.held if self.subject.kinds[version] == FINE]
        before = self.live.version
        try:
            version = self.subject.ask(num)
        except RuntimeError:
            assert not can
            return
        assert version in can
        if version != before:  # the newer one failed: with this guard it has to go
            assert self.live.version == version
            self.banned.add(before)

    @rule()
    def ask_what_nobody_can_answer(self) -> None:
        before = self.live.version
        with pytest.raises(RuntimeError, match=f"{before} on purpose"):
            self.live.predict([0.0, POISON])  # type: ignore[list-item]
        assert self.live.version == before

    @rule(back=st.integers(0, 3))
    def others_have_left_it(self, back: int) -> None:
        left = (*self.plan.left, max(1, self.newest - back))[-MAX_LEFT:]
        *_, before = self.live.report().held
        could = [version for version in self.live.report().held if version not in left]
        self._hear(LivePlan(self.plan.era, self.plan.frozen, self.plan.pinned, left, self.plan.kept, self.plan.is_kept))
        if not self.plan.pinned:
            assert self.live.version == max(could, default=before)

    @precondition(lambda self: not self.plan.pinned)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self.live.report().held))
        self._hear(LivePlan(self.plan.era, False, version, self.plan.left, version, True))
        assert self.live.version == version
        assert self.live.is_pinned

    @precondition(lambda self: not self.plan.pinned)
    @rule()
    def pin_what_another_holds(self) -> None:
        version = self.newest + 1
        self.newest = version
        self.subject.kinds[version] = FINE
        self._hear(LivePlan(self.plan.era, False, version, self.plan.left, version, True))
        assert self.live.missing() == version
        self.live.put(weights(version))
        assert self.live.is_pinned
        assert self.live.missing() == 0

    @precondition(lambda self: not self.plan.pinned)
    @rule(frozen=st.booleans())
    def freeze(self, frozen: bool) -> None:
        plan = self.plan
        self._hear(LivePlan(plan.era, frozen, plan.pinned, plan.left, plan.kept, plan.is_kept))

    @rule()
    def follow_again(self) -> None:
        self._hear(LivePlan(self.plan.era + 1))
        self.banned.clear()
        assert self.live.report().left == ()

    def _hear(self, plan: LivePlan) -> None:
        self.plan = plan
        self.live.apply(plan)
        if plan.pinned:  # whoever pins a version wants it whatever became of it
            self.banned.discard(plan.pinned)

    @invariant()
    def what_is_left_is_not_held(self) -> None:
        report = self.live.report()
        assert 1 <= len(report.held) <= 2
        assert len(report.left) <= MAX_LEFT
        assert report.era == self.plan.era
        assert self.live.version in report.held
        assert not self.banned & set(report.held)
        to_go_back_to = set(report.held) - {self.live.version}
        assert not to_go_back_to & {*self.plan.left, *(left.version for left in report.left)}

    @invariant()
    def who_answers_was_told(self) -> None:
        now, before = self.subject.flips[-1]
        assert now == self.live.version
        assert {now, before} - {0} == set(self.live.report().held)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_what_was_never_asked_is_not_gone_back_to() -> None:
    subject = Subject()
    subject.publish(1)
    subject.ask()
    for version in (2, 3, 4):
        subject.publish(version, BROKEN)  # nobody asks 2 and 3
    assert subject.live.report().held == (1, 4)
    assert subject.ask() == 1


def test_the_first_version_is_gone_back_to_though_nobody_asked_it() -> None:
    subject = Subject()
    subject.publish(1)
    subject.publish(2, BROKEN)
    assert subject.ask() == 1


def test_errors_that_say_whose_fault_they_are_are_not_put_to_another_version() -> None:
    subject = Subject()
    for version in (1, 2):
        subject.publish(version)
    now = subject.live._trial
    assert now is not None
    for status in (422, 503):

        def refuse(requests: object, status: int = status) -> list[Any]:
            raise InferenceError(status, "no")

        now.now.loaded.predict_batch = refuse  # type: ignore[method-assign]
        with pytest.raises(InferenceError, match="no"):
            subject.ask()
    assert subject.live.report().left == ()


def test_a_forward_that_ends_when_its_version_is_gone_judges_nobody_else() -> None:
    subject = Subject()
    for version in (1, 2):
        subject.publish(version)
    loaded = subject.live._trial.now.loaded  # type: ignore[union-attr]

    def late(requests: Sequence[Any]) -> list[Any]:
        subject.publish(3)
        raise RuntimeError("late")

    loaded.predict_batch = late  # type: ignore[method-assign]
    assert subject.ask() == 1
    assert (subject.live.version, subject.live.report().left) == (3, ())


def test_one_that_looks_slow_is_compared_on_the_same_batches_before_it_is_left() -> None:
    subject = Subject(max_latency_ratio=2.0)
    subject.publish(1, seconds=0.001)
    for _ in range(10):
        subject.ask()
    subject.publish(2, seconds=0.003)
    versions = [subject.ask() for _ in range(10 + NUM_COMPARED)]
    assert versions == [2] * (10 + NUM_COMPARED)
    assert subject.ask() == 1
    [left] = subject.live.report().left
    assert (left.version, left.instead, left.has_answered) == (2, 1, True)
    assert "it computes the same batches 3 times as long" in left.reason
    assert subject.num_told == 2  # the first version, and this
    assert subject.forwards.of(2)[0][0] == 10  # a forward beside another says nothing of one alone


def test_one_that_was_slow_because_the_machine_was_is_not_left() -> None:
    subject = Subject(max_latency_ratio=2.0)
    subject.publish(1, seconds=0.001)
    for _ in range(10):
        subject.ask()
    subject.publish(2, seconds=0.003)
    now = subject.live._trial
    assert now is not None
    assert now.before is not None
    for _ in range(10):
        subject.ask()
    assert now.is_suspect
    now.before.loaded.seconds = 0.003  # type: ignore[attr-defined]  # everything takes as long now
    for _ in range(100):
        assert subject.ask() == 2
    assert now.before.loaded.num_asked <= 10 + 4 * NUM_COMPARED  # type: ignore[attr-defined]  # looked at now and then
    assert subject.live.report().left == ()


def test_what_the_version_before_cannot_compute_does_not_make_a_newer_one_slow() -> None:
    subject = Subject(max_latency_ratio=2.0)
    subject.publish(1, seconds=0.001)
    for _ in range(10):
        subject.ask()
    subject.publish(2, seconds=0.003)
    now = subject.live._trial
    assert now is not None
    assert now.before is not None
    now.before.loaded.kind = BROKEN  # type: ignore[attr-defined]
    for _ in range(100):
        assert subject.ask() == 2


def test_only_what_is_missing_is_fetched_and_taken() -> None:
    subject = Subject()
    live = subject.live
    live.apply(LivePlan(left=(2,), kept=1, is_kept=True))
    assert live.missing() == 0  # the run may have something better
    assert not subject.publish(2)
    assert live.missing() == 1
    live.put(weights(1))
    assert (live.version, live.missing()) == (1, 0)
    subject.publish(3)
    live.put(weights(1))  # late
    assert (live.version, live.report().held) == (3, (1, 3))
    live.apply(LivePlan(pinned=5, kept=5))  # nobody has given it yet: what answers stays
    assert live.missing() == 0
    assert not subject.publish(4)
    assert subject.publish(5)  # the run has it


def test_what_is_first_is_taken_though_another_is_pinned_that_is_not_there_yet() -> None:
    subject = Subject()
    subject.live.apply(LivePlan(pinned=5, kept=5))
    assert subject.publish(9)


def test_what_is_pinned_is_taken_though_it_was_forgotten_while_it_was_loaded() -> None:
    subject = Subject(num_older=1)
    for version in (1, 40, 80):
        subject.publish(version)
    snapshot = subject.live.held(40)
    assert snapshot is not None
    load = subject.live._load

    def slow_load(snapshot: WeightSnapshot) -> Any:
        subject.live._older.clear()  # as when newer ones came meanwhile
        return load(snapshot)

    subject.live.apply(LivePlan(pinned=40, kept=40))
    subject.live._load = slow_load
    subject.live.put(snapshot)
    assert (subject.live.version, subject.live.is_pinned) == (40, True)


def test_who_has_nothing_says_so_when_the_first_was_left_while_it_was_loaded() -> None:
    subject = Subject()
    load = subject.live._load

    def slow_load(snapshot: WeightSnapshot) -> Any:
        subject.live.apply(LivePlan(left=(10,), kept=9, is_kept=True))
        return load(snapshot)

    subject.live._load = slow_load
    assert not subject.publish(10)
    assert (subject.live.missing(), subject.num_told) == (9, 1)


def test_whatever_goes_wrong_when_a_version_is_loaded_is_told_as_what_is_wrong_with_its_weights() -> None:
    subject = Subject()
    subject.publish(1)

    def out_of_memory(snapshot: WeightSnapshot) -> Any:
        raise MemoryError("nothing left")

    subject.live._load = out_of_memory
    with pytest.raises(WeightsError, match="MemoryError: nothing left"):
        subject.publish(2)
    with pytest.raises(WeightsError, match="MemoryError: nothing left"):
        subject.live.put(weights(3))
    assert [each.version for each in subject.live.report().left] == [2]


@pytest.mark.parametrize("plan", [LivePlan(frozen=True), LivePlan(pinned=1, kept=1), LivePlan(left=(2,))])
def test_what_is_being_loaded_when_it_is_no_longer_wanted_is_not_taken(plan: LivePlan) -> None:
    subject = Subject()
    subject.publish(1)
    load = subject.live._load

    def slow_load(snapshot: WeightSnapshot) -> Any:
        subject.live.apply(plan)
        return load(snapshot)

    subject.live._load = slow_load
    assert not subject.publish(2)
    assert subject.live.version == 1


def test_only_the_newest_of_what_was_left_is_remembered() -> None:
    subject = Subject()
    subject.publish(1)
    for version in range(2, 30):
        with pytest.raises(WeightsError):
            subject.publish(version, UNFIT)
    left = subject.live.report().left
    assert [each.version for each in left] == list(range(30 - MAX_LEFT, 30))
    assert {(each.instead, each.has_answered, each.reason) for each in left} == {(1, False, "does not fit")}


def test_weights_that_are_held_can_be_had_for_others() -> None:
    subject = Subject()
    subject.publish(1)
    assert subject.live.held(1) == weights(1)
    assert subject.live.held(2) is None


def test_older_versions_are_held_half_a_minute_apart_also_when_nobody_asks() -> None:
    subject = Subject(num_older=2)
    for version in range(1, 101):
        subject.publish(version)
    assert OLDER_EVERY_S == 30.0
    assert subject.live.report().held == (1, 61, 91, 100)
    subject.live.apply(LivePlan(left=(91,)))
    assert subject.live.report().held == (1, 61, 100)
    subject.live.apply(LivePlan(pinned=61, kept=61))
    assert (subject.live.version, subject.live.missing()) == (100, 61)
    snapshot = subject.live.held(61)
    assert snapshot is not None
    subject.live.put(snapshot)
    assert (subject.live.version, subject.live.is_pinned, subject.live.missing()) == (61, True, 0)


def test_a_version_that_was_left_is_not_held_as_an_older_one() -> None:
    subject = Subject(num_older=2)
    subject.publish(1)
    subject.publish(2, BROKEN)
    assert subject.ask() == 1
    subject.publish(40)
    assert subject.live.report().held == (1, 40)
    subject.live.apply(LivePlan(left=(1, 40)))
    subject.publish(80)
    assert subject.live.report().held == (80,)
