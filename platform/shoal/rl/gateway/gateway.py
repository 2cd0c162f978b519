"""The gateway: external actors send experience to it and pull weights from it.

One thread owns its connections. Each round it reads all arrived messages, validates and queues them, commits the
ledger, and only then acknowledges: an acknowledged segment is never lost. A slow learner fills the queue, a full queue
grants no credit, and without credit the actors stop; memory is bounded throughout. Called by the Ray workers, by
`local_loop.py` and by tests. Never imports Ray, never unpickles, never waits for an actor.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import zmq

from shoal.atomic_file import make_folder
from shoal.errors import ConfigError, LedgerUnwritable, ProtocolViolation
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.rl.experience.segment_log import open_log
from shoal.rl.gateway.admission import Admission
from shoal.rl.gateway.connections import Connections
from shoal.rl.gateway.handshake import Handshake
from shoal.rl.gateway.listener import EpisodeFront, Listener
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.gateway.remote_inference import RemoteInference
from shoal.rl.gateway.sessions import LOCAL, NEW_LAPSE_S, REMOTE, Session, to_printable
from shoal.rl.gateway.state import GatewaySetting, GatewayState
from shoal.rl.gateway.user_episodes import EpisodeRejection, UserEpisodes
from shoal.rl.gateway.zmq_listener import format_address
from shoal.rl.spec import RLSpec
from shoal.weights import WeightSource
from shoal.weights.shared_memory import SharedPayloads
from shoal.wire import Message
from shoal.wire.messages import (
    ActionMessage,
    ActMessage,
    ActsMessage,
    Bye,
    Hello,
    OpponentMessage,
    Ping,
    Pong,
    Pull,
    PullOpponent,
    SegmentMessage,
    WeightsMessage,
)


class Gateway:
    """Serve actors on `spec.host:spec.port` from `start()` until `close()`. Safe to call from any thread.

    opponents:    for self-play
    group_commit: of the queue, with `durable: store`
    listener:     of a run with WebSocket, once it has started
    """

    def __init__(
        self,
        setting: GatewaySetting,
        queue: ExperienceQueue,
        weights: WeightSource,
        opponents: OpponentPool | None = None,
        group_commit: GroupCommit | None = None,
    ) -> None:
        self.setting = setting
        self.spec = setting.spec
        self.experience = setting.experience
        self.queue = queue
        self._weights = weights
        self._state = state = GatewayState(setting, queue, opponents, group_commit)
        self._progress = state.progress
        self._sessions = state.sessions
        self._send_queue = state.send_queue
        self.opponents, self._group_commit = opponents, group_commit
        self._admission = Admission(state)
        self._inference = RemoteInference(state, self._admission.store, self._wake)
        self._users: UserEpisodes | None = None
        self._front: EpisodeFront | None = None
        self._handshake = Handshake(state, self._inference)
        self._is_ledger_unwritable = False
        self._sent_version = 0  # to all sessions that wait for it
        self._shared_payloads = SharedPayloads()
        self._lock = threading.Lock()  # guards the state above; never held while waiting
        self._stopping = threading.Event()
        self._finished = False
        self._threads: list[threading.Thread] = []
        self._connections: Connections  # once it has started
        self.listener: Listener | None = None
        self.port = 0

    @classmethod
    def of_run(cls, spec: RLSpec, setting: GatewaySetting, weights: WeightSource) -> Self:
        """The gateway of a run: with its ledger, queue and pool of opponents, which continue from its files."""
        site = setting.site
        make_folder(site.folder)  # absent on a host that shares no files with the driver's
        opponents = OpponentPool.of_run(spec.self_play, site.folder)
        queue = ExperienceQueue(spec.queue_capacity, Ledger(site.folder / LEDGER_NAME))
        has_log = spec.gateway.durable == "store"
        commit = GroupCommit(open_log(site.name, setting.experience), queue) if has_log else None
        return cls(setting, queue, weights, opponents, commit)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, weights_timeout_s: float = 60.0, release_ports: Callable[[], None] = lambda: None) -> None:
        """Wait for the first weights, bind, and serve. Raises ConfigError when the configured port is taken.

        release_ports: is called before it binds them
        """
        deadline = time.monotonic() + weights_timeout_s
        while self._state.weights is None and (left_s := deadline - time.monotonic()) > 0:
            self._state.weights = self._weights.wait_newer(0, left_s)  # returns None at once while the store restarts
        if self._state.weights is None:
            raise ConfigError("weights", None, f"none were published within {weights_timeout_s} s", "start the learner")
        if self.setting.learns_from_users:
            self._users = UserEpisodes(self._state, self._inference)
        release_ports()
        self._connections = Connections(self.setting, self.queue.ledger)
        self.port, self.listener = self._connections.port, self._connections.listener
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._connections.poller.register(self._wake_read, zmq.POLLIN)
        with suppress(LedgerUnwritable):  # the first round writes it
            self.queue.ledger.commit()
        self._state.restore()
        if self.setting.front is not None:
            self._front = self.setting.front.open(self._state, self._admission.store, self._wake)
        self.queue.on_space_freed = self._wake
        for target in (self._serve, self._follow_weights):
            thread = threading.Thread(target=target, name=f"gateway{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def address(self) -> str:
        return format_address("tcp", self.spec.host, self.port)

    @property
    def is_alive(self) -> bool:
        """Whether its threads run; True before `start` and after `close`."""
        has_log = self._group_commit is None or self._group_commit.is_alive
        return self._stopping.is_set() or (
            has_log
            and self._inference.is_alive
            and (self._front is None or self._front.is_alive)
            and all(thread.is_alive() for thread in self._threads)
        )

    def close(self, finished: bool = False) -> None:
        """Say bye to every actor, stop, and drop the queued segments as SHUTDOWN. Idempotent.

        `finished` makes the actors end because the run is over; otherwise they reconnect.
        """
        if self._stopping.is_set():
            return
        self._finished = finished
        self._stopping.set()
        if not self.port:  # it never started
            self.queue.close()
            return
        self._wake()
        for thread in self._threads:
            thread.join(timeout=10)
        if self._front is not None:
            self._front.close()
        self.queue.on_space_freed = lambda: None
        self._inference.close()
        self.queue.ledger.set_fact("progress", self._progress.dump_state())
        try:
            self.queue.close(finished)
        finally:
            self._connections.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._state.close()

    def stats(self) -> dict[str, Any]:
        """A copy of all counts: progress, actors, queue, accounting. Plain values, ready for JSON."""
        with self._lock:
            credit = sum(self._sessions.compute_open_credit().values())
            return {
                "pid": os.getpid(),
                "weights_version": self._state.version,
                **self._progress.to_dict(),
                "progress": self._progress.dump_state(),
                "settings": dict(self._state.settings),
                "queue_depth": len(self.queue),
                "queue_slots": {"capacity": self.queue.capacity, "credit": credit},  # all, and what sessions may fill
                "actors": [actor.to_dict(self._state.weights) for actor in self._state.actors],
                "quarantined": dict(self.queue.ledger.quarantined),
                "counted_at": time.time(),
                "segments": self.queue.ledger.get_totals().to_dict(),
                "remote_inference": self._inference.get_counts(),
                "user_episodes": self._users.get_counts() if self._users else None,
                "sessions": self._front.get_counts() if self._front else None,
                **self._state.get_counts(),
            }

    def answer_user(self, request: EpisodeRequest, timeout_s: float) -> EpisodeAnswer | EpisodeRejection:
        """Act, reward or end for a user of the run's endpoint. From any thread. Raises TimeoutError: the queue is full
        for so long, or the ledger cannot be written."""
        if self._users is None:
            return EpisodeRejection(404, "this run does not learn from its endpoint's users: learn_from_endpoint=true")
        reply = self._users.put(request)
        self._wake()
        return reply.result(timeout_s)

    def connect_front(self, url: str) -> None:
        """Name the endpoint that computes the policy for the front's episodes. From any thread."""
        if self._front is not None:
            self._front.connect(url)

    def set_settings(self, values: Mapping[str, bool | int | float | str]) -> None:
        """Tell all games these settings, unless they are the present ones. From any thread."""
        with self._lock:
            self._state.change_settings(values)
        self._wake()

    def reset_returns(self) -> None:
        """The mean return is of episodes that end from now on."""
        with self._lock:
            self._progress.forget_window()

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        """(time, kind, details) of the events since the last call: joins, losses, rejections."""
        with self._lock:
            return self._progress.take_events()

    # -- the thread that owns the socket ------------------------------------------------------------------------

    def _serve(self) -> None:
        sweep_at = time.monotonic() + self.spec.heartbeat_s
        interval_ms = int(1000 * min(self.spec.heartbeat_s, NEW_LAPSE_S))
        while not self._stopping.is_set():
            ready = dict(self._connections.poller.poll(interval_ms))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            with self._lock:
                for route, message, frames in self._connections.receive(ready):
                    if message is None:
                        self._handshake.end_session(route, "disconnected")
                    else:
                        self._handle_message(route, message, frames)
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + self.spec.heartbeat_s
                    self._sweep()
                self._send_round()
        with self._lock:
            if not self._try_commit():
                self._send_queue.clear()  # unwritten counts must not be acknowledged
            bye = Bye("the run is over" if self._finished else "the gateway stops", self._finished)
            for route in list(self._sessions):
                self._send_queue.add(route, bye)
            self._send_all()
            if self._users is not None:
                self._users.close()
        self._shared_payloads.close()

    def _sweep(self) -> None:
        """Look, once a heartbeat, for what time has changed: quarantines, silent actors, abandoned episodes."""
        ledger, progress = self.queue.ledger, self._progress
        ledger.set_fact("progress", progress.dump_state())
        ledger.load_quarantine()
        progress.record_quarantine(ledger.quarantined)
        self._admission.record_unlearnable()
        progress.record_shortage(self._sessions.describe_shortage())
        since_s = time.monotonic() - self.spec.timeout_s
        silent = [route for route, session in self._sessions.items() if session.last_seen < since_s]
        if self.listener is not None:
            silent = [*self.listener.sweep(self._sessions), *(each for each in silent if each not in self.listener)]
        for route in silent:
            self._handshake.end_session(route, "timed out")
        before_s = time.monotonic() - self.spec.episode_timeout_s  # one for both: they end the same episodes
        if self._users is not None:
            self._users.expire(before_s)
        self._inference.expire(before_s)

    def _follow_weights(self) -> None:
        while not self._stopping.is_set():
            newer = self._weights.wait_newer(self._state.version, timeout_s=0.25)  # also how long close() may take
            if newer is not None:
                self._state.weights = newer  # one reference: readers see the old snapshot or the new one
                self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # the pipe is full of wake-ups
        except OSError:
            if not self._stopping.is_set():
                raise

    def _send_round(self) -> None:
        """Commit first, then send credit, acknowledgements and weights; without a commit, nothing about the ledger."""
        self._answer_observations()
        if not self._try_commit():
            return self._send_all(is_written=False)
        self._sessions.grant_credit(self.spec.max_credits)
        if self._group_commit is not None:
            self._group_commit.hurry_if(sum(self._sessions.compute_open_credit().values()))
        snapshot = self._state.weights
        if self.opponents is not None and snapshot is not None:
            self.opponents.offer(snapshot, self._progress.steps)
        version = snapshot.version if snapshot else 0
        are_all = self.opponents is not None or version != self._sent_version
        self._sent_version = version
        for route in self._sessions if are_all else self._sessions.touched:
            session = self._sessions[route]
            if not session.is_welcomed:
                self._send_queue.add(route, self._handshake.make_welcome(session))
            if (credit := session.take_credit()) is not None:
                self._send_queue.add(route, credit)
            self._handshake.queue_acks(route, session)
            if snapshot and session.pull_newer_than is not None and snapshot.version > session.pull_newer_than:
                address = self._shared_payloads.put(snapshot) if session.shares_memory else None
                weights = WeightsMessage(snapshot.version, snapshot.sha256, *(address or ())[:4])
                self._send_queue.add(route, weights, () if address else (snapshot.payload,))
                session.pull_newer_than = None
            newest, pool = session.pull_opponent_newer_than, self.opponents
            if pool is not None and newest is not None and (member := pool.find_next(newest)) is not None:
                message = OpponentMessage(member.version, member.sha256, tuple(pool.versions))
                self._send_queue.add(route, message, (member.payload,))
                session.pull_opponent_newer_than = None
        self._sessions.touched.clear()
        self._send_all()

    def _answer_observations(self) -> None:
        """Take what users have asked, and answer the observations for which there are actions."""
        if self._users is not None:
            self._users.run_round()
        if self._front is not None:
            self._front.run_round()
        for key, answer, frames in self._inference.run_round():
            if self._users is not None and key == self._users.key and isinstance(answer, ActionMessage):
                self._users.deliver(answer)
            elif (route := self._sessions.find_route(key[0])) is not None and self._sessions[route].key == key:
                # Otherwise another incarnation has taken the actor's place.
                self._send_queue.add(route, answer, frames)

    def _try_commit(self) -> bool:
        """Write the ledger; False when that fails now. Records events when it, or the log in the store, begins and ends
        to take nothing: then no segment is acknowledged, and actors wait for credit."""
        problem = "" if self._group_commit is None else self._group_commit.problem
        is_written = True
        try:
            self.queue.ledger.commit()
        except LedgerUnwritable as error:
            problem, is_written = str(error), False
        if problem and not self._is_ledger_unwritable:
            self._progress.record_event("ledger_unwritable", problem=problem)
        if self._is_ledger_unwritable and not problem:
            self._progress.record_event("ledger_writable")
        self._is_ledger_unwritable = bool(problem)
        return is_written

    def _send_all(self, is_written: bool = True) -> None:
        for route, message, frames, *_ in self._send_queue.take(is_written):
            if reason := self._connections.send(route, message, frames):  # the actor reconnects with hello, and resends
                self._handshake.end_session(route, reason)

    # -- messages -----------------------------------------------------------------------------------------------

    def _handle_message(self, route: bytes, message: Message | ProtocolViolation, frames: Sequence[bytes]) -> None:
        session = self._sessions.get(route)
        if session is not None:
            session.last_seen = time.monotonic()
            self._sessions.touched[route] = None
        if isinstance(message, ProtocolViolation):
            return self._handshake.reject(route, message.code, message.message, message.seq)
        seq = message.seq if isinstance(message, SegmentMessage) else None
        if isinstance(message, Hello):
            self._handshake.take_hello(route, message)
        elif session is None:
            self._handshake.reject(route, "hello_required", "say hello first", seq)
        elif seq is not None and seq < 0:
            self._handshake.reject(route, "malformed", "segments are counted from 0", seq)
        elif isinstance(message, SegmentMessage if session.is_remote else ActMessage | ActsMessage):
            inference = REMOTE if session.is_remote else LOCAL
            self._handshake.reject(route, "malformed", f"this session's inference is {inference}", seq)
        elif isinstance(message, SegmentMessage):
            self._on_segment(route, session, message, frames)
        elif isinstance(message, ActMessage | ActsMessage):
            try:
                self._inference.take_message(session.key, message, frames)
            except ProtocolViolation as violation:
                self._handshake.reject(route, violation.code, violation.message)
        elif isinstance(message, Pull):
            session.pull_newer_than, session.shares_memory = message.newer_than, message.memory
        elif isinstance(message, PullOpponent):
            session.pull_opponent_newer_than = message.newer_than
        elif isinstance(message, Ping):
            self._send_queue.add(route, Pong(message.nonce))
        elif isinstance(message, Bye):
            self._handshake.end_session(route, "bye", message=to_printable(message.reason))
        elif not isinstance(message, Pong):
            problem = f"{type(message).__struct_config__.tag} goes from the gateway to the actor"
            self._handshake.reject(route, "malformed", problem)

    def _on_segment(self, route: bytes, session: Session, message: SegmentMessage, frames: Sequence[bytes]) -> None:
        ledger = self.queue.ledger
        key = session.key
        seq = message.seq
        expected = ledger.get_account(key).next_seq
        if seq < expected:
            ledger.count_duplicate(key)
            return session.add_ack(seq, "duplicate")
        if seq > expected:
            return self._handshake.reject(route, "sequence_gap", f"segment {seq} came, {expected} was expected", seq)
        if not self._sessions.claim_slot(route, seq):
            return self._handshake.end_lapsed(route, seq)
        reason, detail = self._admission.admit(session, message, frames)
        if reason is not None:
            ledger.record_received(key, seq, reason)
        session.send_limit = max(session.send_limit, seq + 1)
        session.add_ack(seq, "dropped" if reason else "accepted", reason or "", detail)
