"""What the controller wants of a live model, as far as its versions are held: who is fetched, taken, kept, pinned."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import WeightsError
from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.messages.replica_report import MAX_REJECTED
from shoal.serve.replica.live_versions import OLDER_EVERY_S
from shoal.weights import WeightSnapshot
from unit.serve.live_subject import BROKEN, UNFIT, Subject, plan, weights


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
    assert [each.version for each in subject.live.report().rejected] == [2]


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


def test_weights_that_are_held_can_be_had_for_others() -> None:
    subject = Subject()
    subject.publish(1)
    assert subject.live.snapshot(1) == weights(1)
    assert subject.live.snapshot(2) is None


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
