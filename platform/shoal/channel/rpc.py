"""Calls between the processes of one run of replicas: a `Request` and its reply, over ZeroMQ, as msgpack.

Owns the socket of a service, and a caller's waiting for its answer. A service runs in one thread, and has a handler for
each type of request. One that cannot answer yet returns `LATER`, and the service answers by `reply`. A call without an
answer is sent again: the service may have died, and another may have taken its place at the same address. One service
calls its handler once all the same: it keeps the newest call of each caller, and its answer. On one host sockets are
files in a folder that only this user can enter. Between hosts they are TCP with CURVE: only a process that knows the
run's public key can connect, and nothing can be read or changed on the way. There a call is sent again only on a new
connection: a slow link is not loaded twice.

| queue            | capacity  | what blocks     | who unblocks       | close()                          |
|------------------|-----------|-----------------|--------------------|----------------------------------|
| a caller's calls | unbounded | `receive`       | the answer         | drops them                       |
| a service's      | unbounded | nothing         |                    | ends the thread; drops the rest  |
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar, Union, cast, get_args

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.errors import ConnectionLost, ShoalError, TrainError

LATER = object()
_POLL_MS = 100
UNACKNOWLEDGED_MS = 10_000  # for which TCP keeps a connection on which nothing arrives
_KEEPALIVE_S = 5
R = TypeVar("R")


class Request(msgspec.Struct, Generic[R], frozen=True, array_like=True, tag=True):
    """A call; a subclass is of `Request[TYPE OF THE ANSWER]`, and goes by its name."""


@cache
def _get_reply_decoder(kind: type[Request[Any]]) -> msgspec.msgpack.Decoder[Any]:
    (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
    return msgspec.msgpack.Decoder(get_args(base)[0])


_CALL = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])  # number, request
_REPLY = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])  # number, error, answer


class CurveKeys(NamedTuple):
    """The pair of one run, in Z85. Every process of the run has it, and no other."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> CurveKeys:
        return cls(*zmq.curve_keypair())


def _make_socket(kind: int, keys: CurveKeys | None) -> zmq.Socket[bytes]:
    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.SNDHWM, 0)
    opened.setsockopt(zmq.RCVHWM, 0)
    if keys is not None:
        opened.curve_publickey, opened.curve_secretkey = keys
        opened.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
        opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
        opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    return opened


class CallId(NamedTuple):
    """Who called, and which of its calls."""

    identity: bytes
    number: int


Handler = Callable[[CallId, Any], object]
Handlers = Mapping[type[Request[Any]], Handler]  # of the requests of the type
_Method = TypeVar("_Method", bound=Callable[..., object])


def answers(kind: type[Request[Any]]) -> Callable[[_Method], _Method]:
    """Mark a method, of (caller, request), as the handler of a type of requests: see `list_handlers`."""

    def mark(method: _Method) -> _Method:
        method.__dict__["answers"] = kind
        return method

    return mark


def list_handlers(owner: object) -> Handlers:
    """The methods of an object that are marked as handlers, or override one that is."""
    classes = reversed(type(owner).__mro__)
    marked = [(each, name) for part in classes for name, each in vars(part).items() if hasattr(each, "answers")]
    return {method.answers: getattr(owner, name) for method, name in marked}


class RpcService:
    """Answers requests in a thread of its own, until it is closed.

    address:  `ipc://FILE`, or `tcp://HOST:PORT` with keys; port 0 takes a free one
    handlers: by the type of the request
    tick:     called by the thread some times a second
    """

    def __init__(
        self, address: str, handlers: Handlers, keys: CurveKeys | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        self._socket = _make_socket(zmq.ROUTER, keys)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a caller that connects again is the same caller
        if keys is not None:
            self._socket.curve_server = True
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._handlers, self._tick = handlers, tick
        self._decoder = msgspec.msgpack.Decoder(Union[tuple(handlers)])  # noqa: UP007 - as many as there are
        self._newest: dict[bytes, tuple[int, bytes | None]] = {}  # by caller: its newest call, and the answer
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"service {address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def reply(self, caller: CallId, answer: object, error: str = "") -> None:
        """Answer a call for which a handler returned LATER. From within a handler."""
        encoded = msgspec.msgpack.encode([caller.number, error, answer])
        self._newest[caller.identity] = caller.number, encoded
        self._socket.send_multipart([caller.identity, encoded])

    def _run(self) -> None:
        while not self._is_closing:
            self._tick()
            if self._socket.poll(_POLL_MS):
                identity, *frames = self._socket.recv_multipart()
                try:
                    number, encoded = _CALL.decode(b"".join(frames))
                except msgspec.DecodeError:  # no call
                    continue
                self._answer(CallId(identity, number), encoded)
        self._socket.close()

    def _answer(self, caller: CallId, encoded_request: msgspec.Raw) -> None:
        newest, encoded = self._newest.get(caller.identity, (-1, None))
        if caller.number <= newest:  # sent again
            if caller.number == newest and encoded is not None:
                self._socket.send_multipart([caller.identity, encoded])
            return
        self._newest[caller.identity] = caller.number, None
        name = "request"
        try:
            request = self._decoder.decode(encoded_request)
            name = type(request).__name__
            answer = self._handlers[type(request)](caller, request)
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
    again_s:   after so long without one it is sent again (ipc), and `locate` is asked (tcp)
    locate:    where the service is now; None: always at `address`
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        again_s: float = 1.0,
        keys: CurveKeys | None = None,
        locate: Callable[[], str] | None = None,
    ) -> None:
        self._socket = _make_socket(zmq.DEALER, keys)
        if keys is not None:
            self._socket.curve_serverkey = keys.public
        self._socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) if keys else None
        self._num_connections = 0
        self._socket.connect(address)
        self.address = address
        self._timeout_s = timeout_s
        self._again_s = again_s
        self._locate = locate
        self._numbers = count()
        self._sent = b""
        self._kind: type[Request[Any]] = Request
        self._number = self._answered = -1

    def send(self, request: Request[Any]) -> None:
        """Begin a call; `receive` has its answer."""
        self._number, self._kind = next(self._numbers), type(request)
        self._sent = msgspec.msgpack.encode((self._number, request))
        self._socket.send(self._sent)

    def receive(self, kind: type[Request[R]]) -> R:
        """The answer to the newest call, which is of this kind.

        Raises ConnectionLost after the timeout, TrainError for the handler's error.
        """
        assert kind is self._kind
        deadline = time.monotonic() + self._timeout_s
        while True:
            if not self._wait():
                if time.monotonic() > deadline:
                    raise ConnectionLost(f"{self.address} has not answered for {self._timeout_s:g} s")
                continue
            number, error, answer = _REPLY.decode(self._socket.recv())
            if number != self._number:
                continue  # the answer to a call that was sent twice
            if error:
                raise TrainError(error)
            return cast(R, _get_reply_decoder(kind).decode(answer))

    def is_answered(self) -> bool:
        """Whether the answer to the newest call has come. It is not retained: nothing receives it."""
        while self._socket.poll(0):
            self._answered, _, _ = _REPLY.decode(self._socket.recv())
        return self._answered == self._number

    def _wait(self) -> bool:
        """Whether an answer is there; after a while without one, what may have been lost is sent again."""
        if self._monitor is None:
            if self._socket.poll(round(1e3 * self._again_s)):
                return True
            self._socket.send(self._sent)
            return False
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(round(1e3 * self._again_s)))
        if self._socket in ready:
            return True
        if self.has_reconnected():
            self._socket.send(self._sent)
        elif not ready and self._locate is not None and (now := self._locate()) != self.address:
            self._num_connections = max(1, self._num_connections)
            self._socket.disconnect(self.address)
            self._socket.connect(now)  # as a new connection, on which the call is sent again
            self.address = now
        return False

    def has_reconnected(self) -> bool:
        """Whether another connection has replaced one since the last time, so that messages may have been lost."""
        is_replaced = False
        while self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._num_connections += 1
            is_replaced = is_replaced or self._num_connections > 1
        return is_replaced

    def call(self, request: Request[R]) -> R:
        """The answer. Raises as `receive`."""
        self.send(request)
        return self.receive(type(request))

    def close(self) -> None:
        """Idempotent."""
        if self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()
