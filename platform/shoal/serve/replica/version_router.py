"""The loaded versions of one model on one replica, and the choice of the one that answers a call.

Read and written on the event loop; a live model's follower replaces the stable version from a thread of its own. A call
gets a `Track` when it is admitted, and its batch reads the track's version once. So a batch is never a mixture, and a
flip is one assignment, which takes effect with the next batch. Loads nothing itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from shoal.batching.batcher import Batcher, PendingBatch
from shoal.errors import InferenceError
from shoal.serve.messages.desired_state import NO_SHARES, TrafficShares
from shoal.serve.messages.infer_call import InferCall, Outputs
from shoal.serve.messages.model_errors import unknown_version
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.replica.fallback_predictor import FallbackPredictor

GOLDEN = 0.6180339887498949  # of a full turn: spreads any number of draws evenly


def get_version(loaded: LoadedModel | FallbackPredictor | None) -> int:
    """Its number; 0 for no version."""
    return 0 if loaded is None else loaded.version


class Track:
    """The answering version, shared by calls that may share a batch. Compared by identity."""

    __slots__ = ("loaded",)

    def __init__(self, loaded: LoadedModel | FallbackPredictor | None = None) -> None:
        self.loaded = loaded

    @property
    def model(self) -> LoadedModel:
        """The version itself, without its fallback; of a track that answers."""
        loaded = self.loaded
        assert loaded is not None
        return loaded.now if isinstance(loaded, FallbackPredictor) else loaded


class BatchGroup(NamedTuple):
    """What the calls of one batch have in common: the track, and the `bucket` of their shapes."""

    track: Track
    bucket: Hashable


CallBatch = PendingBatch[BatchGroup, InferCall, Outputs]
ModelBatcher = Batcher[BatchGroup, InferCall, Outputs]


class Answering(NamedTuple):
    """The versions that answer on a replica.

    stable: answers by default; None: unchanged
    candidate: gets `shares`; None: no candidate
    loaded: answer requests for their number
    """

    stable: LoadedModel | FallbackPredictor | None
    candidate: LoadedModel | FallbackPredictor | None = None
    shares: TrafficShares = NO_SHARES
    loaded: Sequence[LoadedModel] = ()


class WeightedDraw:
    """Draws true for a share of the calls, evenly spread."""

    def __init__(self) -> None:
        self._drawn = 0.0

    def draw(self, percent: float) -> bool:
        self._drawn = (self._drawn + GOLDEN) % 1.0
        return self._drawn * 100.0 < percent


class VersionTable:
    """The versions of one model. The stable version answers by default, except for an open candidate's share."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._stable, self._candidate = Track(), Track()
        self.loaded: Mapping[int, LoadedModel] = {}  # by their versions
        self._tracks: dict[int, Track] = {}  # of these, for calls that name one
        self._shares: TrafficShares | None = None  # the open candidate's
        self._draws = WeightedDraw()
        # By version, the other version of an open candidate and the stable one: if a request fails on both, it is at
        # fault. Replaced, never changed: forward threads read it.
        self.counterparts: Mapping[int, LoadedModel] = {}

    @property
    def version(self) -> int:
        """The stable version; 0 before the first."""
        return get_version(self._stable.loaded)

    @property
    def candidate(self) -> Track | None:
        return None if self._shares is None else self._candidate

    @property
    def candidate_version(self) -> int:
        return 0 if self._shares is None else get_version(self._candidate.loaded)

    @property
    def percent(self) -> float:
        shares = self._shares
        return 0.0 if shares is None else shares.percent

    @property
    def versions(self) -> list[int]:
        """All loaded versions, ascending."""
        return sorted(self.loaded)

    def choose_track(self, version: int | None, track: str, sticky: str) -> Track:
        """Choose the track of a call. Raises InferenceError: 404 for a version that was dropped since the protocol has
        found it, 503 before the first."""
        if version is not None:
            if (named := self._tracks.get(version)) is None:
                raise unknown_version(self._model, str(version), self.versions)
            return named
        if self._stable.loaded is None:
            raise InferenceError(503, "no weights have been loaded yet; try again later", retry_after_s=1.0)
        shares = self._shares
        if shares is None or shares.is_shadow or track == "stable":
            return self._stable
        if track == "candidate":
            return self._candidate
        percent = shares.percent
        if sticky:
            is_selected = hash_to_percent(self._model, sticky) < percent
        else:
            is_selected = percent > 0.0 and self._draws.draw(percent)
        return self._candidate if is_selected else self._stable

    @property
    def stable(self) -> LoadedModel | None:
        """The stable version, without its fallback; None before the first."""
        return None if self._stable.loaded is None else self._stable.model

    def has_track(self, track: Track) -> bool:
        """Whether calls may still get this track."""
        return track in (self._stable, self.candidate, *self._tracks.values())

    def is_stable(self, track: Track) -> bool:
        """Whether this is the track of calls without a version or track."""
        return track is self._stable

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, loaded: LoadedModel) -> None:
        """Add a loaded version, for calls that name it and for `point`."""
        self.loaded = {**self.loaded, loaded.version: loaded}
        self._tracks = {**self._tracks, loaded.version: Track(loaded)}

    def point(self, answering: Answering) -> None:
        """Let these versions answer from the next batch on, and drop all others. Callable from any thread.

        Calls admitted for another are still answered: by its version, or for a dropped candidate by the stable one.
        """
        stable, candidate, shares, loaded = answering
        self.loaded = {each.version: each for each in loaded}
        tracks = self._tracks
        self._tracks = {
            each.version: track if (track := tracks.get(each.version)) and track.loaded is each else Track(each)
            for each in loaded
        }
        if stable is not None:
            self._stable.loaded = stable
        if candidate is None:
            self._shares = None
        self._candidate.loaded = candidate or self._stable.loaded
        if candidate is not None:
            self._shares = shares
        answers = self._stable.loaded
        # A live version has its fallback; a shadow computes what the stable one answered.
        if isinstance(answers, FallbackPredictor | None) or isinstance(candidate, FallbackPredictor | None):
            self.counterparts = {}
        else:
            back = {} if shares.is_shadow else {candidate.version: answers}
            self.counterparts = {answers.version: candidate, **back}


def hash_to_percent(model: str, sticky: str) -> float:
    """Hash a key to 0 to 100: the same in every process, different for each model."""
    digest = hashlib.blake2b(f"{model}\0{sticky}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 * 100.0
