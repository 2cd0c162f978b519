"""Which version of a live model answers, whatever comes and fails: no request fails that one of them could answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.errors import InferenceError, WeightsError
from shoal.serve.controller.canary_guard import NUM_COMPARED
from shoal.serve.messages.desired_state import NEWEST, ModelPlan, TrafficShares
from shoal.serve.messages.replica_report import MAX_REJECTED
from shoal.serve.replica.live_versions import OLDER_EVERY_S
from shoal.weights import WeightSnapshot
from unit.serve.live_subject import BROKEN, FINE, POISON, UNFIT, Subject, plan, slower, weights


class Life(RuleBasedStateMachine):
    """A run that publishes, clients that ask, a controller that wants things."""

    @initialize()
    def begin(self) -> None:
        self.subject = Subject()
        self.live = self.subject.live
        self.newest = 0
        self.plan = plan()
        self.kept = 0
        self.banned: set[int] = set()  # versions that must not answer any more while another could
        self._publish(FINE)

    def _publish(self, kind: str) -> None:
        self.newest += 1
        before, rejected = self.live.version, set(self.plan.rejected)
        try:
            is_taken = self.subject.publish(self.newest, kind)
        except WeightsError:
            assert kind == UNFIT
            is_taken = False
        is_beside = self.plan.candidate == NEWEST
        held_still = self.plan.is_frozen or (self.plan.pinned and not is_beside)
        assert is_taken == (kind != UNFIT and not held_still and self.newest not in rejected)
        assert self.live.version == (self.newest if is_taken and not is_beside else before)
        if is_taken and is_beside:
            assert (self.live.report().candidate, self.subject.shares) == (self.newest, self.plan.shares)

    @rule(kind=st.sampled_from([FINE, FINE, BROKEN, UNFIT]))
    def publish(self, kind: str) -> None:
        self._publish(kind)

    @rule(num=st.integers(1, 8))
    def ask(self, num: int) -> None:
        held = (
            (self.plan.pinned,) if self.plan.candidate else self.live.report().staged
        )  # what is pinned answers for itself
        self._ask(num, held, self.live.version)

    @rule(num=st.integers(1, 8))
    def ask_for_the_candidate(self, num: int) -> None:
        report = self.live.report()
        self._ask(num, report.staged, report.candidate or self.live.version, for_candidate=True)

    def _ask(self, num: int, held: tuple[int, ...], before: int, for_candidate: bool = False) -> None:
        can = [version for version in held if self.subject.kinds[version] == FINE]
        try:
            version = self.subject.ask(num, for_candidate)
        except RuntimeError:
            assert not can
            return
        assert version in can
        if version != before:  # the newer one failed: with this guard it has to go
            assert (self.live.version, self.live.report().candidate) == (version, 0)
            self.banned.add(before)

    @rule()
    def ask_what_nobody_can_answer(self) -> None:
        before, report = self.live.version, self.live.report()
        for version, for_candidate in ((before, False), (report.candidate or before, True)):
            with pytest.raises(RuntimeError, match=f"{version} on purpose"):
                self.subject.predict([0.0, POISON], for_candidate)
        assert (self.live.version, self.live.report()) == (before, report)

    @rule(back=st.integers(0, 3))
    def others_have_left_it(self, back: int) -> None:
        rejected = (*self.plan.rejected, max(1, self.newest - back))[-MAX_REJECTED:]
        *_, before = self.live.report().staged
        could = [version for version in self.live.report().staged if version not in rejected]
        self._hear(replace(self.plan, rejected=rejected))
        if not self.plan.pinned:
            assert self.live.version == max(could, default=before)

    @precondition(lambda self: not self.plan.pinned)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self.live.report().staged))
        self._pin(version)
        assert self.live.version == version
        assert self.live.version == self.plan.pinned

    @precondition(lambda self: not self.plan.pinned)
    @rule()
    def pin_what_another_holds(self) -> None:
        version = self.newest + 1
        self.newest = version
        self.subject.kinds[version] = FINE
        self._pin(version)
        assert self.live.missing() == version
        self.live.put(weights(version))
        assert self.live.version == self.plan.pinned
        assert self.live.missing() == 0

    def _pin(self, version: int) -> None:
        attempt, rejected = self.plan.attempt, self.plan.rejected
        self._hear(plan(version, attempt=attempt, rejected=rejected, retained=version, is_retained=True))

    @precondition(lambda self: not self.plan.pinned)
    @rule(frozen=st.booleans())
    def freeze(self, frozen: bool) -> None:
        self._hear(replace(self.plan, is_frozen=frozen))

    @precondition(lambda self: self.plan.pinned)
    @rule(shares=st.sampled_from([None, TrafficShares(10.0), TrafficShares(0.0, 50.0)]))
    def share(self, shares: TrafficShares | None) -> None:
        before = self.live.report()
        newest = plan(self.plan.pinned, shares)
        self._hear(replace(self.plan, candidate=newest.candidate, shares=newest.shares))
        assert self.live.version == self.plan.pinned
        assert self.live.report().candidate == (before.candidate if shares else 0)
        assert self.subject.shares == (shares if before.candidate else None)

    @rule()
    def follow_again(self) -> None:
        self._hear(plan(attempt=self.plan.attempt + 1))
        self.banned.clear()
        assert self.live.report().rejected == ()

    def _hear(self, plan: ModelPlan) -> None:
        self.plan = plan
        self.live.apply(plan)
        if plan.pinned:  # whoever pins a version wants it whatever became of it
            self.banned.discard(plan.pinned)

    @invariant()
    def what_is_left_is_not_held(self) -> None:
        report = self.live.report()
        assert 1 <= len(report.staged) <= 2
        assert len(report.rejected) <= MAX_REJECTED
        assert {each.attempt for each in report.rejected} <= {self.plan.attempt}
        assert self.live.version in report.staged
        assert not self.banned & set(report.staged)
        to_go_back_to = set(report.staged) - {self.live.version}
        assert not to_go_back_to & {*self.plan.rejected, *(rejected.version for rejected in report.rejected)}

    @invariant()
    def who_answers_was_told(self) -> None:
        told, report = self.subject.points[-1], self.live.report()
        assert told.stable is not None
        assert told.stable.version == report.version == self.live.version
        assert (told.candidate.version if told.candidate is not None else 0) == report.candidate
        assert {each.version for each in told.loaded} == set(report.staged)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_a_load_that_fails_for_a_moment_rejects_nothing(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejection is for all replicas, also those that wake later and find no other version."""
    monkeypatch.setattr("shoal.serve.replica.live_versions.RETRY_AFTER_S", (0.0, 0.0))
    subject, failures = Subject(), iter(range(num_failures))
    load: Any = subject.live._load

    def load_or_fail(snapshot: Any) -> Any:
        if next(failures, None) is not None:
            raise RuntimeError("can't start new thread")
        return load(snapshot)

    subject.live._load = load_or_fail
    if num_failures < 3:
        assert subject.publish(1)
        assert subject.live.report().rejected == ()
        return
    with pytest.raises(WeightsError, match="can't start new thread"):
        subject.publish(1)
    assert [each.version for each in subject.live.report().rejected] == [1]


def test_what_was_never_asked_is_not_gone_back_to() -> None:
    subject = Subject()
    subject.publish(1)
    subject.ask()
    for version in (2, 3, 4):
        subject.publish(version, BROKEN)  # nobody asks 2 and 3
    assert subject.live.report().staged == (1, 4)
    assert subject.ask() == 1


def test_what_a_version_says_that_no_file_could_hold_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject()
    subject.publish(1)
    monkeypatch.setattr("shoal.serve.replica.live_versions.RETRY_AFTER_S", (0.0,))
    monkeypatch.setattr(subject.live, "_load", lambda snapshot: (_ for _ in ()).throw(ValueError("\udce9" * 10_000)))
    with pytest.raises(WeightsError):
        subject.publish(2)
    [left] = subject.live.report().rejected
    assert left.reason.startswith("ValueError: \\udce9")
    assert len(left.reason.encode()) < 20_000


def test_the_first_version_is_gone_back_to_though_nobody_asked_it() -> None:
    subject = Subject()
    subject.publish(1)
    subject.publish(2, BROKEN)
    assert subject.ask() == 1


def test_errors_that_say_whose_fault_they_are_are_not_put_to_another_version() -> None:
    subject = Subject()
    for version in (1, 2):
        subject.publish(version)
    now, counted = subject.live._trial, list[int]()
    assert now is not None
    now.predict([{}], lambda version, found: counted.append(version))
    assert counted == [2]
    for status in (422, 503):

        def refuse(requests: object, _: object, status: int = status) -> list[Any]:
            raise InferenceError(status, "no")

        now.now.predict_batch = refuse  # type: ignore[method-assign]
        with pytest.raises(InferenceError, match="no"):
            subject.ask()
    assert subject.live.report().rejected == ()


def test_a_forward_that_ends_when_its_version_is_gone_judges_nobody_else() -> None:
    subject = Subject()
    for version in (1, 2):
        subject.publish(version)
    loaded = subject.live._trial.now  # type: ignore[union-attr]

    def late(requests: Sequence[Any], _: object) -> list[Any]:
        subject.publish(3)
        raise RuntimeError("late")

    loaded.predict_batch = late  # type: ignore[method-assign]
    assert subject.ask() == 1
    assert (subject.live.version, subject.live.report().rejected) == (3, ())


def test_one_that_looks_slow_is_compared_on_the_same_batches_before_it_is_left() -> None:
    subject, _, _ = slower()
    versions = [subject.ask() for _ in range(10 + NUM_COMPARED)]
    assert versions == [2] * (10 + NUM_COMPARED)
    assert subject.ask() == 1
    [left] = subject.live.report().rejected
    assert (left.version, left.instead, left.has_answered) == (2, 1, True)
    assert "it computes the same batches 3 times as long" in left.reason
    assert subject.num_told == 2  # the first version, and this
    assert subject.forwards.get_medians(2)[0][0] == 10  # a forward beside another says nothing of one alone


def test_one_that_was_slow_because_the_machine_was_is_not_left() -> None:
    subject, now, before = slower()
    for _ in range(10):
        subject.ask()
    assert now.is_suspect
    before.seconds = 0.003  # everything takes as long now
    for _ in range(100):
        assert subject.ask() == 2
    assert before.num_asked <= 10 + 4 * NUM_COMPARED  # looked at now and then
    assert subject.live.report().rejected == ()


def test_what_the_version_before_cannot_compute_does_not_make_a_newer_one_slow() -> None:
    subject, _, before = slower()
    before.kind = BROKEN
    for _ in range(100):
        assert subject.ask() == 2


# -- what the controller wants, as far as its versions are held: who is fetched, taken, retained, pinned


def test_only_what_is_missing_is_fetched_and_taken() -> None:
    subject = Subject()
    live = subject.live
    live.apply(plan(rejected=(2,), retained=1, is_retained=True))
    assert live.missing() == 0  # the run may have something better
    assert not subject.publish(2)
    assert live.missing() == 1
    live.put(weights(1))
    assert (live.version, live.missing()) == (1, 0)
    subject.publish(3)
    live.put(weights(1))  # late
    assert (live.version, live.report().staged) == (3, (1, 3))
    live.apply(plan(pinned=5, retained=5))  # nobody has given it yet: what answers stays
    assert live.missing() == 0
    assert not subject.publish(4)
    assert subject.publish(5)  # the run has it


def test_what_is_first_is_taken_though_another_is_pinned_that_is_not_there_yet() -> None:
    subject = Subject()
    subject.live.apply(plan(pinned=5, retained=5))
    assert subject.publish(9)


def test_what_is_pinned_is_taken_though_it_was_forgotten_while_it_was_loaded() -> None:
    subject = Subject(num_older=1)
    for version in (1, 40, 80):
        subject.publish(version)
    snapshot = subject.live.snapshot(40)
    assert snapshot is not None
    load = subject.live._load

    def slow_load(snapshot: WeightSnapshot) -> Any:
        subject.live._older.clear()  # as when newer ones came meanwhile
        return load(snapshot)

    subject.live.apply(plan(pinned=40, retained=40))
    subject.live._load = slow_load
    subject.live.put(snapshot)
    assert subject.live.version == 40


def test_who_has_nothing_says_so_when_the_first_was_left_while_it_was_loaded() -> None:
    subject = Subject()
    load = subject.live._load

    def slow_load(snapshot: WeightSnapshot) -> Any:
        subject.live.apply(plan(rejected=(10,), retained=9, is_retained=True))
        return load(snapshot)

    subject.live._load = slow_load
    assert not subject.publish(10)
    assert (subject.live.missing(), subject.num_told) == (9, 1)


@pytest.mark.parametrize("wanted", [plan(is_frozen=True), plan(pinned=1, retained=1), plan(rejected=(2,))])
def test_what_is_being_loaded_when_it_is_no_longer_wanted_is_not_taken(wanted: ModelPlan) -> None:
    subject = Subject()
    subject.publish(1)
    load = subject.live._load

    def slow_load(snapshot: WeightSnapshot) -> Any:
        subject.live.apply(wanted)
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
    left = subject.live.report().rejected
    assert [each.version for each in left] == list(range(30 - MAX_REJECTED, 30))
    assert {(each.instead, each.has_answered, each.reason) for each in left} == {(1, False, "does not fit")}


def test_older_versions_are_held_half_a_minute_apart_also_when_nobody_asks() -> None:
    subject = Subject(num_older=2)
    for version in range(1, 101):
        subject.publish(version)
    assert OLDER_EVERY_S == 30.0
    assert subject.live.report().staged == (1, 61, 91, 100)
    subject.live.apply(plan(rejected=(91,)))
    assert subject.live.report().staged == (1, 61, 100)
    subject.live.apply(plan(pinned=61, retained=61))
    assert (subject.live.version, subject.live.missing()) == (100, 61)
    snapshot = subject.live.snapshot(61)
    assert snapshot is not None
    subject.live.put(snapshot)
    assert (subject.live.version, subject.live.missing()) == (61, 0)


def test_a_version_that_was_left_is_not_held_as_an_older_one() -> None:
    subject = Subject(num_older=2)
    subject.publish(1)
    subject.publish(2, BROKEN)
    assert subject.ask() == 1
    subject.publish(40)
    assert subject.live.report().staged == (1, 40)
    subject.live.apply(plan(rejected=(1, 40)))
    subject.publish(80)
    assert subject.live.report().staged == (80,)
