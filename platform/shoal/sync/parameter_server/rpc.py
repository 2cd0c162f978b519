"""Calls between the processes of one asynchronous training run: methods of an object, over ZeroMQ, as msgpack.

Owns the socket of a service, and a caller's waiting for its answer. A service runs in one thread. A method that cannot
answer yet returns `LATER`, and the service answers by `reply`. A call without an answer is sent again: the service may
have died, and another may have taken its place at the same address. One service calls its method once all the same: it
keeps the newest call of each caller, and its answer. Sockets are files in a folder that only this user can enter.

| queue            | capacity  | what blocks     | who unblocks       | close()                          |
|------------------|-----------|-----------------|--------------------|----------------------------------|
| a caller's calls | unbounded | `receive`       | the answer         | drops them                       |
| a service's      | unbounded | nothing         |                    | ends the thread; drops the rest  |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import msgspec
import zmq

from shoal.errors import ConnectionLost, ShoalError, TrainError

LATER = object()
_POLL_MS = 100
Method = Callable[..., Any]


class CallId(NamedTuple):
    """Who called, and which of its calls."""

    identity: bytes
    number: int


class RpcService:
    """Answers calls of `methods` in a thread of its own, until it is closed.

    methods: each takes the CallId and the call's arguments
    """

    def __init__(self, address: str, methods: Mapping[str, Method]) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._methods = methods
        self._newest: dict[bytes, tuple[int, bytes | None]] = {}  # by caller: its newest call, and the answer
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"service {address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def reply(self, caller: CallId, answer: Any, error: str = "") -> None:
        """Answer a call for which a method returned LATER. From within a method."""
        encoded = msgspec.msgpack.encode([caller.number, error, answer])
        self._newest[caller.identity] = caller.number, encoded
        self._socket.send_multipart([caller.identity, encoded])

    def _run(self) -> None:
        while not self._is_closing:
            if self._socket.poll(_POLL_MS):
                identity, data = self._socket.recv_multipart()
                number, name, arguments = msgspec.msgpack.decode(data)
                self._answer(CallId(identity, number), name, arguments)
        self._socket.close()

    def _answer(self, caller: CallId, name: str, arguments: list[Any]) -> None:
        newest, encoded = self._newest.get(caller.identity, (-1, None))
        if caller.number <= newest:  # sent again
            if caller.number == newest and encoded is not None:
                self._socket.send_multipart([caller.identity, encoded])
            return
        self._newest[caller.identity] = caller.number, None
        try:
            answer = self._methods[name](caller, *arguments)
        except Exception as error:  # noqa: BLE001 - the caller raises it; the service goes on
            words = str(error) if isinstance(error, ShoalError) else f"{name}: {type(error).__name__}: {error}"
            self.reply(caller, None, words)
        else:
            if answer is not LATER:
                self.reply(caller, answer)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_closing = True
        if self._thread.ident is None:
            self._socket.close()
        else:
            self._thread.join()


class RpcClient:
    """Calls of one service. For one thread.

    timeout_s: how long a call waits for its answer
    again_s:   after so long without one it is sent again
    """

    def __init__(self, address: str, timeout_s: float, again_s: float = 1.0) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)
        self._address, self._timeout_s, self._again_s = address, timeout_s, again_s
        self._numbers = count()
        self._sent = b""
        self._number = -1

    def send(self, name: str, *arguments: Any) -> None:
        """Begin a call; `receive` has its answer."""
        self._number = next(self._numbers)
        self._sent = msgspec.msgpack.encode([self._number, name, arguments])
        self._socket.send(self._sent)

    def receive(self) -> Any:
        """The answer to the newest call. Raises ConnectionLost after the timeout, TrainError for the method's error."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if not self._socket.poll(round(1e3 * self._again_s)):
                if time.monotonic() > deadline:
                    raise ConnectionLost(f"{self._address} has not answered for {self._timeout_s:g} s")
                self._socket.send(self._sent)
                continue
            number, error, answer = msgspec.msgpack.decode(self._socket.recv())
            if number != self._number:
                continue  # the answer to a call that was sent twice
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
