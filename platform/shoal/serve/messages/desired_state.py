"""The desired state of an endpoint, as one document for its replicas.

Made by the controller and followed by every replica. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NEWEST = -1  # in place of a version: the newest of the model's run that a replica has


@dataclass(frozen=True)
class TrafficShares:
    """A candidate's shares, in percent: of the requests that name no version, and of the stable version's.

    shadow_percent: the part of the stable version's requests that it computes too, for comparison
    """

    percent: float = 0.0
    shadow_percent: float = 0.0

    @property
    def is_shadow(self) -> bool:
        """Whether no client gets its answers, not even one that asks for the candidate."""
        return self.shadow_percent > 0.0 and self.percent == 0.0


NO_SHARES = TrafficShares()


@dataclass(frozen=True)
class ModelPlan:
    """The desired state of one model on a replica. `NEWEST` in place of a version is the newest of the run that it
    follows.

    registry:  folder of the registry with its versions; "" for a model that follows the weights of a run
    options:   a ModelOptions, as a plain mapping
    stable:    the version that answers; 0 for none yet
    candidate: the version that gets `shares`; 0 for none
    staged:    of a registered model: exactly the versions to load
    next_version, next_options: a version to load alongside under other options, for a later flip to both; 0 for none
    attempt:   changes when rejected versions may be tried again
    reason:    the reason why there is no version

    Of a model that follows a run, whose replicas take versions by themselves:

    rejected:    versions that may not answer
    is_frozen:   take no new version while the controller selects one to return to
    retained:    the version to which replicas without another return; 0 for none
    is_retained: whether the controller has its weights; else a replica that has them sends them

    Of an endpoint with a memory for each replica's models:

    replicas:   by name, those that have the model; None: all
    size_bytes: of each version in memory: of its payload, or as measured
    signature:  a Signature, as a plain mapping, for replicas without the model; None: not on demand
    """

    name: str
    registry: str
    options: dict[str, Any]
    stable: int = 0
    candidate: int = 0
    shares: TrafficShares = NO_SHARES
    staged: tuple[int, ...] = ()
    next_version: int = 0
    next_options: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    reason: str = ""
    rejected: tuple[int, ...] = ()
    is_frozen: bool = False
    retained: int = 0
    is_retained: bool = False
    replicas: tuple[str, ...] | None = None
    size_bytes: int = 0
    signature: dict[str, Any] | None = None

    @property
    def pinned(self) -> int:
        """The number of the version that answers; 0 for none, or for the newest of a run."""
        return max(self.stable, 0)

    def is_for(self, replica: str) -> bool:
        return self.replicas is None or replica in self.replicas

    def is_same_model(self, later: ModelPlan | None) -> bool:
        """Whether a later plan is of the same model; a registered one may have other options."""
        return (
            later is not None
            and later.registry == self.registry
            and (bool(later.registry) or later.options == self.options)
        )


@dataclass(frozen=True)
class EndpointPlan:
    """The desired state of an endpoint; `generation` grows with every change.

    certificate_expires_at: the end of the ingress's certificate, seconds since the epoch; 0 without one
    addresses:  host:port at which replicas reach each other, by name
    peer_token: what they show each other; "" where every replica has every model
    """

    generation: int = 0
    models: tuple[ModelPlan, ...] = ()
    certificate_expires_at: float = 0.0
    addresses: Mapping[str, str] = field(default_factory=dict)
    peer_token: str = field(default="", repr=False)
