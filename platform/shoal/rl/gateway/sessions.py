"""The gateway's sessions: one per welcomed actor, with its credit and pending acknowledgements.

Called by the gateway's thread, under its lock. Never touches the socket: the gateway sends the results of `take_acks`
and `take_credit` after it has committed the ledger.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.flow_control import grant_credit
from shoal.wire.messages import Ack, Credit


@dataclass
class Session:
    """One connection of one actor. `send_limit` is the first sequence number that it may not send yet."""

    key: ActorKey
    progress: ActorProgress
    send_limit: int
    last_seen: float = field(default_factory=time.monotonic)
    reported_limit: int = 0
    is_welcomed: bool = False  # `welcome` was sent
    pull_newer_than: int | None = None  # an open pull
    _pending_acks: list[tuple[int, str, str, str]] = field(default_factory=list)  # seq, status, reason, detail

    def add_ack(self, seq: int, status: str, reason: str = "", detail: str = "") -> None:
        """Queue the acknowledgement of segment `seq`."""
        self._pending_acks.append((seq, status, reason, detail))

    def take_acks(self, weights_version: int) -> list[Ack]:
        """The acknowledgements since the last call."""
        settled, self._pending_acks = self._pending_acks, []
        limit = self.send_limit
        return [Ack(seq, status, limit, weights_version, reason, detail) for seq, status, reason, detail in settled]

    def take_credit(self) -> Credit | None:
        """New credit that no pending acknowledgement will carry. Call it before `take_acks`."""
        news = Credit(self.send_limit) if self.send_limit > self.reported_limit and not self._pending_acks else None
        self.reported_limit = self.send_limit
        return news


class Sessions(dict[bytes, Session]):
    """Sessions by route (the socket's address of a connection); one for each actor."""

    def __init__(self) -> None:
        super().__init__()
        self._routes: dict[str, bytes] = {}  # by actor id: thousands may reconnect at once

    def __setitem__(self, route: bytes, session: Session) -> None:
        super().__setitem__(route, session)
        self._routes[session.key[0]] = route

    def find_route(self, actor_id: str) -> bytes | None:
        """The route of a connected actor, or None."""
        return self._routes.get(actor_id)

    def remove(self, route: bytes) -> Session | None:
        """Remove a connection; returns its session, if any."""
        if (session := self.pop(route, None)) is not None:
            del self._routes[session.key[0]]
        return session

    def grant_credit(self, queue: ExperienceQueue, max_credits: int) -> None:
        """Share the queue's free slots among all sessions; of those with equal credit, the longest waiting comes
        first."""
        ledger = queue.ledger
        open_credit = {route: each.send_limit - ledger.get_account(each.key).next_seq for route, each in self.items()}
        for route, grant in grant_credit(open_credit, len(queue), queue.capacity, max_credits).items():
            session = self[route] = self.pop(route)
            session.send_limit += grant

    def find_silent(self, timeout_s: float) -> list[bytes]:
        """The routes of sessions that were silent for `timeout_s`."""
        deadline = time.monotonic() - timeout_s
        return [route for route, session in self.items() if session.last_seen < deadline]
