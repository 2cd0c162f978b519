"""The state machine that takes a model from one version to another: its phases, its moves and the next step.

    VACANT ─stage─► STAGING ─flip─► FLIPPING ─settle─► STEADY ─stage─► STAGING ─open─► CANARY ─flip─► FLIPPING ─► ...
                       └──abandon──► STEADY (or VACANT)                                  └──drop──► STEADY

A version is *staged* on every replica before it answers a single request, and it answers everywhere or nowhere. Pure
values and functions: the controller alone acts on them. An illegal move raises; the caller refuses a request for one.

A model that follows a run is STEADY or CANARY: `NEWEST` is its stable version while it follows, its candidate while
another is pinned. `repoint` is its only move. Nothing is staged first, since each replica loads its own versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shoal.serve.controller.canary_guard import MAX_LOST_REPLICAS
from shoal.serve.messages.desired_state import NEWEST, NO_SHARES, ModelPlan, TrafficShares
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport

MAX_HISTORY = 100  # versions


class Phase(StrEnum):
    """The phase of a model's rollout."""

    VACANT = "vacant"  # nothing answers yet
    STEADY = "steady"  # one version answers
    STAGING = "staging"  # another is being loaded alongside and answers no request
    CANARY = "canary"  # every replica has both: the candidate answers its share
    FLIPPING = "flipping"  # the plan names the candidate as the stable version


class Goal(StrEnum):
    """The goal of a version once every replica has staged it."""

    FLIP = "flip"
    CANARY = "canary"


_NEXT = {  # the phases that may follow each
    Phase.VACANT: [Phase.STAGING],
    Phase.STEADY: [Phase.STAGING],
    Phase.STAGING: [Phase.CANARY, Phase.FLIPPING, Phase.STEADY],
    Phase.CANARY: [Phase.FLIPPING, Phase.STEADY],
    Phase.FLIPPING: [Phase.STEADY],
}


@dataclass(frozen=True)
class Rollout:
    """One model's rollout. Changed by the functions below only.

    stable:         the version that answers; 0 while VACANT
    candidate:      the version alongside it while STAGING, CANARY or FLIPPING; else 0
    shares:         the candidate's shares while CANARY
    previous:       the version that a rollback returns to: the newest of `history` that is not withdrawn; 0: none
    history:        the versions that were stable before, oldest first, without those after a rollback
    withdrawn:      versions that were rolled back or rejected, and have not become stable since
    attempt:        counts the stagings, so that a failed version may be tried again
    generation:     of the plan in which the replicas stage the candidate, or flip
    kind, by, why:  the requested change, its author and the reason given
    refused, reason: the last candidate that did not become stable, and why
    changes_options: the candidate is loaded and answers under other options than the stable version, which it may be
    lost_replicas:  replicas that died since the candidate's staging began; of a canary, since it was opened
    """

    phase: Phase = Phase.VACANT
    stable: int = 0
    candidate: int = 0
    goal: Goal = Goal.FLIP
    shares: TrafficShares = NO_SHARES
    previous: int = 0
    history: tuple[int, ...] = ()
    withdrawn: tuple[int, ...] = ()
    attempt: int = 0
    generation: int = 0
    kind: str = ""
    by: str = ""
    why: str = ""
    refused: int = 0
    reason: str = ""
    lost_replicas: int = 0
    changes_options: bool = False

    @property
    def is_open(self) -> bool:
        """Whether another rollout may begin."""
        return self.phase in (Phase.VACANT, Phase.STEADY)

    @property
    def is_following(self) -> bool:
        """Whether the newest version of a run answers, and none is pinned."""
        return self.stable == NEWEST


FOLLOWING = Rollout(Phase.STEADY, stable=NEWEST)  # the initial rollout of a model that follows a run


def stage_version(rollout: Rollout, version: int, goal: Goal, *, generation: int = 0, **change: Any) -> Rollout:
    """Begin: every replica loads `version` alongside the stable one, from plan `generation` on.

    change: `kind`, `by` and `why`; `shares` and `changes_options` where it has them
    """
    return _enter(
        rollout,
        Phase.STAGING,
        candidate=version,
        goal=goal,
        attempt=rollout.attempt + 1,
        generation=generation,
        refused=0,
        reason="",
        lost_replicas=0,
        **{"shares": NO_SHARES, "changes_options": False, **change},
    )


def open_canary(rollout: Rollout) -> Rollout:
    """Give the candidate, staged everywhere, its share."""
    return _enter(rollout, Phase.CANARY, lost_replicas=0)


def flip_to_candidate(rollout: Rollout, generation: int) -> Rollout:
    """Make the candidate, staged everywhere, the stable version from plan `generation` on."""
    return _enter(rollout, Phase.FLIPPING, generation=generation, shares=NO_SHARES)


def finish_rollout(rollout: Rollout) -> Rollout:
    """End the rollout once every replica has flipped."""
    stable, before = rollout.candidate, rollout.stable
    moved = _enter(replace(rollout, stable=stable, candidate=0), Phase.STEADY)
    if stable == before:  # its options alone have changed
        return moved
    history = list(rollout.history)
    withdrawn = [version for version in rollout.withdrawn if version != stable]
    if rollout.kind != "rollback":
        history += [before] * (before > 0)
    else:
        withdrawn.append(before)
        history = history[: history.index(stable)] if stable in history else history
    return _remember(moved, history, withdrawn)


def drop_candidate(rollout: Rollout, reason: str) -> Rollout:
    """Drop a candidate that a replica cannot stage, that is worse than the stable version, or is no longer wanted."""
    refused = 0 if rollout.candidate == rollout.stable else rollout.candidate  # then its options alone are
    cleared = _enter(rollout, Phase.STEADY, candidate=0, shares=NO_SHARES, refused=refused, reason=reason)
    if not refused or rollout.shares.is_shadow:
        return cleared
    return _remember(cleared, list(rollout.history), [*rollout.withdrawn, refused])


def repoint(rollout: Rollout, stable: int, shares: TrafficShares | None) -> Rollout:
    """Pin a model that follows a run to a version, with `shares` for the run's newest; or let it follow again as a new
    attempt, in which rejected versions may be tried again."""
    phase = Phase.STEADY if shares is None else Phase.CANARY
    moved = replace(
        rollout,
        phase=phase,
        stable=stable,
        candidate=0 if shares is None else NEWEST,
        shares=shares or NO_SHARES,
        lost_replicas=rollout.lost_replicas if phase is rollout.phase else 0,
    )
    assert moved.stable != moved.candidate, rollout
    return replace(moved, attempt=rollout.attempt + 1) if moved.is_following else moved


def _enter(rollout: Rollout, phase: Phase, **change: Any) -> Rollout:
    assert phase in _NEXT[rollout.phase], f"a rollout goes from {rollout.phase} to {phase}"
    is_vacant = phase is Phase.STEADY and not rollout.stable
    return replace(rollout, phase=Phase.VACANT if is_vacant else phase, **change)


def _remember(rollout: Rollout, history: list[int], withdrawn: list[int]) -> Rollout:
    previous = [version for version in history if version not in (rollout.stable, *withdrawn)]
    return replace(
        rollout,
        history=tuple(history[-MAX_HISTORY:]),
        withdrawn=tuple(dict.fromkeys(withdrawn[-MAX_HISTORY:])),
        previous=previous[-1] if previous else 0,
    )


# -- the replicas' plan -----------------------------------------------------------------------------------------------


def build_model_plan(
    name: str, registry: str, options: dict[str, Any], rollout: Rollout, before: dict[str, Any] | None = None
) -> ModelPlan:
    """Build the plan that brings a replica to the rollout's state. `before`: the options that still answer while others
    are staged."""
    if rollout.phase is Phase.STAGING and rollout.changes_options and before is not None:
        stable, attempt = rollout.stable, rollout.attempt
        return ModelPlan(
            name, registry, before, stable, staged=(stable,), next_version=rollout.candidate, next_options=options,
            attempt=attempt,
        )  # fmt: skip
    staged = tuple(version for version in (rollout.stable, rollout.candidate) if version) if registry else ()
    plan = ModelPlan(name, registry, options, rollout.stable, staged=staged, attempt=rollout.attempt)
    if rollout.phase is Phase.FLIPPING:
        staged = (rollout.candidate,) if rollout.changes_options else staged
        return replace(plan, stable=rollout.candidate, staged=staged)
    if rollout.phase is Phase.CANARY:
        return replace(plan, candidate=rollout.candidate, shares=rollout.shares)
    if rollout.phase is Phase.VACANT:
        return replace(plan, reason=rollout.reason)
    return plan


# -- the next step ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proceed:
    """Every replica has followed: flip, open or settle."""


@dataclass(frozen=True)
class AbandonRollout:
    """The rollout cannot succeed, and the reason."""

    reason: str


def decide_next_step(
    model: str, rollout: Rollout, replicas: Sequence[ReplicaReport], waited_s: float, stage_timeout_s: float
) -> Proceed | AbandonRollout | None:
    """The next step of a rollout that is STAGING or FLIPPING, from the living replicas' last reports; None while it
    waits for replicas.

    waited_s: the time since the phase began
    """
    if rollout.phase is Phase.STAGING and rollout.lost_replicas > MAX_LOST_REPLICAS:
        return AbandonRollout(f"{rollout.lost_replicas} replicas died while version {rollout.candidate} was loaded")
    if not replicas:
        return None
    if rollout.phase is Phase.FLIPPING:
        return None if any(report.generation < rollout.generation for report in replicas) else Proceed()
    assert rollout.phase is Phase.STAGING, rollout.phase
    if reason := find_staging_error(model, rollout, replicas):
        return AbandonRollout(reason)

    def has_staged(report: ModelReport) -> bool:  # under the options that the candidate is to have
        staged = (report.next_staged,) if rollout.changes_options else report.staged
        return rollout.candidate in staged

    late = [
        report.replica
        for report in replicas
        if report.generation < rollout.generation  # it may be about to drop its copy of this version
        or model not in report.models
        or not has_staged(report.models[model])
    ]
    if late and waited_s > stage_timeout_s:
        return AbandonRollout(
            f"replica {late[0]} had not staged version {rollout.candidate} after {stage_timeout_s:g} s"
        )
    return None if late else Proceed()


def find_staging_error(model: str, rollout: Rollout, replicas: Sequence[ReplicaReport]) -> str:
    """The reason why a replica cannot load the candidate; "" when all have it or may still load it."""
    for report in replicas:
        for rejected in report.models[model].rejected if model in report.models else ():
            if (rejected.version, rejected.attempt) == (rollout.candidate, rollout.attempt):
                return f"replica {report.replica} cannot stage version {rollout.candidate}: {rejected.reason}"
    return ""
