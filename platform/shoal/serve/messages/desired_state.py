"""What the replicas of an endpoint are told: the desired state, as one document.

Made by the controller, followed by every replica, in every part of which it is known. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrafficShares:
    """What a candidate gets, in percent: of the requests that ask for nothing else, and of the stable version's.

    shadow_percent: of these, those that it computes too, for comparison
    """

    percent: float = 0.0
    shadow_percent: float = 0.0

    @property
    def is_shadow(self) -> bool:
        """Whether nobody gets its answers, not even who asks for the candidate."""
        return self.shadow_percent > 0.0 and self.percent == 0.0


@dataclass(frozen=True)
class LivePlan:
    """What a replica is to do about the weights of a run.

    era:     counts how often it was told to follow the run again, whatever was left before
    frozen:  take nothing new for now: it is being decided what to go back to
    pinned:  the version to answer with; 0: the newest of the run
    left:    versions not to answer with
    kept:    the version that replicas go back to who have no other; 0 for none
    is_kept: whether the controller has its weights; else who holds it gives them to the controller
    newest:  what the newest of the run gets beside `pinned`; None: nothing, it is not even loaded
    """

    era: int = 0
    frozen: bool = False
    pinned: int = 0
    left: tuple[int, ...] = ()
    kept: int = 0
    is_kept: bool = False
    newest: TrafficShares | None = None


DEFAULT_LIVE_PLAN = LivePlan()  # also what a registered model has


@dataclass(frozen=True)
class ModelPlan:
    """What a replica is to do about one model.

    registry:  folder of the registry that has its versions; "" for a model that follows the weights of a run
    options:   a ModelOptions, as a plain mapping
    stable:    the version that answers; 0 for none yet
    candidate: the version that answers `percent` of the calls and computes `shadow_percent` of the others; 0 for none
    staged:    the versions to have loaded, and no others
    attempt:   differs when a version that failed before is to be tried again
    reason:    why there is no version at all
    live:      of a model that follows the weights of a run
    """

    name: str
    registry: str
    options: dict[str, Any]
    stable: int = 0
    candidate: int = 0
    percent: float = 0.0
    shadow_percent: float = 0.0
    staged: tuple[int, ...] = ()
    attempt: int = 0
    reason: str = ""
    live: LivePlan = DEFAULT_LIVE_PLAN


@dataclass(frozen=True)
class EndpointPlan:
    """The desired state of an endpoint; `generation` grows with every change."""

    generation: int = 0
    models: tuple[ModelPlan, ...] = field(default=())
