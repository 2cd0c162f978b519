"""Other ways into a gateway than ZeroMQ and its actors: another transport, and episodes of another protocol.

Connections of another transport are an extension of the group `shoal.listeners`.

A listener is made and called by the gateway, in the gateway's thread; its messages enter the sessions as those of the
ROUTER socket do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Protocol

from shoal.errors import ConfigError, ProtocolViolation, format_install
from shoal.plugins.find import find_extension
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.state import GatewaySetting, GatewayState
from shoal.rl.gateway.zmq_listener import format_address
from shoal.rl.part_specs import GatewaySpec
from shoal.wire import Message, MessageLimits, decode
from shoal.wire.segment import Segment

# A message, or what is wrong with it, with its route and the frames after its header; None: the connection has ended.
Received = tuple[bytes, Message | ProtocolViolation | None, Sequence[bytes]]
LISTENERS = "shoal.listeners"
StoreSegment = Callable[[ActorKey, ActorProgress, Segment], None]


class Listener(Protocol):
    """A route of it is no route of the ROUTER socket. scheme: of its addresses, as `wss`"""

    port: int
    scheme: str

    def fileno(self) -> int:
        """Readable when `receive` has something to do; it is called in each round."""

    def __contains__(self, route: bytes) -> bool:
        """Whether a route is its own."""

    def receive(self, is_busy: bool) -> Iterator[Received]:
        """What has arrived, at most a round of it. Ends connections that have had no session for too long. is_busy:
        actors of the ROUTER play, which must not wait for clients without a session."""

    def send(self, route: bytes, message: Message, frames: Sequence[bytes]) -> str:
        """Send a message without waiting; returns why it was not sent, or an empty string."""

    def relay(self, addresses: Mapping[str, str]) -> None:
        """Pass connections for other policies of the run on to their gateways' addresses, by policy. From any
        thread."""

    def sweep(self, sessions: Container[bytes]) -> Iterator[bytes]:
        """Once a heartbeat: end sessions' connections that are silent, whose routes it returns.
        A connection that stands may be silent for `pause_s`: a game at a menu sends nothing."""

    def close(self) -> None:
        """End all connections."""


def read_frames(frames: Sequence[bytes], limits: MessageLimits) -> Message | ProtocolViolation:
    """The message of the frames of ZeroMQ, as a listener hands it over."""
    try:
        return decode(frames, limits)
    except ProtocolViolation as violation:
        return violation


def format_websocket_address(listener: Listener | None, host: str) -> str:
    """For games that reach the gateway at this host; empty without a listener."""
    return format_address(listener.scheme, host, listener.port) if listener else ""


def find_listener(spec: GatewaySpec) -> Callable[[GatewaySetting, int], Listener] | None:
    """What opens the WebSocket listener, given the remembered port; None in a run without one. Raises ConfigError when
    it cannot be imported."""
    if spec.websocket is None:
        return None
    try:
        listener: Callable[[GatewaySetting, int], Listener] = find_extension("websocket", LISTENERS, {})
    except ValueError as error:
        raise ConfigError("gateway.websocket", spec.websocket, str(error), format_install("games")) from None
    return listener


class EpisodeFront(Protocol):
    """Episodes that come in beside the protocol of actors. Serves from when it is opened until `close`."""

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
