"""The actor's end of the protocol: connect, pull weights, send segments, and recover from any fault.

The client keeps every segment until it is acknowledged, and resends the rest after a reconnect, so no segment is lost
when a gateway restarts. One DEALER socket behind one lock, which no thread holds while it waits for a message: one or
several environment loops use the client directly, and a keep-alive thread pings only when they have been silent for a
while. Called by game clients and by `environment_loop`; imports neither torch nor ray.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket as network
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

import numpy as np
import zmq

from shoal.actor.connection import (
    GatewayAddresses,
    ReconnectBackoff,
    SocketLock,
    connect_socket,
    describe_silence,
    is_on_this_host,
    make_arrival_poller,
)
from shoal.actor.exchange import Outbox, ReceivedWeights
from shoal.errors import Closed, ConnectionLost, InvalidSegment, ProtocolViolation, Refused, RunChanged, ShoalError
from shoal.wire import ExperienceSpec, MessageLimits, PackedSegment, Segment, decode, encode
from shoal.wire.messages import (
    PROTOCOL_VERSION,
    Ack,
    ActionMessage,
    Bye,
    Credit,
    ErrorMessage,
    GameSettings,
    Hello,
    Message,
    OpponentMessage,
    Ping,
    Pong,
    PullOpponent,
    SettingsMessage,
    WeightsMessage,
    Welcome,
)
from shoal.wire.segment import estimate_segment_bytes

_log = logging.getLogger(__name__)
_RETRYABLE_CODES = frozenset({"hello_required", "sequence_gap"})  # errors that a new hello resolves
_DISCARD_CODES = frozenset({"malformed", "too_large"})  # the segment that such an error names can never be counted
_PAUSE_S = 0.05  # between two looks whether the client is closed
_HELLO_TIMEOUT_S = 2.0
_MOVE_S = 10.0  # without an answer, before an actor of a run with several gateways moves to another
_LOST_FACTOR = 5  # times `timeout_s`, for a gateway that has answered before: its cluster may move it to another host
_MAX_HEADER_BYTES = 2**24  # a welcome may hold the graph of a policy


class ActorClient:
    """One actor of one run.

    address:     tcp://host:port, as the job prints it; with `|` between, all that the gateway may have. One may be a
                 file, or an object's URL, that has the address: it is read for each attempt. With `+` between, those of
                 several gateways
    token:       the gateway's access token
    actor_id:    1 to 64 characters, unique in the run; by default host name and process id
    incarnation: must grow with every start of the same actor_id; by default the time in nanoseconds
    server_key:  the gateway's CURVE public key (Z85 text); required when it is not on this machine
    timeout_s:   how long to try to reach a gateway that does not answer, before ConnectionLost; five times as long
                 where it has answered before
    max_weights_bytes: weights above this size end the connection
    first_pause_s: between the first two attempts to connect; each further pause doubles, up to a second
    offers:      the game's spaces, as {"observation": [4], "action": 3}: the gateway compares them with the run's, and
                 a run with env=ask takes them (docs/protocol.md: *Spaces from the game*)
    behaviour:   who acts, as "human", where that is not the run's policy: all of its experience is a demonstration
    context:     of several clients in one thread, which keeps their sessions alive by its calls; not closed here
    """

    inference = "local"

    def __init__(
        self,
        address: str,
        token: str,
        actor_id: str = "",
        incarnation: int | None = None,
        server_key: str = "",
        timeout_s: float = 60.0,
        max_weights_bytes: int = 2**30,
        first_pause_s: float = 0.05,
        offers: Mapping[str, Any] | None = None,
        behaviour: str = "",
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.actor_id = actor_id or f"{network.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(3)}"
        self._addresses = GatewayAddresses(address, server_key, self.actor_id)
        self.incarnation = time.time_ns() if incarnation is None else incarnation
        self._token, self._server_key = token, server_key
        self.behaviour, self.offers = behaviour, dict(offers or {})
        self._timeout_s, self._backoff = timeout_s, ReconnectBackoff(first_pause_s)
        self._context, self._has_own_context = context, context is None
        self._socket: zmq.Socket[bytes] | None = None
        self._lock = SocketLock()
        self._is_closing = False  # no new session
        self._closed = threading.Event()
        self._keepalive_thread: threading.Thread | None = None
        self._limits = MessageLimits(_MAX_HEADER_BYTES, max_weights_bytes)
        self._welcome: Welcome | None = None
        self._outbox = Outbox()
        self._weights = ReceivedWeights(max_weights_bytes)
        self._last_received_at = self._last_used_at = time.monotonic()
        self._pinged_beats = self.published_version = 0  # the newest version that the gateway has reported
        self.finished = self._is_session_lost = False  # the run is over; the session is over: send hello again
        self.reconnects = self.settings_version = 0  # reconnects: sessions after the first one
        self.acknowledged: dict[str, int] = {"accepted": 0, "dropped": 0, "duplicate": 0}
        self.drops: dict[str, int] = {}  # dropped segments by reason, or by the error that named them
        self.last_drop = ""  # reason and detail of the newest drop
        self.settings: GameSettings = {}  # what the run tells its games

    # -- life ---------------------------------------------------------------------------------------------------

    def connect(self) -> ExperienceSpec:
        """Send hello and wait for welcome; returns the format of segments. May be repeated, to join the present run.

        Raises Refused (bad token, wrong protocol version, ...) or ConnectionLost after `timeout_s`."""
        with self._lock:
            self._context = self._context or self._lock.create_context()
            self.finished = False
            with suppress(RunChanged):  # the caller gets the new run's spec
                self._reconnect(math.inf)
            if self._keepalive_thread is None and self._has_own_context:
                self._keepalive_thread = threading.Thread(target=self._keep_alive, name="actor-keeper", daemon=True)
                self._keepalive_thread.start()
            return self.spec

    @property
    def spec(self) -> ExperienceSpec:
        if self._welcome is None:
            raise Closed("connect() first")
        return self._welcome.spec

    @property
    def run_id(self) -> str:
        return self._welcome.run_id if self._welcome else ""

    def close(self, drain_timeout_s: float = 2.0, reason: str = "done") -> None:
        """Wait for open acknowledgements, send bye and disconnect; never reconnects for that. Idempotent.

        reason: why the actor leaves, for the run record
        """
        if self._closed.is_set() or self._lock.is_owned_elsewhere:
            return
        self._is_closing = True
        try:
            if self._welcome and not self.finished:
                self.drain(drain_timeout_s)
        except ShoalError as error:
            _log.debug("closing without the open acknowledgements: %s", error)
        finally:
            self._closed.set()
            with self._lock:
                if self._socket is not None:
                    if self._welcome and not self.finished:
                        self._send_message(Bye(reason))
                    self._socket.close(linger=200)
            if self._keepalive_thread is not None and self._keepalive_thread is not threading.current_thread():
                self._keepalive_thread.join(timeout=5)
            if self._context is not None and self._has_own_context:
                self._context.destroy(linger=200)

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failure = f"failed: {type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"
        self.close(reason="done" if error is None else failure)

    # -- weights and experience ---------------------------------------------------------------------------------

    def newer_weights(self, than: int) -> tuple[int, dict[str, np.ndarray]] | None:
        """(version, arrays by name) if weights newer than `than` have arrived. Takes microseconds; waits only to
        reconnect, and raises ConnectionLost when that exceeds the client's `timeout_s`. Raises RunChanged when another
        run has taken the address: the client has joined it, with its own spec and weights, and has dropped the old
        run's segments."""
        with self._lock:
            self._pump(math.inf)
        return self.received_weights(than)

    def wait_for_weights(self, than: int = 0, timeout_s: float = 30.0) -> tuple[int, dict[str, np.ndarray]]:
        """Like `newer_weights`, but waits. Raises ConnectionLost after `timeout_s`, or the client's during a reconnect,
        and Closed when the run ends before any have come."""
        self._wait(lambda: self.received_weights(than) or self.finished, timeout_s, "weights")
        if (newer := self.received_weights(than)) is None:
            raise Closed("the run is over")
        return newer

    def received_weights(self, than: int) -> tuple[int, dict[str, np.ndarray]] | None:
        """Like `newer_weights`, of what another thread has received already. Never waits, and takes no lock."""
        latest = self._weights.latest  # one read: another thread may replace it meanwhile
        return latest if latest is not None and latest[0] > than else None

    def wait_for_opponents(self, timeout_s: float = 30.0) -> None:
        """Wait until the first member of the pool has come, in a run with self-play. Raises as `wait_for_weights`."""
        self._wait(lambda: self._weights.opponents or self.finished, timeout_s, "opponents")

    @property
    def opponents(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """The weights of all members of the pool that have come, by version, the oldest first."""
        return self._weights.opponents

    def send(self, segment: Segment, timeout_s: float | None = 600.0) -> int:
        """Send a segment and return its sequence number; waits for credit up to `timeout_s` (None: without end).

        Raises ConnectionLost when no credit came within `timeout_s` or no gateway within the client's; InvalidSegment,
        sending nothing, for a segment that is too large or of an unsupported dtype; Refused; RunChanged as
        `newer_weights`.
        """
        if self._is_closing:
            raise Closed("the client is closed")
        if not self.has_credit or self._is_session_lost:
            self.wait_for_credit(timeout_s)
        with self._lock:
            size_bytes = estimate_segment_bytes(segment)
            if self._welcome is not None and size_bytes > self._welcome.max_message_bytes:
                problem = f"{size_bytes} bytes, the gateway takes {self._welcome.max_message_bytes}"
                raise InvalidSegment("too_large", "segment", problem)
            seq = self._outbox.add(PackedSegment.from_segment(segment))  # a copy, since it may be sent again
            self._send_pending()
            return seq

    def drain(self, timeout_s: float) -> bool:
        """Wait until every segment is acknowledged; False when that takes longer than `timeout_s` (or than the client's
        own, while no gateway answers)."""
        with suppress(ConnectionLost):
            self._wait(lambda: not self._outbox or self.finished, timeout_s, "acknowledgements")
        return not self._outbox

    @property
    def has_credit(self) -> bool:
        """Whether the gateway takes another segment now."""
        return self._outbox.has_credit

    @property
    def num_credits(self) -> int:
        """How many segments the gateway takes now."""
        return self._outbox.num_credits

    def wait_for_credit(self, timeout_s: float | None = None) -> None:
        """Wait until the gateway takes another segment, or the run is over. Raises as `send` does."""
        self._wait(lambda: self._outbox.has_credit or self.finished, timeout_s, "credit")

    @property
    def is_synchronous(self) -> bool:
        """Whether actors pause while they have no credit, so that every step is of the newest weights."""
        return self._welcome is not None and self._welcome.synchronous

    # -- the socket, always under the lock ----------------------------------------------------------------------

    def _wait(self, ready: Callable[[], object], timeout_s: float | None, what: str) -> None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._pump(deadline)
                if ready():
                    return
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise ConnectionLost(f"no {what} from {self._addresses.current} within {timeout_s} s")
                assert self._socket is not None
                arrival = make_arrival_poller(self._socket)
            if arrival is not None:
                arrival.poll(int(min(remaining_s, 0.05) * 1000) + 1)

    def _pump(self, deadline: float) -> None:
        """Handle all arrived messages, and reconnect when the session is over or the gateway silent for too long."""
        if self._closed.is_set() or self._socket is None or self._welcome is None:
            raise Closed("the client is not connected")
        self._last_used_at = time.monotonic()
        # Asking costs half of what it takes to receive nothing: this runs at every pull.
        while not self._is_session_lost and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._last_received_at, self._pinged_beats = self._last_used_at, 0
            self._handle_message(frames)
        if self.finished:
            return
        silent_s = self._last_used_at - self._last_received_at
        if self._is_session_lost or silent_s > self._welcome.timeout_s:
            self._reconnect(deadline)
        elif silent_s > self._welcome.heartbeat_s:
            beats = int(silent_s / self._welcome.heartbeat_s)
            if beats != self._pinged_beats:
                self._pinged_beats = beats
                self._send_message(Ping())

    def _handle_message(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames, self._limits)
        except ProtocolViolation as violation:
            if violation.code == "unknown_kind":
                return  # from a newer gateway: ignore messages of unknown kinds
            raise
        if isinstance(message, Ack):
            self._on_ack(message)
        elif isinstance(message, Credit):
            self._outbox.raise_send_limit(message.send_limit)
            self._send_pending()
        elif isinstance(message, WeightsMessage):
            version = self._weights.take(message, frames)
            self.published_version = max(self.published_version, version or 0)
            self._send_message(self._weights.make_pull())
        elif isinstance(message, OpponentMessage):
            self._weights.take_opponent(message, frames)
            self._send_message(PullOpponent(message.version))
        elif isinstance(message, Ping):
            self._send_message(Pong(message.nonce))
        elif isinstance(message, Bye):
            self.finished = self.finished or message.finished
            self._is_session_lost = not self.finished
        elif isinstance(message, ErrorMessage):
            self._on_error(message)
        elif isinstance(message, ActionMessage):
            self._on_action(message)
        elif isinstance(message, SettingsMessage):
            self.settings, self.settings_version = message.values, message.version

    def _on_action(self, action: ActionMessage) -> None:
        """No gateway sends one to a session of segments."""

    def _on_ack(self, ack: Ack) -> None:
        self._backoff.reset()
        self.acknowledged[ack.status] = self.acknowledged.get(ack.status, 0) + 1
        if ack.status == "dropped":
            if ack.reason not in self.drops:  # the first of each reason is logged: no bad data without a word
                _log.warning("the gateway dropped segment %d (%s: %s)", ack.seq, ack.reason, ack.detail)
            self._count_drop(ack.reason, ack.detail)
        self._outbox.acknowledge(ack.seq)
        self._outbox.raise_send_limit(ack.send_limit)
        self._send_pending()
        self.published_version = max(self.published_version, ack.weights_version)

    def _count_drop(self, reason: str, detail: str) -> None:
        self.last_drop = f"{reason}: {detail}"
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def _on_error(self, error: ErrorMessage) -> None:
        if error.fatal:
            raise Refused(error.code, error.message)
        if error.code in _RETRYABLE_CODES:
            self._is_session_lost = True
            return
        _log.warning("the gateway answered with an error (%s: %s)", error.code, error.message)
        if error.code in _DISCARD_CODES and error.seq is not None and self._outbox.discard(error.seq):
            self._count_drop(error.code, error.message)
            self._is_session_lost = True  # the segments behind it are numbered by the next welcome

    def _reconnect(self, deadline: float) -> None:
        """Open a fresh socket, send hello, and resend every unacknowledged segment.

        Raises ConnectionLost at the deadline or after the client's time, whichever is earlier, Refused, RunChanged when
        another run has answered, or Closed when the client is closed meanwhile."""
        began = time.monotonic()
        deadline = min(deadline, began + self._timeout_s * (_LOST_FACTOR if self._welcome else 1))
        self._is_session_lost = True  # until a welcome, however this call ends
        while not self._is_closing:
            self._pause(min(self._backoff.next_at, deadline))
            if time.monotonic() >= deadline:
                tried = f"no gateway answers at {self._addresses} (tried for {deadline - began:.1f} s)"
                raise ConnectionLost(f"{tried}; {describe_silence(self._server_key, self._welcome is not None)}")
            welcome = self._say_hello(min(deadline, time.monotonic() + _HELLO_TIMEOUT_S))
            self._backoff.record_attempt()
            if welcome is not None:
                if self._addresses.is_other:
                    self._drop_unacknowledged()
                self._addresses.keep()
                self._begin_session(welcome)
                return
            if time.monotonic() - began > _MOVE_S:
                self._addresses.move()
        raise Closed("the client is closed")

    def _pause(self, until: float) -> None:
        """Sleep, unless the client is closed. Without a lock: the handler of a signal may raise at any instruction, and
        would leave one of an Event behind that `close` needs."""
        while not self._is_closing and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _PAUSE_S))

    def _say_hello(self, deadline: float) -> Welcome | None:
        """Connect to the next address, and wait there for the answer."""
        assert self._context is not None
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if not (address := self._addresses.get_next()):
            return None
        self._weights.set_machine(is_on_this_host(address))
        self._socket = connect_socket(self._context, address, self._server_key, self._limits.max_message_bytes)
        who = (self.actor_id, self.incarnation, "shoal-python", self.inference, self.run_id)
        num_acknowledged = 0 if self._addresses.is_other else self._outbox.num_acknowledged
        what = (num_acknowledged, self.offers, self.behaviour)
        self._send_message(Hello(PROTOCOL_VERSION, self._token, *who, *what))
        while (remaining_s := deadline - time.monotonic()) > 0 and not self._is_closing:
            if not self._socket.poll(int(min(remaining_s, 0.1) * 1000) + 1):
                continue
            try:
                message = decode(self._socket.recv_multipart(), self._limits)
            except ProtocolViolation as violation:
                raise ConnectionLost(f"what answers at {address} is no gateway: {violation}") from None
            if isinstance(message, Welcome | Bye):  # Bye: the run begins now
                return message if isinstance(message, Welcome) else None
            if isinstance(message, ErrorMessage) and message.code not in _RETRYABLE_CODES:
                raise Refused(message.code, message.message)
        return None

    def _begin_session(self, welcome: Welcome) -> None:
        before = self._welcome
        self.reconnects += before is not None
        self._last_received_at = self._last_used_at = time.monotonic()
        self._pinged_beats = 0
        self._is_session_lost = False
        self._welcome = welcome
        self.settings, self.settings_version = welcome.settings or {}, welcome.settings_version
        changed = before is not None and before.run_id != welcome.run_id
        if changed:
            self._outbox.clear()
            self._weights.clear()
            self.published_version = 0
        self._outbox.begin_session(welcome.next_seq, welcome.send_limit)
        self.published_version = max(self.published_version, welcome.weights_version)
        self._begin_exchange(welcome, changed)
        if changed:
            raise RunChanged(f"{self._addresses.current} now serves run {welcome.run_id!r}")

    def _drop_unacknowledged(self) -> None:
        """Another gateway has the actor: what the one before may have counted is not sent again."""
        for _ in range(len(self._outbox)):
            self._count_drop("gateway_moved", "was not acknowledged by the gateway before")
        self._outbox.clear()

    def _begin_exchange(self, welcome: Welcome, changed: bool) -> None:
        """Send what a new session begins with. `changed`: it is of another run than the one before."""
        self._send_message(self._weights.make_pull())
        if welcome.spec.self_play:
            self._send_message(PullOpponent(max(self._weights.opponents, default=0)))
        self._send_pending()

    def _send_pending(self) -> None:
        for seq, segment in self._outbox.take_sendable():
            self._send_frames(segment.to_frames(seq))

    def _send_message(self, message: Message) -> None:
        self._send_frames([encode(message)])

    def _send_frames(self, frames: list[bytes]) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._is_session_lost = True  # the socket's buffer is full: the gateway is gone

    def _keep_alive(self) -> None:
        """Ping while the environment's loop is silent, so that the gateway keeps the session of a slow game."""
        assert self._welcome is not None
        while not self._closed.wait(self._welcome.heartbeat_s / 2):
            with self._lock:
                if self._closed.is_set():
                    return
                if not self.finished and time.monotonic() - self._last_used_at > self._welcome.heartbeat_s / 2:
                    self._send_message(Ping())
