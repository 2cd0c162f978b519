"""Tells a message that was delivered before from a new one, in bounded memory.

Called by `MessageDataset` and the stream library; its state is a part of each checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from shoal.sources.source import StreamMessage

WINDOW = 4096  # messages


class Deduplicator:
    """Admits each (publisher, sequence) once.

    Of each publisher it has the highest sequence and one bit for each of the `WINDOW` before it: the anti-replay window
    of IPsec (RFC 4303, section 3.4.3). A message may arrive late by up to that many; an earlier one counts as a
    duplicate, and as `num_stale`: a publisher that begins to count again needs a new name. Messages without a publisher
    are compared by hash with the last `WINDOW` of their kind.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window, self._mask = window, (1 << window) - 1
        self._seen: dict[str, tuple[int, int]] = {}  # publisher -> highest sequence, bits: bit i is `highest - i`
        self._hashes: OrderedDict[int, None] = OrderedDict()
        self.num_duplicates = self.num_stale = self.num_gaps = 0

    @property
    def sequences(self) -> dict[str, int]:
        """The highest sequence of each publisher."""
        return {publisher: highest for publisher, (highest, _) in self._seen.items()}

    def admit(self, message: StreamMessage, is_first: bool = False) -> bool:
        """Whether it is new; from now on it is not. is_first: it is, though its hash may be that of another one"""
        if is_first:
            self._hashes.pop(message.sequence, None)
        if message.publisher:
            is_new = self._admit_counted(message)
        elif is_new := message.sequence not in self._hashes:
            self._hashes[message.sequence] = None
            if len(self._hashes) > self._window:
                self._hashes.popitem(last=False)
        self.num_duplicates += not is_new
        return is_new

    def _admit_counted(self, message: StreamMessage) -> bool:
        highest, bits = self._seen.get(message.publisher, (message.sequence - 1, 0))
        ahead = message.sequence - highest
        if ahead > 0:
            self.num_gaps += ahead - 1
            shifted = (bits << ahead) & self._mask if ahead < self._window else 0
            self._seen[message.publisher] = (message.sequence, shifted | 1)
            return True
        if -ahead >= self._window:
            self.num_stale += 1
            return False
        if bits >> -ahead & 1:
            return False
        self.num_gaps -= self.num_gaps > 0  # it was counted as missing
        self._seen[message.publisher] = (highest, bits | 1 << -ahead)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "seen": {publisher: [highest, f"{bits:x}"] for publisher, (highest, bits) in self._seen.items()},
            "hashes": [f"{digest:x}" for digest in self._hashes],
            "counts": [self.num_duplicates, self.num_stale, self.num_gaps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the one that made `state`."""
        self._seen = {publisher: (highest, int(bits, 16)) for publisher, (highest, bits) in state["seen"].items()}
        self._hashes = OrderedDict((int(digest, 16), None) for digest in state["hashes"])
        self.num_duplicates, self.num_stale, self.num_gaps = state["counts"]
