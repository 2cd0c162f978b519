"""Another way for episodes to come in, beside the protocol of actors: what a gateway needs of it. A library has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.state import GatewayState
from shoal.wire.segment import Segment

StoreSegment = Callable[[ActorKey, ActorProgress, Segment], None]


class EpisodeFront(Protocol):
    """Serves from when it is opened until `close`."""

    @property
    def is_alive(self) -> bool: ...

    def run_round(self) -> None:
        """Queue the segments that are ready. In the gateway's thread, once a round."""
        ...

    def get_counts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ...

    def connect(self, url: str) -> None:
        """Have the policy computed by the endpoint of this address."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class OpenFront(Protocol):
    """Opens a front in the gateway's process. It travels there."""

    def open(self, state: GatewayState, store: StoreSegment, wake: Callable[[], None]) -> EpisodeFront:
        """store: counts and queues a segment, in the gateway's thread; wake: asks for a round, from any thread"""
        ...
