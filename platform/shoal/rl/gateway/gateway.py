"""The gateway: where processes that the platform did not start hand in experience and pull weights.

One thread owns one ZeroMQ ROUTER socket. Each round it reads what has arrived, validates it, queues it, commits the
ledger, and only then acknowledges: an actor that was told "accepted" is never forgotten. A learner that is slow shows
up as a full queue, a full queue as missing credit, and missing credit stops the actors; memory is bounded throughout.
Called by the Ray shell, by `local.py` and by tests. Never imports Ray, never unpickles, never waits for an actor.
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
from shoal.rl.gateway.actor_stats import Progress, Roster
from shoal.rl.gateway.send_queue import Answers
from shoal.rl.gateway.sessions import Session, Sessions
from shoal.rl.gateway.zmq_listener import address_of, listen
from shoal.rl.spec import GatewaySpec, require_message_room
from shoal.weights import WeightSnapshot, WeightSource
from shoal.wire import DropReason, ExperienceSpec, Limits, Segment, decode, encode, unpack_segment
from shoal.wire.messages import (
    PROTOCOL_VERSION,
    Bye,
    Error,
    Hello,
    Ping,
    Pong,
    Pull,
    SegmentMessage,
    Weights,
    Welcome,
)

_ROUND = 256  # messages handled between two commits, at most
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
        self._limits = Limits(max_message_bytes=spec.max_message_bytes)
        require_message_room(spec, experience)
        self._progress = Progress(target_return)
        self._roster, self._sessions, self._answers = Roster(), Sessions(), Answers()
        self._unwritable = False
        self._latest: WeightSnapshot | None = None
        self._lock = threading.Lock()  # guards the state above; never held while waiting
        self._stopping = threading.Event()
        self._finished = False
        self._threads: list[threading.Thread] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # a gateway that never started owns no socket
        self._socket: zmq.Socket[bytes]
        self.port = 0

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, weights_timeout_s: float = 60.0) -> None:
        """Wait for the first weights, bind, and serve. Raises ConfigError when the port that was asked for is taken."""
        deadline = time.monotonic() + weights_timeout_s
        while self._latest is None and (left_s := deadline - time.monotonic()) > 0:
            self._latest = self._weights.wait_newer(0, left_s)  # None at once from a store that is on its way back
        if self._latest is None:
            raise ConfigError("weights", None, f"none were published within {weights_timeout_s} s", "start the learner")
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context = zmq.Context()
        remembered_port = int(self.queue.ledger.fact("port") or 0)
        self._socket, self.port = listen(self._context, self.spec, remembered_port, self._curve_keys)
        self.queue.ledger.set_fact("port", str(self.port))  # a restarted gateway must be found where it was
        with suppress(LedgerUnwritable):  # the first round writes it
            self.queue.ledger.commit()
        if (before := self.queue.ledger.fact("progress")) is not None:
            self._progress.restore(before)
        self.queue.on_room = self._wake
        for target in (self._serve, self._follow_weights):
            thread = threading.Thread(target=target, name=f"gateway{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def address(self) -> str:
        return address_of(self.spec.host, self.port)

    @property
    def alive(self) -> bool:
        """Whether its threads are there to serve; True before `start` and after `close`."""
        return self._stopping.is_set() or all(thread.is_alive() for thread in self._threads)

    def close(self, finished: bool = False) -> None:
        """Say bye to every actor, stop, and drop what is queued as SHUTDOWN. Idempotent.

        `finished` tells the actors that the run is over; otherwise they come back.
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
        self.queue.on_room = lambda: None
        self.queue.ledger.set_fact("progress", self._progress.to_json())
        try:
            self.queue.close()
        finally:
            self._context.destroy(linger=500)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def stats(self) -> dict[str, Any]:
        """A copy of everything countable: progress, actors, queue, accounting. Plain values, ready for JSON."""
        with self._lock:
            version = self._latest.version if self._latest else 0
            return {
                "pid": os.getpid(),
                "weights_version": version,
                **self._progress.to_dict(),
                "queue_depth": len(self.queue),
                "queue_capacity": self.queue.capacity,
                "actors": [actor.to_dict(version) for actor in self._roster],
                "counted_at": time.time(),
                "segments": self.queue.ledger.totals().to_dict(),
            }

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        """(time, kind, details) of what happened since the last call: joins, losses, refusals."""
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
                    for route in self._sessions.silent(self.spec.timeout_s):
                        self._end_session(route, "timed out")
                self._answer_round()
        with self._lock:
            if not self._committed():
                self._answers.clear()  # what was not written down is told to nobody
            for route in list(self._sessions):
                self._answers.add(
                    route, Bye("the run is over" if self._finished else "the gateway stops", self._finished)
                )
            self._send_all()
        self._socket.close(linger=500)

    def _follow_weights(self) -> None:
        while not self._stopping.is_set():
            current = self._latest.version if self._latest else 0
            newer = self._weights.wait_newer(current, timeout_s=0.25)  # also how long close() may take
            if newer is not None:
                self._latest = newer  # one reference: readers see the old snapshot or the new one
                self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already
        except OSError:
            if not self._stopping.is_set():
                raise

    def _receive_round(self) -> None:
        for _ in range(_ROUND):
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(route, frames)

    def _answer_round(self) -> None:
        """Commit first, then hand out credit, acknowledgements and weights: nothing of it while that cannot be done."""
        if not self._committed():
            return self._send_all(is_written=False)
        self._sessions.grant_credit(self.queue, self.spec.max_credits)
        snapshot = self._latest
        payload: list[bytes] | None = None
        for route, session in self._sessions.items():
            if not session.is_welcome:
                self._answers.add(route, self._welcome(session))
            if (credit := session.take_credit()) is not None:
                self._answers.add(route, credit)
            self._post_acks(route, session)
            if snapshot and session.pull_newer_than is not None and snapshot.version > session.pull_newer_than:
                payload = payload or [encode(Weights(snapshot.version, snapshot.sha256)), snapshot.payload]
                self._answers.add_frames(route, payload)
                session.pull_newer_than = None
        self._send_all()

    def _committed(self) -> bool:
        """Write the ledger; False when that cannot be done now. That it has begun and ended is noted."""
        try:
            self.queue.ledger.commit()
        except LedgerUnwritable as error:
            if not self._unwritable:
                self._progress.event("ledger_unwritable", problem=str(error))
            self._unwritable = True
            return False
        if self._unwritable:
            self._progress.event("ledger_writable")
        self._unwritable = False
        return True

    def _post_acks(self, route: bytes, session: Session) -> None:
        """Acks are sent after the next commit."""
        for ack in session.take_acks(self._latest.version if self._latest else 0):
            self._answers.add(route, ack)

    def _send_all(self, is_written: bool = True) -> None:
        for route, frames, _ in self._answers.take(is_written):
            try:
                self._socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=len(frames[-1]) < 65536)
            except zmq.ZMQError as error:
                # Gone (EHOSTUNREACH) or not reading (EAGAIN): either way it comes back with hello, and resends.
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._end_session(route, "unreachable" if error.errno == zmq.EHOSTUNREACH else "does not read")

    # -- messages -----------------------------------------------------------------------------------------------

    def _handle(self, route: bytes, frames: list[bytes]) -> None:
        session = self._sessions.get(route)
        if session is not None:
            session.last_seen = time.monotonic()
        try:
            message = decode(frames, self._limits)
        except ProtocolViolation as violation:
            self._refuse(route, violation.code, violation.message)
            return
        if isinstance(message, Hello):
            self._on_hello(route, message)
        elif session is None:
            self._refuse(route, "hello_required", "say hello first")
        elif isinstance(message, SegmentMessage) and message.seq < 0:
            self._refuse(route, "malformed", "segments are counted from 0")
        elif isinstance(message, SegmentMessage):
            self._on_segment(route, session, message, frames[1:])
        elif isinstance(message, Pull):
            session.pull_newer_than = message.newer_than
        elif isinstance(message, Ping):
            self._answers.add(route, Pong(message.nonce))
        elif isinstance(message, Bye):
            self._end_session(route, "bye", message=_printable(message.reason))
        elif not isinstance(message, Pong):
            self._refuse(route, "malformed", f"{type(message).__name__} goes from the gateway to the actor")

    def _refuse(self, route: bytes, code: str, message: str) -> None:
        self._progress.protocol_errors[code] += 1
        self._answers.add(route, Error(code, message, code in _FATAL))

    def _on_hello(self, route: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            known = f"this gateway speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}"
            return self._refuse(route, "bad_version", known)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            self._refuse(route, "bad_token", "the token is not the one of this gateway")
            return self._progress.refused(_printable(hello.actor_id))
        if not 1 <= len(hello.actor_id) <= 64 or not hello.actor_id.isprintable():
            return self._refuse(route, "malformed", "actor_id takes 1 to 64 printable characters")
        if not 0 <= hello.incarnation < 2**63:
            return self._refuse(route, "malformed", "incarnation takes 0 to 2^63-1")
        newest = self.queue.ledger.newest_incarnation(hello.actor_id)
        if newest is not None and hello.incarnation < newest:
            return self._refuse(route, "stale_incarnation", f"incarnation {newest} has been seen: use a larger one")
        self._supersede(route, hello)
        self._enter(route, (hello.actor_id, hello.incarnation))

    def _supersede(self, route: bytes, hello: Hello) -> None:
        """End other connections of the same actor: an older incarnation for good, the same one because it is back."""
        self._answers.forget(route)
        self._end_session(route, "said hello again")
        if (other := self._sessions.route_of(hello.actor_id)) is not None:
            is_older = self._sessions[other].key[1] < hello.incarnation
            if is_older:
                self._refuse(other, "superseded", f"incarnation {hello.incarnation} has taken over")
            self._end_session(other, "superseded" if is_older else "reconnected")

    def _enter(self, route: bytes, key: ActorKey) -> None:
        """A new session. It is welcomed when all that came with it have shared the credit."""
        for older in self._roster.forget_older(key):
            self._progress.event("actor_restarted", actor_id=older.actor_id, steps_before=older.steps)
        next_seq = self.queue.ledger.open_account(key).next_seq
        self._sessions[route] = Session(key, self._roster.join(key), next_seq)
        self._progress.event("actor_joined", actor_id=key[0], incarnation=key[1], next_seq=next_seq)

    def _welcome(self, session: Session) -> Welcome:
        session.is_welcome, session.told_limit = True, session.send_limit
        return Welcome(
            PROTOCOL_VERSION,
            self._run_id,
            self.experience,
            self.queue.ledger.account(session.key).next_seq,
            session.send_limit,
            self._latest.version if self._latest else 0,
            self.spec.heartbeat_s,
            self.spec.timeout_s,
            self.spec.max_message_bytes,
        )

    def _on_segment(self, route: bytes, session: Session, message: SegmentMessage, frames: Sequence[bytes]) -> None:
        ledger, key, seq = self.queue.ledger, session.key, message.seq
        expected = ledger.account(key).next_seq
        if seq < expected:
            ledger.count_duplicate(key)
            return session.settle(seq, "duplicate")
        if seq > expected:
            return self._refuse(route, "sequence_gap", f"segment {seq} came, {expected} was expected")
        reason, detail = self._admit(session, message, frames)
        if reason is not None:
            ledger.admit(key, seq, reason)
        session.send_limit = max(session.send_limit, seq + 1)
        session.settle(seq, "dropped" if reason else "accepted", reason or "", detail)

    def _admit(
        self, session: Session, message: SegmentMessage, frames: Sequence[bytes]
    ) -> tuple[DropReason | None, str]:
        """Validate and queue. Returns why the segment must be dropped and a detail, or (None, "") when it is queued."""
        version = self._latest.version if self._latest else 0
        try:
            segment = unpack_segment(message, frames, self.experience)
            if int(segment.versions.max()) > version:
                problem = f"{segment.versions.max()} was never published"
                raise InvalidSegment(DropReason.INVALID_RANGE, "versions", problem)
        except InvalidSegment as error:
            detail = f"{error.field}: {error.problem}"
            self._progress.invalid_segment(session.progress, error.reason, detail)
            return DropReason(error.reason), detail
        self._progress.segment(session.progress, segment)
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
        session = self._sessions.end(route)
        if session is not None:
            self._post_acks(route, session)
            self._roster.leave(session.key)
            kind = "actor_lost" if reason in ("timed out", "unreachable", "does not read") else "actor_left"
            self._progress.event(kind, actor_id=session.key[0], incarnation=session.key[1], reason=reason, **details)


def _printable(text: str) -> str:
    """What an actor says of itself, fit for a log."""
    return "".join(character if character.isprintable() else "?" for character in text[:64])
