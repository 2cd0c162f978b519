"""The weights that have come from a gateway: the newest version, and the pool of opponents in a run with self-play.

Owned by the client, which hands it the messages and sends what it asks for. The fields are replaced, never changed, so
that other threads read them without a lock.
"""

from __future__ import annotations

import hashlib

import numpy as np

from shoal.errors import ProtocolViolation
from shoal.weights import decode_tensors, shared_memory
from shoal.weights.shared_memory import PayloadAddress, map_payload, view_tensors
from shoal.wire.messages import OpponentMessage, Pull, WeightsMessage

Tensors = dict[str, np.ndarray]


class ReceivedWeights:
    """latest: version and arrays by name, read-only where they are mapped; opponents: arrays of the pool, by version.

    max_bytes: of one version; more is a violation of the protocol
    """

    def __init__(self, max_bytes: int) -> None:
        self.latest: tuple[int, Tensors] | None = None
        self.opponents: dict[int, Tensors] = {}
        self.max_bytes = max_bytes
        self.shares_memory = self._is_gateways = self._has_mapped = self._is_late = False

    def set_machine(self, is_gateways: bool) -> None:
        """Whether this machine is the gateway's, so that its memory can perhaps be mapped."""
        if is_gateways != self._is_gateways:
            # Until a mapping fails, and none has worked.
            self.shares_memory = is_gateways and shared_memory.IS_AVAILABLE
            self._is_gateways, self._has_mapped, self._is_late = is_gateways, False, False

    def clear(self) -> None:
        """Another run begins."""
        self.latest, self.opponents = None, {}

    def take(self, message: WeightsMessage, frames: list[bytes]) -> int | None:
        """Take a version, and return it; None where it could not be mapped: then the next one is sent, and where none
        has ever been mapped, all are. Raises ProtocolViolation, WeightsError."""
        if not message.size:
            self._is_late = False
            self.latest = message.version, _decode(message, frames)
            return message.version
        if message.size > self.max_bytes:
            raise ProtocolViolation("too_large", f"weights {message.version}: {message.size} bytes")
        payload = map_payload(PayloadAddress(message.pid, message.fd, message.inode, message.size))
        if payload is None:
            self._is_late, self.shares_memory = True, self._has_mapped
            return None
        self._has_mapped = True
        self.latest = message.version, view_tensors(payload)
        return message.version

    def take_opponent(self, message: OpponentMessage, frames: list[bytes]) -> None:
        """Take a member of the pool, and forget those that have left it. Raises as `take`."""
        known = {**self.opponents, message.version: _decode(message, frames)}
        members = message.members or known.keys()
        self.opponents = {version: tensors for version, tensors in known.items() if version in members}

    def make_pull(self) -> Pull:
        """The request for a newer version; one is always open."""
        return Pull(self.latest[0] if self.latest else 0, self.shares_memory and not self._is_late)


def _decode(message: WeightsMessage | OpponentMessage, frames: list[bytes]) -> Tensors:
    if len(frames) != 2 or hashlib.sha256(frames[1]).hexdigest() != message.sha256:
        raise ProtocolViolation("malformed", f"weights {message.version}: the checksum does not match")
    return decode_tensors(frames[1])
