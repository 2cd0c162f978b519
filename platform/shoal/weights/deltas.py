"""What has changed from one version of bf16 weights to the next: a few bits for each changed one, and none for others.

A step of an optimizer moves each weight by about the learning rate, and most of them by less than bf16 can tell. The
changes are exact: the result has the hash of the version that was published. Called by the weight store's transport.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.errors import WeightsError
from shoal.weights.store import CHUNK, Skipped, WeightSnapshot

FULL_EVERY = 64  # versions
MOST_CHANGED = 0.5  # of the words, beyond which all of them are sent


@dataclass(frozen=True)
class WeightDelta:
    """Leads to a version; the other fields are those of its snapshot.

    base:    SHA-256 of the payload to which it applies
    changes: of the payload's 16-bit words, compressed: the distance of each changed one from the one before, uint32,
             then the differences, uint16, small ones of either sign first; all first bytes, all second ones, and so on
    """

    version: int
    base: str
    sha256: str
    published_at: float
    skipped: Skipped
    changes: bytes = field(repr=False)

    @classmethod
    def between(cls, base: WeightSnapshot, snapshot: WeightSnapshot) -> WeightDelta | None:
        """None for weights that are not bf16, and where it would be as large as they are."""
        old, new = base.payload, snapshot.payload
        if len(old) != len(new) or b'"BF16"' not in new[: int.from_bytes(new[:8], "little")]:
            return None
        before, after = np.frombuffer(old, "<u2"), np.frombuffer(new, "<u2")
        pieces = [slice(at, at + CHUNK) for at in range(0, len(after), CHUNK)]
        places = np.concatenate([np.flatnonzero(before[each] != after[each]) + each.start for each in pieces])
        if len(places) > MOST_CHANGED * len(after):
            return None
        differences = (after[places] - before[places]).view("<i2")
        zigzag = (differences << 1) ^ (differences >> 15)
        distances = np.diff(places, prepend=0).astype("<u4")
        planes = [each.view(np.uint8).reshape(-1, each.itemsize).T.tobytes() for each in (distances, zigzag)]
        packer = zlib.compressobj(1, strategy=zlib.Z_RLE)
        changes = packer.compress(b"".join(planes)) + packer.flush()
        if len(changes) >= len(new):
            return None
        return cls(snapshot.version, base.sha256, snapshot.sha256, snapshot.published_at, snapshot.skipped, changes)

    def apply(self, base: WeightSnapshot) -> WeightSnapshot:
        """The version. Raises WeightsError for another base, and for a result that has another hash."""
        if base.sha256 != self.base:
            raise WeightsError(f"weights version {base.version} is not the base of the changes to {self.version}")
        try:
            planes = np.frombuffer(zlib.decompress(self.changes), np.uint8).reshape(6, -1)
            places = np.ascontiguousarray(planes[:4].T).view("<u4")[:, 0].cumsum(dtype=np.int64)
            zigzag = np.ascontiguousarray(planes[4:].T).view("<u2")[:, 0]
            words = np.frombuffer(base.payload, "<u2").copy()
            words[places] += (zigzag >> 1) ^ -(zigzag & 1)
        except (zlib.error, ValueError, IndexError) as error:
            raise WeightsError(f"the changes to weights version {self.version} are damaged: {error}") from error
        snapshot = WeightSnapshot(self.version, words.tobytes(), self.sha256, self.published_at, self.skipped)
        snapshot.verify()
        return snapshot


class RecentDeltas:
    """Those to a store's newest versions, each to the next one; together they are no larger than the weights."""

    def __init__(self) -> None:
        self._deltas: deque[WeightDelta] = deque()

    def add(self, delta: WeightDelta, newest: WeightSnapshot) -> None:
        self._deltas.append(delta)
        while sum(len(each.changes) for each in self._deltas) > newest.size_bytes:
            self._deltas.popleft()

    def clear(self) -> None:
        """The newest version has come without one."""
        self._deltas.clear()

    def find(self, known: str, snapshot: WeightSnapshot) -> Sequence[WeightDelta] | WeightSnapshot:
        """What leads from the payload with this SHA-256 to a version; the version where nothing does."""
        deltas = list(self._deltas)
        first = max((at for at, each in enumerate(deltas) if each.base == known), default=len(deltas))
        chain = deltas[first:]
        return chain if chain and chain[-1].version == snapshot.version else snapshot


def follow_deltas(known: WeightSnapshot | None, found: Sequence[WeightDelta] | WeightSnapshot) -> WeightSnapshot:
    """The version that was found. Raises WeightsError where it does not follow from the one that is known."""
    if isinstance(found, WeightSnapshot):
        return found
    assert known is not None
    for delta in found:
        known = delta.apply(known)
    return known
