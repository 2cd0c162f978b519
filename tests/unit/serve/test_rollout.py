"""The states of a rollout: which moves there are, what replicas are told, and what is decided from what they report."""

from dataclasses import replace

import pytest

from shoal.serve.controller.rollout import (
    FOLLOWING,
    AbandonRollout,
    Goal,
    Phase,
    Proceed,
    Rollout,
    WaitForReplicas,
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

STEADY = Rollout(Phase.STEADY, stable=1)


def staging(
    version: int = 2,
    goal: Goal = Goal.FLIP,
    base: Rollout = STEADY,
    generation: int = 0,
    shares: TrafficShares = NO_SHARES,
) -> Rollout:
    return stage_version(
        base, version, goal, kind="deploy", by="me", why="new", now_s=10.0, generation=generation, shares=shares
    )


def report(name: str, *staged: int, generation: int = 0, rejected: RejectedVersion | None = None) -> ReplicaReport:
    return ReplicaReport(
        name, generation=generation, models={"m": ModelReport(staged=staged, rejected=(rejected,) if rejected else ())}
    )


def test_a_move_that_the_phase_does_not_allow_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="from steady to flipping"):
        flip_to_candidate(STEADY, 1, 11.0)


def test_without_a_stable_version_what_is_abandoned_leaves_nothing() -> None:
    rollout = drop_candidate(staging(base=Rollout()), "bad", 11.0)
    assert (rollout.phase, rollout.stable, rollout.candidate, rollout.refused) == (Phase.VACANT, 0, 0, 2)
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.staged, plan.reason) == ((), "bad")


def test_a_version_goes_from_staged_to_stable() -> None:
    rollout = staging()
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.staged, plan.candidate, plan.attempt) == (1, (1, 2), 0, 1)
    rollout = flip_to_candidate(rollout, 7, 11.0)
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.staged, plan.candidate) == (2, (1, 2), 0)
    rollout = finish_rollout(rollout, 12.0)
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.staged, rollout.previous, rollout.since_s) == (2, (2,), 1, 12.0)


def test_a_candidate_is_open_with_its_shares_until_it_is_dropped() -> None:
    rollout = open_canary(staging(goal=Goal.CANARY, shares=TrafficShares(5.0, 20.0)), 11.0)
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.stable, plan.candidate, plan.shares) == (1, 2, TrafficShares(5.0, 20.0))
    rollout = drop_candidate(rollout, "slow", 12.0)
    assert (rollout.phase, rollout.stable, rollout.refused, rollout.reason) == (Phase.STEADY, 1, 2, "slow")
    plan = build_model_plan("m", "/r", {}, rollout)
    assert (plan.candidate, plan.shares, plan.staged) == (0, NO_SHARES, (1,))


def test_a_second_attempt_is_another() -> None:
    first = staging()
    again = staging(base=drop_candidate(first, "bad", 11.0))
    assert (again.attempt, again.reason, again.refused) == (first.attempt + 1, "", 0)


def test_it_goes_on_when_every_replica_has_staged_and_not_before() -> None:
    rollout = staging()
    assert decide_next_step("m", rollout, [], 0.0, 60.0) == WaitForReplicas()
    assert decide_next_step("m", rollout, [report("a", 1, 2), report("b", 1)], 0.0, 60.0) == WaitForReplicas(("b",))
    assert decide_next_step("m", rollout, [report("a", 1, 2), ReplicaReport("b")], 0.0, 60.0) == WaitForReplicas(("b",))
    assert decide_next_step("m", rollout, [report("a", 1, 2), report("b", 1, 2)], 0.0, 60.0) == Proceed()


def test_what_a_replica_had_before_it_heard_that_the_version_is_wanted_does_not_count() -> None:
    """It was a candidate until a moment ago, say, and this replica has yet to hear that it was dropped."""
    rollout = staging(generation=7)
    reports = [report("a", 1, 2, generation=7), report("b", 1, 2, generation=6)]
    assert decide_next_step("m", rollout, reports, 0.0, 60.0) == WaitForReplicas(("b",))
    assert decide_next_step("m", rollout, [reports[0], replace(reports[1], generation=8)], 0.0, 60.0) == Proceed()


def test_one_replica_that_cannot_is_enough_to_abandon() -> None:
    rollout = staging()
    failed = report("b", 1, rejected=RejectedVersion(2, "no file", rollout.attempt))
    decision = decide_next_step("m", rollout, [report("a", 1, 2), failed], 0.0, 60.0)
    assert decision == AbandonRollout("replica b cannot stage version 2: no file")
    earlier = report("b", 1, rejected=RejectedVersion(2, "no file", rollout.attempt - 1))
    assert decide_next_step("m", rollout, [report("a", 1, 2), earlier], 0.0, 60.0) == WaitForReplicas(("b",))


def test_one_that_takes_too_long_is_too() -> None:
    decision = decide_next_step("m", staging(), [report("a", 1, 2), report("b", 1)], 61.0, 60.0)
    assert decision == AbandonRollout("replica b had not staged version 2 after 60 s")


def test_a_flip_is_over_when_every_replica_has_heard_of_it_however_long_that_takes() -> None:
    rollout = flip_to_candidate(staging(), 7, 11.0)
    late = [report("a", 1, 2, generation=7), report("b", 1, 2, generation=6)]
    assert decide_next_step("m", rollout, late, 1000.0, 60.0) == WaitForReplicas(("b",))
    assert decide_next_step("m", rollout, [late[0], replace(late[1], generation=8)], 0.0, 60.0) == Proceed()


def test_a_model_that_follows_a_run_stays_with_a_version_beside_which_the_newest_gets_a_share() -> None:
    pinned = repoint(FOLLOWING, 5, None, 11.0)
    shared = repoint(replace(pinned, lost_replicas=3), 5, TrafficShares(10.0), 12.0)
    plans = [build_model_plan("m", "", {}, rollout) for rollout in (FOLLOWING, pinned, shared)]
    assert [(plan.stable, plan.pinned, plan.candidate) for plan in plans] == [
        (NEWEST, 0, 0), (5, 5, 0), (5, 5, NEWEST),
    ]  # fmt: skip
    assert [plan.staged for plan in plans] == [(), (), ()]  # each replica has versions of its own
    assert (shared.phase, shared.shares, shared.lost_replicas) == (Phase.CANARY, TrafficShares(10.0), 0)
    lost = replace(shared, lost_replicas=1)
    assert repoint(lost, 5, TrafficShares(20.0), 13.0).lost_replicas == 1
    alone = repoint(lost, 5, None, 13.0)
    assert (alone.phase, alone.candidate, alone.shares) == (Phase.STEADY, 0, NO_SHARES)


def test_to_follow_its_run_again_is_another_attempt_and_nothing_else_is() -> None:
    rollouts = [FOLLOWING]
    for stable, shares in ((5, None), (5, TrafficShares(10.0)), (4, None), (NEWEST, None)):
        rollouts.append(repoint(rollouts[-1], stable, shares, 11.0))
    assert [rollout.attempt for rollout in rollouts] == [0, 0, 0, 0, 1]
    with pytest.raises(AssertionError):
        repoint(FOLLOWING, NEWEST, TrafficShares(10.0), 12.0)  # beside which it would be the candidate
