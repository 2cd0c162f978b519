"""How sessions begin and end: hello, welcome, rejections, bye.

Owned by the gateway, which calls it in its thread; it fills the send queue, and touches no socket.
"""

from __future__ import annotations

from msgspec import UNSET

from shoal.errors import ConfigError
from shoal.rl.gateway.remote_inference import RemoteInference
from shoal.rl.gateway.sessions import LOCAL, REMOTE, Session, find_hello_problem, to_printable
from shoal.rl.gateway.state import GatewayState
from shoal.wire.given_spaces import find_wrong_spaces
from shoal.wire.messages import PROTOCOL_VERSION, ErrorMessage, Hello, Welcome

MAX_DETAIL = 200  # characters of an error in an event
_FATAL = frozenset(
    {"bad_token", "bad_version", "no_remote_inference", "stale_incarnation", "superseded", "wrong_spaces"}
)


class Handshake:
    """Opens and ends the sessions of one gateway."""

    def __init__(self, state: GatewayState, inference: RemoteInference) -> None:
        self._state, self._inference = state, inference
        self.run_id, self._experience = state.setting.run_id, state.setting.experience
        self._ledger = state.queue.ledger
        self._progress = state.progress
        self._actors = state.actors
        self._sessions, self._send_queue = state.sessions, state.send_queue

    def reject(self, route: bytes, code: str, message: str, seq: int | None = None) -> None:
        """Answer with an error, about the segment `seq` if that is known."""
        self._progress.protocol_errors[code] += 1
        if (session := self._sessions.get(route)) is not None and code not in _FATAL:
            self._progress.record_rejection(session.progress, code, to_printable(message, MAX_DETAIL))
        self._send_queue.add(route, ErrorMessage(code, message, code in _FATAL, seq))

    def take_hello(self, route: bytes, hello: Hello) -> None:
        """Open a session, in the place of the actor's earlier one, or reject the actor.

        It is welcomed after all hellos of this round have shared the credit.
        """
        rejection = find_hello_problem(hello, self._state.setting.token, self._ledger.newest_incarnation)
        if rejection is not None:
            return self._reject_hello(route, hello, *rejection)
        if hello.offers and (difference := find_wrong_spaces(hello.offers, self._experience)):
            return self._reject_hello(route, hello, "wrong_spaces", difference)
        is_remote = hello.inference == REMOTE
        if is_remote:
            try:
                self._inference.start()
            except ConfigError as error:
                return self._reject_hello(route, hello, "no_remote_inference", str(error))
        self._end_earlier_sessions(route, hello)
        key = (hello.actor_id, hello.incarnation)
        if hello.run_id == self.run_id:
            self._ledger.record_lost(key, hello.acknowledged)
        for older in self._actors.remove_older(key):
            self._progress.record_event("actor_restarted", actor_id=older.actor_id, steps_before=older.steps)
        next_seq = self._ledger.open_account(key).next_seq
        session = self._sessions[route] = Session(
            key, self._actors.join(key), next_seq, is_remote=is_remote, behaviour=hello.behaviour
        )
        if is_remote:
            self._inference.add_client(key, session.progress).behaviour = hello.behaviour
        self._progress.record_event("actor_joined", actor_id=key[0], incarnation=key[1], next_seq=next_seq)

    def _reject_hello(self, route: bytes, hello: Hello, code: str, message: str) -> None:
        self.reject(route, code, message)
        self._progress.record_rejected_actor(to_printable(hello.actor_id), code)

    def _end_earlier_sessions(self, route: bytes, hello: Hello) -> None:
        """End other sessions of the actor: an older incarnation's for good, the same one's because it has
        reconnected."""
        self._send_queue.drop_route(route)
        self.end_session(route, "said hello again")
        if (other := self._sessions.find_route(hello.actor_id)) is not None:
            is_older = self._sessions[other].key[1] < hello.incarnation
            if is_older:
                self.reject(other, "superseded", f"incarnation {hello.incarnation} has taken over")
            self.end_session(other, "superseded" if is_older else "reconnected")

    def make_welcome(self, session: Session) -> Welcome:
        """The answer to a hello."""
        session.is_welcomed, session.reported_limit = True, session.send_limit
        if (group_commit := self._state.group_commit) is not None:
            next_seq = group_commit.get_acknowledged(session.key)
        else:
            next_seq = self._ledger.get_account(session.key).next_seq
        setting = self._state.setting
        session.progress.settings = self._progress.settings
        return Welcome(
            PROTOCOL_VERSION,
            self.run_id,
            self._experience,
            next_seq,
            session.send_limit,
            self._state.version,
            setting.spec.heartbeat_s,
            setting.spec.timeout_s,
            setting.spec.max_message_bytes,
            setting.is_synchronous,
            REMOTE if session.is_remote else LOCAL,
            self._state.settings or UNSET,
            session.progress.settings,
        )

    def end_lapsed(self, route: bytes, seq: int) -> None:
        """End a session whose segment found no slot: its actor says hello, waits for credit, and sends it again."""
        problem = f"the queue has no slot for segment {seq}: say hello, and wait for credit"
        self._send_queue.add(route, ErrorMessage("hello_required", problem, seq=seq))
        self.end_session(route, "its credit has lapsed")

    def queue_acks(self, route: bytes, session: Session) -> None:
        """Queue the acknowledgements, which are sent after the next commit."""
        for ack in session.take_acks(self._state.version):
            self._send_queue.add(route, ack)

    def end_session(self, route: bytes, reason: str, **details: str) -> None:
        """End a session, if the route has one, for this reason."""
        session = self._sessions.remove(route)
        if session is not None:
            self.queue_acks(route, session)
            if reason in ("bye", "superseded"):  # otherwise it may return, and go on
                self._inference.forget(session.key)
            self._actors.leave(session.key)
            kind = (
                "actor_lost"
                if reason in ("timed out", "unreachable", "disconnected", "does not read")
                else "actor_left"
            )
            actor_id, incarnation = session.key
            self._progress.record_event(kind, actor_id=actor_id, incarnation=incarnation, reason=reason, **details)
