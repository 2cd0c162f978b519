"""The sockets of a gateway: the ROUTER of ZeroMQ, and the listener of a run with WebSocket. For one thread.

Made by the gateway, and by what listens in its place until a game has brought the spaces. Knows no session.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import zmq

from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway.listener import Received, find_listener, read_frames
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.gateway.zmq_listener import bind_router
from shoal.wire import Message, MessageLimits, encode

MAX_ROUND_MESSAGES = 256  # handled between two commits, at most


class Connections:
    """Bind the ports that the ledger remembers, and let it remember others. Raises ConfigError when one is taken.

    poller: of what `receive` reads
    """

    def __init__(self, setting: GatewaySetting, ledger: Ledger) -> None:
        self._limits = MessageLimits(max_message_bytes=setting.spec.max_message_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            remembered_port = int(ledger.get_fact("port") or 0)
            self._socket, self.port = bind_router(self._context, setting.spec, remembered_port, setting.curve_keys)
            ledger.set_fact("port", str(self.port))  # a restarted gateway must keep its port
            open_listener, remembered_port = find_listener(setting.spec), int(ledger.get_fact("websocket_port") or 0)
            self.listener = None if open_listener is None else open_listener(setting, remembered_port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.poller = zmq.Poller()
        self.poller.register(self._socket, zmq.POLLIN)
        if self.listener is not None:
            ledger.set_fact("websocket_port", str(self.listener.port))
            self.poller.register(self.listener.fileno(), zmq.POLLIN)

    def receive(self, ready: Container[object]) -> Iterator[Received]:
        """What has arrived, at most a round of it. ready: of `poller`"""
        is_busy = self._socket in ready
        for _ in range(MAX_ROUND_MESSAGES if is_busy else 0):
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            yield route, read_frames(frames, self._limits), frames[1:]
        if self.listener is not None:
            yield from self.listener.receive(is_busy)

    def send(self, route: bytes, message: Message, frames: Sequence[bytes] = ()) -> str:
        """Send a message without waiting; returns why it was not sent, or an empty string."""
        if self.listener is not None and route in self.listener:
            return self.listener.send(route, message, frames)
        parts = [route, encode(message), *frames]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=len(parts[-1]) < 65536)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return "unreachable" if error.errno == zmq.EHOSTUNREACH else "does not read"
        return ""

    def close(self) -> None:
        """Send what waits, for a moment, and free the ports. Idempotent."""
        if self._context.closed:
            return
        if self.listener is not None:
            self.listener.close()
        self._context.destroy(linger=500)
