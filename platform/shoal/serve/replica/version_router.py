"""The versions of one model in one replica: which are loaded, and which one answers a call.

Read and written on the event loop; a live model's follower replaces the stable version from a thread of its own. A call
gets a `Track` when it is admitted, and its batch reads the track's version once: so a batch is never a mixture, and a
flip is one assignment, which takes effect with the next batch. Never loads anything itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from shoal.errors import InferenceError
from shoal.serve.messages.desired_state import TrafficShares
from shoal.serve.model.predictor import LoadedModel

GOLDEN = 0.6180339887498949  # of a turn: draws that are spread evenly however few there are


class Track:
    """Who answers: what calls that may share a batch have in common. Compared by identity."""

    __slots__ = ("loaded",)

    def __init__(self, loaded: LoadedModel | None = None) -> None:
        self.loaded = loaded


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
        self._tracks: dict[int, Track] = {}  # of the loaded versions, for calls that ask for one
        self._is_open = False
        self._shares = TrafficShares()
        self._draws = WeightedDraw()

    @property
    def version(self) -> int:
        """The stable version; 0 before the first."""
        loaded = self._stable.loaded
        return loaded.version if loaded else 0

    @property
    def candidate(self) -> Track | None:
        """The candidate's track while it is open."""
        return self._candidate if self._is_open else None

    @property
    def candidate_version(self) -> int:
        """0 when none is open."""
        loaded = self._candidate.loaded
        return loaded.version if loaded is not None and self._is_open else 0

    @property
    def percent(self) -> float:
        """The open candidate's share."""
        return self._shares.percent if self._is_open else 0.0

    @property
    def versions(self) -> list[int]:
        """All that are loaded, ascending."""
        return sorted(self._tracks)

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
        if not self._is_open or self._shares.is_shadow or track == "stable":
            return self._stable
        return self._candidate if track == "candidate" or self._is_selected(sticky) else self._stable

    def is_stable(self, track: Track) -> bool:
        """Whether this is the track of whoever asks for nothing in particular."""
        return track is self._stable

    def is_candidate(self, track: Track) -> bool:
        """Whether this is the track of the candidate, if only of one that is not open any more."""
        return track is self._candidate

    def _is_selected(self, sticky: str) -> bool:
        percent = self._shares.percent
        if sticky:
            return hash_to_percent(self._model, sticky) < percent
        return percent > 0.0 and self._draws.draw(percent)

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, loaded: LoadedModel) -> None:
        """A version is there for who asks for it, and to be flipped to."""
        self._tracks = {**self._tracks, loaded.version: Track(loaded)}

    def retain(self, versions: Iterable[int]) -> None:
        """Forget all others. What was admitted for them is still answered by them."""
        kept = set(versions)
        self._tracks = {version: track for version, track in self._tracks.items() if version in kept}

    def promote(self, version: int) -> bool:
        """Let a loaded version be the stable one from the next batch on; whether it was another."""
        before, self._stable.loaded = self._stable.loaded, self._tracks[version].loaded
        if not self._is_open:
            self._candidate.loaded = self._stable.loaded  # as `shut` left it: nobody needs the version before
        return before is not self._stable.loaded

    def open_canary(self, version: int, shares: TrafficShares) -> None:
        """Let a loaded version answer its share, and who asks for the candidate; a shadow answers neither."""
        self._candidate.loaded = self._tracks[version].loaded
        self._shares, self._is_open = shares, True

    def close_canary(self) -> None:
        """No candidate any more: what was admitted for it is answered by the stable version."""
        self._is_open, self._shares = False, TrafficShares()
        self._candidate.loaded = self._stable.loaded

    def set_versions(self, stable: LoadedModel, other: LoadedModel | None, shares: TrafficShares | None = None) -> None:
        """The version of a live model that answers from the next batch on, and another. From any thread.

        shares: of the other, which is the candidate; None: it answers only who asks for its number
        """
        self._stable.loaded = stable
        self._tracks = {each.version: Track(each) for each in (stable, other) if each is not None}
        if other is not None and shares is not None:
            self.open_canary(other.version, shares)
        else:
            self.close_canary()


def hash_to_percent(model: str, sticky: str) -> float:
    """Where a key lies, 0 to 100: the same in every process, and for each model another."""
    digest = hashlib.blake2b(f"{model}\0{sticky}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 * 100.0
