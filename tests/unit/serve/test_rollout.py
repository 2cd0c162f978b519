"""The states of a rollout: which moves there are, what replicas are told, and what is decided from what they report."""

import asyncio
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.serve.controller.rollout import (
    FOLLOWING,
    AbandonRollout,
    Goal,
    Phase,
    Proceed,
    Rollout,
    build_model_plan,
    decide_next_step,
    drop_candidate,
    finish_rollout,
    flip_to_candidate,
    open_canary,
    repoint,
    stage_version,
)
from shoal.serve.messages.desired_state import NEWEST, NO_SHARES, TrafficShares
from shoal.serve.messages.replica_report import ModelReport, RejectedVersion, ReplicaReport
from unit.serve.controller_setting import LEASE_S, VERSIONS, Cluster, FakeReplica

STEADY = Rollout(Phase.STEADY, stable=1)


def staging(
    version: int = 2,
    goal: Goal = Goal.FLIP,
    base: Rollout = STEADY,
    generation: int = 0,
    shares: TrafficShares = NO_SHARES,
) -> Rollout:
    return stage_version(base, version, goal, kind="deploy", by="me", why="new", generation=generation, shares=shares)


def report(name: str, *staged: int, generation: int = 0, rejected: RejectedVersion | None = None) -> ReplicaReport:
    return ReplicaReport(
        name, generation=generation, models={"m": ModelReport(staged=staged, rejected=(rejected,) if rejected else ())}
    )


def test_a_move_that_the_phase_does_not_allow_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="from steady to flipping"):
        flip_to_candidate(STEADY, 1)


def test_without_a_stable_version_what_is_abandoned_leaves_nothing() -> None:
    rollout = drop_candidate(staging(base=Rollout()), "bad")
    assert (rollout.phase, rollout.stable, rollout.candidate, rollout.refused) == (Phase.VACANT, 0, 0, 2)
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.staged, plan.reason) == ((), "bad")


def test_a_version_goes_from_staged_to_stable() -> None:
    rollout = staging()
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.staged, plan.candidate, plan.attempt) == (1, (1, 2), 0, 1)
    rollout = flip_to_candidate(rollout, 7)
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.staged, plan.candidate) == (2, (1, 2), 0)
    rollout = finish_rollout(rollout)
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.staged, rollout.previous) == (2, (2,), 1)


def test_a_candidate_is_open_with_its_shares_until_it_is_dropped() -> None:
    rollout = open_canary(staging(goal=Goal.CANARY, shares=TrafficShares(5.0, 20.0)))
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.candidate, plan.shares) == (1, 2, TrafficShares(5.0, 20.0))
    rollout = drop_candidate(rollout, "slow")
    assert (rollout.phase, rollout.stable, rollout.refused, rollout.reason) == (Phase.STEADY, 1, 2, "slow")
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.candidate, plan.shares, plan.staged) == (0, NO_SHARES, (1,))


def test_a_second_attempt_is_another() -> None:
    first = staging()
    again = staging(base=drop_candidate(first, "bad"))
    assert (again.attempt, again.reason, again.refused) == (first.attempt + 1, "", 0)


def test_it_goes_on_when_every_replica_has_staged_and_not_before() -> None:
    rollout = staging()
    assert decide_next_step("m", rollout, [], 0.0, 60.0) is None
    assert decide_next_step("m", rollout, [report("a", 1, 2), report("b", 1)], 0.0, 60.0) is None
    assert decide_next_step("m", rollout, [report("a", 1, 2), ReplicaReport("b")], 0.0, 60.0) is None
    assert decide_next_step("m", rollout, [report("a", 1, 2), report("b", 1, 2)], 0.0, 60.0) == Proceed()


def test_what_a_replica_had_before_it_heard_that_the_version_is_wanted_does_not_count() -> None:
    """It was a candidate until a moment ago, say, and this replica has yet to hear that it was dropped."""
    rollout = staging(generation=7)
    reports = [report("a", 1, 2, generation=7), report("b", 1, 2, generation=6)]
    assert decide_next_step("m", rollout, reports, 0.0, 60.0) is None
    assert decide_next_step("m", rollout, [reports[0], replace(reports[1], generation=8)], 0.0, 60.0) == Proceed()


def test_one_replica_that_cannot_is_enough_to_abandon() -> None:
    rollout = staging()
    failed = report("b", 1, rejected=RejectedVersion(2, "no file", rollout.attempt))
    decision = decide_next_step("m", rollout, [report("a", 1, 2), failed], 0.0, 60.0)
    assert decision == AbandonRollout("replica b cannot stage version 2: no file")
    earlier = report("b", 1, rejected=RejectedVersion(2, "no file", rollout.attempt - 1))
    assert decide_next_step("m", rollout, [report("a", 1, 2), earlier], 0.0, 60.0) is None


def test_one_that_takes_too_long_is_too() -> None:
    decision = decide_next_step("m", staging(), [report("a", 1, 2), report("b", 1)], 61.0, 60.0)
    assert decision == AbandonRollout("replica b had not staged version 2 after 60 s")


def test_a_flip_is_over_when_every_replica_has_heard_of_it_however_long_that_takes() -> None:
    rollout = flip_to_candidate(staging(), 7)
    late = [report("a", 1, 2, generation=7), report("b", 1, 2, generation=6)]
    assert decide_next_step("m", rollout, late, 1000.0, 60.0) is None
    assert decide_next_step("m", rollout, [late[0], replace(late[1], generation=8)], 0.0, 60.0) == Proceed()


def test_a_model_that_follows_a_run_stays_with_a_version_beside_which_the_newest_gets_a_share() -> None:
    pinned = repoint(FOLLOWING, 5, None)
    shared = repoint(replace(pinned, lost_replicas=3), 5, TrafficShares(10.0))
    plans = [build_model_plan("m", "", {}, rollout) for rollout in (FOLLOWING, pinned, shared)]
    assert [(plan.stable, plan.pinned, plan.candidate) for plan in plans] == [
        (NEWEST, 0, 0), (5, 5, 0), (5, 5, NEWEST),
    ]  # fmt: skip
    assert [plan.staged for plan in plans] == [(), (), ()]  # each replica has versions of its own
    assert (shared.phase, shared.shares, shared.lost_replicas) == (Phase.CANARY, TrafficShares(10.0), 0)
    lost = replace(shared, lost_replicas=1)
    assert repoint(lost, 5, TrafficShares(20.0)).lost_replicas == 1
    alone = repoint(lost, 5, None)
    assert (alone.phase, alone.candidate, alone.shares) == (Phase.STEADY, 0, NO_SHARES)


def test_to_follow_its_run_again_is_another_attempt_and_nothing_else_is() -> None:
    rollouts = [FOLLOWING]
    for stable, shares in ((5, None), (5, TrafficShares(10.0)), (4, None), (NEWEST, None)):
        rollouts.append(repoint(rollouts[-1], stable, shares))
    assert [rollout.attempt for rollout in rollouts] == [0, 0, 0, 0, 1]
    with pytest.raises(AssertionError):
        repoint(FOLLOWING, NEWEST, TrafficShares(10.0))  # beside which it would be the candidate


# -- a controller and replicas that do as they like: they are slow, fail, die, and come back


class RolloutMachine(RuleBasedStateMachine):
    """See the module's docstring. `_flipped` is what the clients were last promised."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self._folder = tempfile.TemporaryDirectory()
        self.cluster = Cluster(Path(self._folder.name))
        self._stable = 0
        self._events: list[Any] = []

    def teardown(self) -> None:
        self.cluster.close()
        self._folder.cleanup()
        logging.disable(logging.NOTSET)

    @initialize(num=st.integers(1, 3))
    def deployed(self, num: int) -> None:
        for _ in range(num):
            self.cluster.add()
        self.cluster.settle()
        assert self.cluster.rollout.stable == 1

    def one(self, index: int) -> FakeReplica:
        replicas = list(self.cluster.replicas.values())
        return replicas[index % len(replicas)]

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def polls(self, index: int) -> None:
        self.cluster.poll(self.one(index))

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def stages(self, index: int) -> None:
        self.one(index).stage_one()

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def reports(self, index: int) -> None:
        self.cluster.tell(self.one(index))
        self.cluster.spin()

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def dies(self, index: int) -> None:
        del self.cluster.replicas[self.one(index).name]

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def is_stopped(self, index: int) -> None:
        name = self.one(index).name
        del self.cluster.replicas[name]
        self.cluster.controller.leave(name)

    @rule()
    @precondition(lambda self: len(self.cluster.replicas) < 4)
    def another_comes(self) -> None:
        self.cluster.add()

    @rule(index=st.integers(0, 5), version=st.sampled_from(VERSIONS[1:]))
    @precondition(lambda self: self.cluster.replicas)
    def loses_a_file(self, index: int, version: int) -> None:
        self.one(index).bad.add(version)

    @rule()
    def everybody_is_mended(self) -> None:
        for replica in self.cluster.replicas.values():
            replica.bad.clear()
        self.cluster.catalogue.away = False

    @rule(seconds=st.sampled_from([0.1, 2.0, LEASE_S + 1.0]), heard=st.booleans())
    def time_passes(self, seconds: float, heard: bool) -> None:
        self.cluster.now_s += seconds
        for replica in self.cluster.replicas.values():  # whoever lives is heard of within the lease
            if heard or seconds > LEASE_S:
                self.cluster.tell(replica)
        self.cluster.controller.tick()
        self.cluster.spin()

    @rule()
    def the_controller_is_started_again(self) -> None:
        for task in self.cluster.asked:
            task.cancel()
        self.cluster.loop.run_until_complete(asyncio.sleep(0))
        self.cluster.asked.clear()
        before = self.cluster.rollout
        self.cluster.start_controller()
        after = self.cluster.rollout
        assert (after.stable, after.candidate) == (before.stable, before.candidate) or after.by == "registry"

    @rule(version=st.sampled_from(VERSIONS), action=st.sampled_from(["deploy", "promote"]))
    def another_version_is_asked_for(self, version: int, action: str) -> None:
        self.cluster.ask(action, version=version)

    @rule(version=st.sampled_from(VERSIONS), percent=st.sampled_from([0, 10, 100]), shadow=st.booleans())
    def a_candidate_is_asked_for(self, version: int, percent: int, shadow: bool) -> None:
        self.cluster.ask("shadow" if shadow else "canary", version=version, percent=percent)

    @rule()
    def the_candidate_is_promoted(self) -> None:
        self.cluster.ask("promote")

    @rule()
    def it_is_rolled_back(self) -> None:
        self.cluster.ask("rollback")

    @rule(version=st.sampled_from(VERSIONS))
    def the_alias_is_moved(self, version: int) -> None:
        if not self.cluster.catalogue.away:
            self.cluster.catalogue.promote("m", version, "champion")

    @rule()
    def the_registry_goes_away(self) -> None:
        self.cluster.catalogue.away = True

    @rule()
    def everybody_does_what_there_is_to_do(self) -> None:
        self.cluster.settle()
        rollout = self.cluster.rollout
        if self.cluster.replicas and not any(replica.bad for replica in self.cluster.replicas.values()):
            self.cluster.now_s += LEASE_S + 1.0  # who died is no longer waited for
            self.cluster.settle()
            assert self.cluster.rollout.phase in (Phase.STEADY, Phase.CANARY), rollout

    @invariant()
    def a_version_answers_on_all_replicas_or_on_none(self) -> None:
        """Before a replica is told that a version answers, every replica that may be asked has it loaded."""
        for told in self.cluster.controller.plan.models:
            for replica in self.cluster.replicas.values():
                if told.stable and self.cluster.is_waited_for(replica):
                    assert told.stable in replica.staged, (told, replica)

    @invariant()
    def nobody_gets_a_version_that_was_not_announced(self) -> None:
        rollout = self.cluster.rollout
        announced = {rollout.stable, rollout.candidate, rollout.refused}
        for replica in self.cluster.replicas.values():
            heard = replica.plan.generation == self.cluster.controller.plan.generation
            if not replica.is_ready:
                assert not replica.answering
            elif heard and rollout.phase in (Phase.STEADY, Phase.STAGING):
                assert replica.answering == {rollout.stable}
            elif self.cluster.is_waited_for(replica) and rollout.refused == 0:
                # Two rollbacks at once drop the candidate and flip: who has heard of neither answers as it was told.
                told = {version for each in replica.plan.models for version in (each.stable, each.candidate)}
                assert replica.answering <= announced | told, (rollout, replica)

    @invariant()
    def after_the_flip_there_is_one_version(self) -> None:
        """Settled means settled: everybody who was waited for answers with the stable version alone.

        A rollout that was given up, which leaves its reason, is waited for by nobody.
        """
        rollout = self.cluster.rollout
        if rollout.phase is Phase.STEADY and not rollout.reason:
            for replica in self.cluster.replicas.values():
                if self.cluster.is_waited_for(replica):
                    assert replica.answering == {rollout.stable}, (rollout, replica)

    @invariant()
    def every_change_is_told_once(self) -> None:
        events = self.cluster.controller.state.events
        assert [event.number for event in events] == list(range(len(events)))
        assert events[: len(self._events)] == self._events
        new = events[len(self._events) :]
        self._events = list(events)
        rollout = self.cluster.rollout
        stable = rollout.candidate if rollout.phase is Phase.FLIPPING else rollout.stable
        if stable != self._stable:
            assert any(event.version == stable and event.kind != "abandon" for event in new), new
            self._stable = stable


TestRollouts = RolloutMachine.TestCase
TestRollouts.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
