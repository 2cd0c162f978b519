"""The gateway: external actors send experience to it and pull weights from it.

One thread owns one ZeroMQ ROUTER socket. Each round it reads all arrived messages, validates and queues them, commits
the ledger, and only then acknowledges: an acknowledged segment is never lost. A slow learner fills the queue, a full
queue grants no credit, and without credit the actors stop; memory is bounded throughout. Called by the Ray workers, by
`local_loop.py` and by tests. Never imports Ray, never unpickles, never waits for an actor.
"""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from shoal.errors import Closed, ConfigError, InvalidSegment, LedgerUnwritable, ProtocolViolation
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorTable, RunProgress
from shoal.rl.gateway.send_queue import SendQueue
from shoal.rl.gateway.sessions import Session, Sessions
from shoal.rl.gateway.zmq_listener import bind_router, format_tcp_address
from shoal.rl.spec import GatewaySpec, require_segment_fits
from shoal.weights import WeightSnapshot, WeightSource
from shoal.wire import DropReason, ExperienceSpec, MessageLimits, Segment, decode, encode, unpack_segment
from shoal.wire.messages import (
    PROTOCOL_VERSION,
    Bye,
    ErrorMessage,
    Hello,
    Ping,
    Pong,
    Pull,
    SegmentMessage,
    WeightsMessage,
    Welcome,
)

_MAX_ROUND_MESSAGES = 256  # messages handled between two commits, at most
_FATAL = frozenset({"bad_token", "bad_version", "stale_incarnation", "superseded"})


class Gateway:
    """Serve actors on `spec.host:spec.port` from `start()` until `close()`. Safe to call from any thread."""

    def __init__(
        self,
        spec: GatewaySpec,
        experience: ExperienceSpec,
        queue: ExperienceQueue,
        weights: WeightSource,
        token: str,
        run_id: str = "",
        target_return: float | None = None,
        curve_keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        """`curve_keys` are (public, secret) as zmq.curve_keypair() makes them; required when `spec.curve`."""
        if not token:
            raise ConfigError("token", token, "is empty", "a gateway without a token would take anybody's experience")
        if spec.curve and curve_keys is None:
            raise ConfigError("gateway.curve", True, "needs a key pair", "pass curve_keys=zmq.curve_keypair()")
        self.spec, self.experience, self.queue = spec, experience, queue
        self._weights, self._token, self._run_id, self._curve_keys = weights, token, run_id, curve_keys
        self._limits = MessageLimits(max_message_bytes=spec.max_message_bytes)
        require_segment_fits(spec, experience)
        self._progress = RunProgress(target_return)
        self._actors, self._sessions, self._send_queue = ActorTable(), Sessions(), SendQueue()
        self._is_ledger_unwritable = False
        self._latest_weights: WeightSnapshot | None = None
        self._lock = threading.Lock()  # guards the state above; never held while waiting
        self._stopping = threading.Event()
        self._finished = False
        self._threads: list[threading.Thread] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # a gateway that never started owns no socket
        self._socket: zmq.Socket[bytes]
        self.port = 0

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, weights_timeout_s: float = 60.0) -> None:
        """Wait for the first weights, bind, and serve. Raises ConfigError when the configured port is taken."""
        deadline = time.monotonic() + weights_timeout_s
        while self._latest_weights is None and (left_s := deadline - time.monotonic()) > 0:
            self._latest_weights = self._weights.wait_newer(0, left_s)  # returns None at once while the store restarts
        if self._latest_weights is None:
            raise ConfigError("weights", None, f"none were published within {weights_timeout_s} s", "start the learner")
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context = zmq.Context()
        remembered_port = int(self.queue.ledger.get_fact("port") or 0)
        self._socket, self.port = bind_router(self._context, self.spec, remembered_port, self._curve_keys)
        self.queue.ledger.set_fact("port", str(self.port))  # a restarted gateway must keep its port
        with suppress(LedgerUnwritable):  # the first round writes it
            self.queue.ledger.commit()
        if (before := self.queue.ledger.get_fact("progress")) is not None:
            self._progress.restore(before)
        self.queue.on_space_freed = self._wake
        for target in (self._serve, self._follow_weights):
            thread = threading.Thread(target=target, name=f"gateway{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def address(self) -> str:
        return format_tcp_address(self.spec.host, self.port)

    @property
    def is_alive(self) -> bool:
        """Whether its threads run; True before `start` and after `close`."""
        return self._stopping.is_set() or all(thread.is_alive() for thread in self._threads)

    def close(self, finished: bool = False) -> None:
        """Say bye to every actor, stop, and drop the queued segments as SHUTDOWN. Idempotent.

        `finished` makes the actors end because the run is over; otherwise they reconnect.
        """
        if self._stopping.is_set():
            return
        self._finished = finished
        self._stopping.set()
        if self._context is None:
            self.queue.close()
            return
        self._wake()
        for thread in self._threads:
            thread.join(timeout=10)
        self.queue.on_space_freed = lambda: None
        self.queue.ledger.set_fact("progress", self._progress.to_json())
        try:
            self.queue.close()
        finally:
            self._context.destroy(linger=500)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def stats(self) -> dict[str, Any]:
        """A copy of all counts: progress, actors, queue, accounting. Plain values, ready for JSON."""
        with self._lock:
            version = self._latest_weights.version if self._latest_weights else 0
            return {
                "pid": os.getpid(),
                "weights_version": version,
                **self._progress.to_dict(),
                "queue_depth": len(self.queue),
                "queue_capacity": self.queue.capacity,
                "actors": [actor.to_dict(version) for actor in self._actors],
                "counted_at": time.time(),
                "segments": self.queue.ledger.get_totals().to_dict(),
            }

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        """(time, kind, details) of the events since the last call: joins, losses, rejections."""
        with self._lock:
            return self._progress.take_events()

    # -- the thread that owns the socket ------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        sweep_at = time.monotonic() + self.spec.heartbeat_s
        while not self._stopping.is_set():
            ready = dict(poller.poll(timeout=int(self.spec.heartbeat_s * 1000)))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            with self._lock:
                if self._socket in ready:
                    self._receive_round()
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + self.spec.heartbeat_s
                    self.queue.ledger.set_fact("progress", self._progress.to_json())
                    for route in self._sessions.find_silent(self.spec.timeout_s):
                        self._end_session(route, "timed out")
                self._send_round()
        with self._lock:
            if not self._try_commit():
                self._send_queue.clear()  # unwritten counts must not be acknowledged
            for route in list(self._sessions):
                self._send_queue.add(
                    route, Bye("the run is over" if self._finished else "the gateway stops", self._finished)
                )
            self._send_all()
        self._socket.close(linger=500)

    def _follow_weights(self) -> None:
        while not self._stopping.is_set():
            current = self._latest_weights.version if self._latest_weights else 0
            newer = self._weights.wait_newer(current, timeout_s=0.25)  # also how long close() may take
            if newer is not None:
                self._latest_weights = newer  # one reference: readers see the old snapshot or the new one
                self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # the pipe is full of wake-ups
        except OSError:
            if not self._stopping.is_set():
                raise

    def _receive_round(self) -> None:
        for _ in range(_MAX_ROUND_MESSAGES):
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle_message(route, frames)

    def _send_round(self) -> None:
        """Commit first, then send credit, acknowledgements and weights; without a commit, nothing about the ledger."""
        if not self._try_commit():
            return self._send_all(is_written=False)
        self._sessions.grant_credit(self.queue, self.spec.max_credits)
        snapshot = self._latest_weights
        payload: list[bytes] | None = None
        for route, session in self._sessions.items():
            if not session.is_welcomed:
                self._send_queue.add(route, self._make_welcome(session))
            if (credit := session.take_credit()) is not None:
                self._send_queue.add(route, credit)
            self._queue_acks(route, session)
            if snapshot and session.pull_newer_than is not None and snapshot.version > session.pull_newer_than:
                payload = payload or [encode(WeightsMessage(snapshot.version, snapshot.sha256)), snapshot.payload]
                self._send_queue.add_frames(route, payload)
                session.pull_newer_than = None
        self._send_all()

    def _try_commit(self) -> bool:
        """Write the ledger; False when that fails now. Records events when the failure begins and ends."""
        try:
            self.queue.ledger.commit()
        except LedgerUnwritable as error:
            if not self._is_ledger_unwritable:
                self._progress.record_event("ledger_unwritable", problem=str(error))
            self._is_ledger_unwritable = True
            return False
        if self._is_ledger_unwritable:
            self._progress.record_event("ledger_writable")
        self._is_ledger_unwritable = False
        return True

    def _queue_acks(self, route: bytes, session: Session) -> None:
        """Acks are sent after the next commit."""
        for ack in session.take_acks(self._latest_weights.version if self._latest_weights else 0):
            self._send_queue.add(route, ack)

    def _send_all(self, is_written: bool = True) -> None:
        for route, frames, _ in self._send_queue.take(is_written):
            try:
                self._socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=len(frames[-1]) < 65536)
            except zmq.ZMQError as error:
                # Gone (EHOSTUNREACH) or not reading (EAGAIN): in both cases the actor reconnects with hello, and
                # resends.
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._end_session(route, "unreachable" if error.errno == zmq.EHOSTUNREACH else "does not read")

    # -- messages -----------------------------------------------------------------------------------------------

    def _handle_message(self, route: bytes, frames: list[bytes]) -> None:
        session = self._sessions.get(route)
        if session is not None:
            session.last_seen = time.monotonic()
        try:
            message = decode(frames, self._limits)
        except ProtocolViolation as violation:
            self._reject(route, violation.code, violation.message)
            return
        if isinstance(message, Hello):
            self._on_hello(route, message)
        elif session is None:
            self._reject(route, "hello_required", "say hello first")
        elif isinstance(message, SegmentMessage) and message.seq < 0:
            self._reject(route, "malformed", "segments are counted from 0")
        elif isinstance(message, SegmentMessage):
            self._on_segment(route, session, message, frames[1:])
        elif isinstance(message, Pull):
            session.pull_newer_than = message.newer_than
        elif isinstance(message, Ping):
            self._send_queue.add(route, Pong(message.nonce))
        elif isinstance(message, Bye):
            self._end_session(route, "bye", message=_to_printable(message.reason))
        elif not isinstance(message, Pong):
            self._reject(
                route, "malformed", f"{type(message).__struct_config__.tag} goes from the gateway to the actor"
            )

    def _reject(self, route: bytes, code: str, message: str) -> None:
        self._progress.protocol_errors[code] += 1
        self._send_queue.add(route, ErrorMessage(code, message, code in _FATAL))

    def _on_hello(self, route: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            known = f"this gateway speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}"
            return self._reject(route, "bad_version", known)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            self._reject(route, "bad_token", "the token is not the one of this gateway")
            return self._progress.record_rejected_actor(_to_printable(hello.actor_id))
        if not 1 <= len(hello.actor_id) <= 64 or not hello.actor_id.isprintable():
            return self._reject(route, "malformed", "actor_id takes 1 to 64 printable characters")
        if not 0 <= hello.incarnation < 2**63:
            return self._reject(route, "malformed", "incarnation takes 0 to 2^63-1")
        newest = self.queue.ledger.newest_incarnation(hello.actor_id)
        if newest is not None and hello.incarnation < newest:
            return self._reject(route, "stale_incarnation", f"incarnation {newest} has been seen: use a larger one")
        self._supersede(route, hello)
        self._open_session(route, (hello.actor_id, hello.incarnation))

    def _supersede(self, route: bytes, hello: Hello) -> None:
        """End other connections of the actor: an older incarnation for good, the same one because it has
        reconnected."""
        self._send_queue.drop_route(route)
        self._end_session(route, "said hello again")
        if (other := self._sessions.find_route(hello.actor_id)) is not None:
            is_older = self._sessions[other].key[1] < hello.incarnation
            if is_older:
                self._reject(other, "superseded", f"incarnation {hello.incarnation} has taken over")
            self._end_session(other, "superseded" if is_older else "reconnected")

    def _open_session(self, route: bytes, key: ActorKey) -> None:
        """Open a new session. It is welcomed after all hellos of this round have shared the credit."""
        for older in self._actors.remove_older(key):
            self._progress.record_event("actor_restarted", actor_id=older.actor_id, steps_before=older.steps)
        next_seq = self.queue.ledger.open_account(key).next_seq
        self._sessions[route] = Session(key, self._actors.join(key), next_seq)
        self._progress.record_event("actor_joined", actor_id=key[0], incarnation=key[1], next_seq=next_seq)

    def _make_welcome(self, session: Session) -> Welcome:
        session.is_welcomed, session.reported_limit = True, session.send_limit
        return Welcome(
            PROTOCOL_VERSION,
            self._run_id,
            self.experience,
            self.queue.ledger.get_account(session.key).next_seq,
            session.send_limit,
            self._latest_weights.version if self._latest_weights else 0,
            self.spec.heartbeat_s,
            self.spec.timeout_s,
            self.spec.max_message_bytes,
        )

    def _on_segment(self, route: bytes, session: Session, message: SegmentMessage, frames: Sequence[bytes]) -> None:
        ledger, key, seq = self.queue.ledger, session.key, message.seq
        expected = ledger.get_account(key).next_seq
        if seq < expected:
            ledger.count_duplicate(key)
            return session.add_ack(seq, "duplicate")
        if seq > expected:
            return self._reject(route, "sequence_gap", f"segment {seq} came, {expected} was expected")
        reason, detail = self._admit(session, message, frames)
        if reason is not None:
            ledger.record_received(key, seq, reason)
        session.send_limit = max(session.send_limit, seq + 1)
        session.add_ack(seq, "dropped" if reason else "accepted", reason or "", detail)

    def _admit(
        self, session: Session, message: SegmentMessage, frames: Sequence[bytes]
    ) -> tuple[DropReason | None, str]:
        """Validate and queue. Returns why the segment must be dropped and a detail, or (None, "") when it is queued."""
        version = self._latest_weights.version if self._latest_weights else 0
        try:
            segment = unpack_segment(message, frames, self.experience)
            if int(segment.versions.max()) > version:
                problem = f"{segment.versions.max()} was never published"
                raise InvalidSegment(DropReason.INVALID_RANGE, "versions", problem)
        except InvalidSegment as error:
            detail = f"{error.field}: {error.problem}"
            self._progress.record_invalid_segment(session.progress, error.reason, detail)
            return DropReason(error.reason), detail
        self._progress.record_segment(session.progress, segment)
        lag = version - segment.oldest_version
        if lag > self.spec.max_version_lag:
            return DropReason.STALE_ADMISSION, f"{lag} versions old, at most {self.spec.max_version_lag}"
        return self._enqueue(session, message.seq, segment)

    def _enqueue(self, session: Session, seq: int, segment: Segment) -> tuple[DropReason | None, str]:
        if seq >= session.send_limit:
            return DropReason.OVER_CREDIT, f"the send limit is {session.send_limit}"
        try:
            queued = self.queue.put(session.key, seq, segment)
        except Closed:
            return DropReason.SHUTDOWN, "the run is ending"
        return (None, "") if queued else (DropReason.OVER_CREDIT, "the queue is full")

    def _end_session(self, route: bytes, reason: str, **details: str) -> None:
        session = self._sessions.remove(route)
        if session is not None:
            self._queue_acks(route, session)
            self._actors.leave(session.key)
            kind = "actor_lost" if reason in ("timed out", "unreachable", "does not read") else "actor_left"
            self._progress.record_event(
                kind, actor_id=session.key[0], incarnation=session.key[1], reason=reason, **details
            )


def _to_printable(text: str) -> str:
    """An actor's text about itself, made safe for a log."""
    return "".join(character if character.isprintable() else "?" for character in text[:64])
