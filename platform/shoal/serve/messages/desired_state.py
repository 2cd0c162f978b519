"""What the replicas of an endpoint are told: the desired state, as one document.

Made by the controller, followed by every replica, in every part of which it is known. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NEWEST = -1  # in place of a version: the newest of the model's run, whichever that is in a replica by now


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


NO_SHARES = TrafficShares()


@dataclass(frozen=True)
class ModelPlan:
    """What a replica is to do about one model. `NEWEST` in place of a version is the newest of the run that it follows.

    registry:  folder of the registry that has its versions; "" for a model that follows the weights of a run
    options:   a ModelOptions, as a plain mapping
    stable:    the version that answers; 0 for none yet
    candidate: the version that gets `shares`; 0 for none
    staged:    of a registered model: the versions to have loaded, and no others
    attempt:   differs when versions that were rejected before may be tried again
    reason:    why there is no version at all

    Of a model that follows a run, whose replicas take versions by themselves:

    rejected:    versions not to answer with
    is_frozen:   take nothing new for now: it is being decided what to go back to
    retained:    the version that replicas go back to that have no other; 0 for none
    is_retained: whether the controller has its weights; else a replica that has them gives them to the controller
    """

    name: str
    registry: str
    options: dict[str, Any]
    stable: int = 0
    candidate: int = 0
    shares: TrafficShares = NO_SHARES
    staged: tuple[int, ...] = ()
    attempt: int = 0
    reason: str = ""
    rejected: tuple[int, ...] = ()
    is_frozen: bool = False
    retained: int = 0
    is_retained: bool = False

    @property
    def pinned(self) -> int:
        """The version that answers, if that is one by its number; 0 for none, or for the newest of a run."""
        return max(self.stable, 0)


@dataclass(frozen=True)
class EndpointPlan:
    """The desired state of an endpoint; `generation` grows with every change."""

    generation: int = 0
    models: tuple[ModelPlan, ...] = field(default=())
