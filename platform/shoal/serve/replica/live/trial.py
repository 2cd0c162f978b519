"""What is known of the version of a live model that is on trial, and who answers meanwhile: data of `live_versions`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shoal.serve.messages.desired_state import TrafficShares
from shoal.serve.model.predictor import LoadedModel
from shoal.weights import WeightSnapshot


class Answered(NamedTuple):
    """The outputs of each request of a batch, and the version that made them all.

    is_alone: no other version has computed the batch, so that its time says how long this one takes
    """

    outputs: list[dict[str, np.ndarray]]
    version: int
    is_alone: bool


class Answering(NamedTuple):
    """Who answers in a replica.

    stable: whom nobody needs to ask for
    other:  the version before it; or the candidate beside it, when `shares` are given
    """

    stable: LoadedModel
    other: LoadedModel | None = None
    shares: TrafficShares | None = None


@dataclass(frozen=True)
class Held:
    """A version that could answer at once, and its weights as they came."""

    loaded: LoadedModel
    snapshot: WeightSnapshot

    @property
    def version(self) -> int:
        return self.loaded.version


@dataclass
class Trial:
    """The version that answers, the one before it, and what has been counted since they changed.

    next_look:  the number of requests at which its speed is looked at again
    is_suspect: it looks slow; the next batches are computed by both
    """

    now: Held
    before: Held | None
    next_look: int
    requests: int = 0
    errors: int = 0
    is_suspect: bool = False
    num_compared: int = 0
    ratios: list[float] = field(default_factory=list)

    @property
    def is_proven(self) -> bool:
        """Whether it has answered something; with nothing before it, it was there from the start or is back."""
        return self.before is None or self.requests > self.errors
