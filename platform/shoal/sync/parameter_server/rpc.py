"""Calls between the processes of one asynchronous training run: methods of an object, over ZeroMQ, as msgpack.

Owns the socket of a service and the waiting for an answer. A service runs in one thread; a method that cannot answer yet
returns `LATER` and answers by `reply`. Sockets are files in a folder that only this user can enter.

| capacity           | what blocks | who unblocks      | close()                          |
|--------------------|-------------|-------------------|----------------------------------|
| ZeroMQ's, unbounded | `Caller.call` | the service's answer | ends the thread; calls time out |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from shoal.errors import ConnectionLost, ShoalError, TrainError

LATER = object()
_POLL_MS = 100
Method = Callable[..., Any]


class Service:
    """Answers calls of `methods` in a thread of its own, until it is closed.

    A method takes the caller's identity and the arguments. tick: called between two calls, at the latest every 0.1 s
    """

    def __init__(self, address: str, methods: Mapping[str, Method], tick: Callable[[], None] = lambda: None) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._methods, self._tick = methods, tick
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"service {address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def reply(self, caller: bytes, answer: Any) -> None:
        """Answer a call for which a method returned LATER. From within a method or `tick`."""
        self._socket.send_multipart([caller, msgspec.msgpack.encode(["", answer])])

    def _run(self) -> None:
        while not self._is_closing:
            if self._socket.poll(_POLL_MS):
                caller, data = self._socket.recv_multipart()
                name, arguments = msgspec.msgpack.decode(data)
                try:
                    answer = self._methods[name](caller, *arguments)
                except Exception as error:  # noqa: BLE001 - whoever calls gets it; the service goes on
                    words = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
                    self._socket.send_multipart([caller, msgspec.msgpack.encode([words, None])])
                else:
                    if answer is not LATER:
                        self.reply(caller, answer)
            self._tick()
        self._socket.close()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_closing = True
        if self._thread.ident is None:
            self._socket.close()
        else:
            self._thread.join()


class Caller:
    """Calls of one service. For one thread."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._address, self._timeout_s = address, timeout_s

    def send(self, name: str, *arguments: Any) -> None:
        """Begin a call; `receive` has its answer."""
        self._socket.send(msgspec.msgpack.encode([name, arguments]))

    def receive(self) -> Any:
        """The answer to the oldest call without one. Raises ConnectionLost after the timeout, TrainError for its
        error."""
        if not self._socket.poll(1e3 * self._timeout_s):
            raise ConnectionLost(f"{self._address} has not answered for {self._timeout_s:g} s")
        error, answer = msgspec.msgpack.decode(self._socket.recv())
        if error:
            raise TrainError(error)
        return answer

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer of `name`. Raises as `receive`."""
        self.send(name, *arguments)
        return self.receive()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
