"""The versions of one model in one replica: which are loaded, and which one answers a call.

Read and written on the event loop; a live model's follower replaces the stable version from a thread of its own. A call
gets a `Track` when it is admitted, and its batch reads the track's version once: so a batch is never a mixture, and a
flip is one assignment, which takes effect with the next batch. Never loads anything itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.errors import InferenceError
from shoal.serve.messages.desired_state import NO_SHARES, TrafficShares
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.replica.fallback_predictor import FallbackPredictor

GOLDEN = 0.6180339887498949  # of a turn: draws that are spread evenly however few there are


class Track:
    """Who answers: what calls that may share a batch have in common. Compared by identity."""

    __slots__ = ("loaded",)

    def __init__(self, loaded: LoadedModel | FallbackPredictor | None = None) -> None:
        self.loaded = loaded


class Answering(NamedTuple):
    """Who answers in a replica.

    stable: who asks for none; None: whichever did
    candidate: gets `shares`; None: there is none
    loaded: who asks for a version by its number
    """

    stable: LoadedModel | FallbackPredictor | None
    candidate: LoadedModel | FallbackPredictor | None = None
    shares: TrafficShares = NO_SHARES
    loaded: Sequence[LoadedModel] = ()


class WeightedDraw:
    """Yes for a share of the calls, evenly spread."""

    def __init__(self) -> None:
        self._drawn = 0.0

    def draw(self, percent: float) -> bool:
        self._drawn = (self._drawn + GOLDEN) % 1.0
        return self._drawn * 100.0 < percent


class VersionTable:
    """Of one model. The stable version answers who asks for none, but for the candidate's share while one is open."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._stable, self._candidate = Track(), Track()
        self.loaded: Mapping[int, LoadedModel] = {}  # by their versions
        self._tracks: dict[int, Track] = {}  # of these, for calls that ask for one
        self._shares: TrafficShares | None = None  # of the candidate, while it is open
        self._draws = WeightedDraw()

    @property
    def version(self) -> int:
        """The stable version; 0 before the first."""
        loaded = self._stable.loaded
        return loaded.version if loaded else 0

    @property
    def candidate(self) -> Track | None:
        """The candidate's track while it is open."""
        return None if self._shares is None else self._candidate

    @property
    def candidate_version(self) -> int:
        """0 when none is open."""
        loaded = self._candidate.loaded
        return loaded.version if loaded is not None and self._shares is not None else 0

    @property
    def percent(self) -> float:
        """The open candidate's share."""
        shares = self._shares
        return 0.0 if shares is None else shares.percent

    @property
    def versions(self) -> list[int]:
        """All that are loaded, ascending."""
        return sorted(self.loaded)

    def choose_track(self, version: int | None, track: str, sticky: str) -> Track:
        """Who answers a call. Raises InferenceError: 404 for a version that is not loaded, 503 before the first."""
        if version is not None:
            found = self._tracks.get(version)
            if found is None:
                there = ", ".join(map(str, self.versions)) or "none"
                raise InferenceError(404, f"model {self._model!r} has no version {version} here; it has {there}")
            return found
        if self._stable.loaded is None:
            raise InferenceError(503, "no weights have been loaded yet; try again later", retry_after_s=1.0)
        shares = self._shares
        if shares is None or shares.is_shadow or track == "stable":
            return self._stable
        return self._candidate if track == "candidate" or self._is_selected(shares.percent, sticky) else self._stable

    def is_stable(self, track: Track) -> bool:
        """Whether this is the track of whoever asks for nothing in particular."""
        return track is self._stable

    def _is_selected(self, percent: float, sticky: str) -> bool:
        if sticky:
            return hash_to_percent(self._model, sticky) < percent
        return percent > 0.0 and self._draws.draw(percent)

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, loaded: LoadedModel) -> None:
        """A version is there for who asks for it, and to be pointed to."""
        self.loaded = {**self.loaded, loaded.version: loaded}
        self._tracks = {**self._tracks, loaded.version: Track(loaded)}

    def point(self, answering: Answering) -> None:
        """Let these answer from the next batch on, and forget all others. From any thread.

        What was admitted for another is still answered: by its version, or for a candidate that went by the stable one.
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


def hash_to_percent(model: str, sticky: str) -> float:
    """Where a key lies, 0 to 100: the same in every process, and for each model another."""
    digest = hashlib.blake2b(f"{model}\0{sticky}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 * 100.0
