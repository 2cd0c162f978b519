"""Connections of another transport than ZeroMQ: an extension of the group `shoal.listeners`.

A listener is made and called by the gateway, in the gateway's thread; its messages enter the sessions as those of the
ROUTER socket do.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Protocol

from shoal.errors import ConfigError
from shoal.plugins.find import find_extension
from shoal.rl.gateway.state import GatewaySetting

LISTENERS = "shoal.listeners"


class Listener(Protocol):
    """A route of it is no route of the ROUTER socket."""

    port: int

    @property
    def address(self) -> str:
        """As actors connect to it."""

    def fileno(self) -> int:
        """Readable when `receive` has something to do."""

    def __contains__(self, route: bytes) -> bool:
        """Whether a route is its own."""

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """(route, frames) of what has arrived, at most a round of it; no frames: the connection has ended."""

    def send(self, route: bytes, frames: Sequence[bytes]) -> str:
        """Send a message without waiting; returns why it was not sent, or an empty string."""

    def sweep(self, sessions: Container[bytes]) -> None:
        """Once a heartbeat: end connections that have no session."""

    def close(self) -> None:
        """End all connections."""


def open_listener(setting: GatewaySetting, remembered_port: int) -> Listener | None:
    """The WebSocket listener, in a run that has one. Raises ConfigError when it cannot be opened."""
    if setting.spec.websocket is None:
        return None
    try:
        make = find_extension("websocket", LISTENERS, {})
    except ValueError as error:
        remedy = "pip install 'CHECKOUT[games]', with the folder of Shoal's sources"
        raise ConfigError("gateway.websocket", setting.spec.websocket, str(error), remedy) from None
    listener: Listener = make(setting, remembered_port)
    return listener
