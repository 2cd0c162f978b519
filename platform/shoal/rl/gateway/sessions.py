"""The gateway's sessions: one per welcomed actor, with its credit and pending acknowledgements.

Credit lapses: a session that may send, and does not for a while, holds no slot of the queue. What it sends later is
taken while the queue has a free slot; otherwise its actor keeps the segment and says hello again (docs/protocol.md).

Promise: queued segments plus open credit never exceed the queue's capacity, so a segment sent within its credit always
fits, and a slow learner stops its actors instead of filling memory. `grant_credit` is that policy, as a pure function.

Called by the gateway's thread, under its lock. Never touches the socket: the gateway sends the results of `take_acks`
and `take_credit` after it has committed the ledger.
"""

from __future__ import annotations

import heapq
import hmac
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.wire.messages import PROTOCOL_VERSION, Ack, Credit, Hello, reject_version
from shoal.wire.segment import is_behaviour

USERS_ACTOR_ID = "endpoint-users"
LOCAL, REMOTE = "local", "remote"  # where a session's policy runs
LAPSE_S, MAX_LAPSE_S = 0.5, 5.0  # after which unused credit lapses: twice the time to the actor's newest segment
NEW_LAPSE_S = 0.1  # likewise, of a session that has sent no segment
ROUND_LAPSE_S = 1.0  # likewise where actors pause between batches; longer where their segments take longer
MAX_HOLDERS = 8  # that an event names
CREDIT_WAIT_S = 5.0  # without credit, after which a session is reported
K = TypeVar("K")


@dataclass
class Session:
    """One connection of one actor. `send_limit` is the first sequence number that it may not send yet; the queue has a
    slot for those below `reserved_limit`."""

    key: ActorKey
    progress: ActorProgress
    send_limit: int
    reserved_limit: int = 0
    credit_at: float = field(default_factory=time.monotonic)  # when it last got credit or sent a segment
    lapse_s: float = 0.0  # twice the time that its newest segment has taken, at most MAX_LAPSE_S; 0: it has sent none
    last_seen: float = field(default_factory=time.monotonic)
    reported_limit: int = 0
    is_welcomed: bool = False  # `welcome` was sent
    is_remote: bool = False  # it sends observations: it needs no credit
    behaviour: str = ""  # who acts in it, where that is not the policy
    pull_newer_than: int | None = None  # an open pull
    shares_memory: bool = False  # of that pull: it is on this machine
    pull_opponent_newer_than: int | None = None  # likewise
    round_start: int = 0  # the reserved limit when the present batch began, if actors pause between batches
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
    """Sessions by route (the socket's address of a connection); one for each actor.

    queue:        of the segments that they send
    round_length: steps of the longest segment, if actors pause between batches; otherwise 0
    touched:      routes with something to be sent, perhaps; the gateway clears them
    """

    def __init__(self, queue: ExperienceQueue, round_length: int = 0, steps_ahead: int = 0) -> None:
        super().__init__()
        self._queue, self._steps_ahead = queue, steps_ahead
        self._round_length, self._round = round_length, 0
        self._lapse_s = ROUND_LAPSE_S if round_length else LAPSE_S
        self._waits_s: deque[float] = deque(maxlen=256)  # from credit, or the segment before, to a segment
        self._routes: dict[str, bytes] = {}  # by actor id: thousands may reconnect at once
        self._playing: dict[bytes, Session] = {}  # sessions of segments, the longest waiting first
        self._idle: set[bytes] = set()  # the others of them: each round looks only at those that play
        self.touched: dict[bytes, None] = {}

    def __setitem__(self, route: bytes, session: Session) -> None:
        super().__setitem__(route, session)
        self._routes[session.key[0]] = route
        self.touched[route] = None
        if not session.is_remote:
            self._playing[route] = session

    def find_route(self, actor_id: str) -> bytes | None:
        """The route of a connected actor, or None."""
        return self._routes.get(actor_id)

    def remove(self, route: bytes) -> Session | None:
        """Remove a connection; returns its session, if any."""
        if (session := self.pop(route, None)) is not None:
            del self._routes[session.key[0]]
            self._playing.pop(route, None)
            self._idle.discard(route)
            self.touched.pop(route, None)
        return session

    def compute_open_credit(self) -> dict[bytes, int]:
        """How many slots of the queue each session has, of those of segments that are not idle. Callable from any
        thread."""
        get_account, playing = self._queue.ledger.get_account, self._playing.copy()
        return {route: max(0, each.reserved_limit - get_account(each.key).next_seq) for route, each in playing.items()}

    def count_free(self) -> int:
        """How many slots of the queue no session may fill; below 0: fewer than those that they may."""
        return self._limit() - len(self._queue) - sum(self.compute_open_credit().values())

    def _limit(self) -> int:
        """How many segments may be queued and on their way: as `steps_ahead` says, but one for each session, and two
        while the learner waits, so that no actor does."""
        queue = self._queue
        if not self._steps_ahead:
            return queue.capacity
        num_each = 2 if queue.is_awaited else 1
        num_missing = max(0, num_each * self._steps_ahead - queue.num_steps)
        num_segments = len(queue) + math.ceil(num_missing / (queue.mean_steps or self._steps_ahead))
        return min(queue.capacity, max(num_segments, num_each * len(self._playing)))

    def has_space(self) -> bool:
        """Whether the queue has a slot that no session may fill."""
        return self.count_free() > 0

    def claim_slot(self, route: bytes, seq: int) -> bool:
        """Note that a session sends segment `seq`. False: its credit has lapsed, and others have its slot."""
        session, now = self[route], time.monotonic()
        if session.reserved_limit <= seq < session.send_limit and not self.has_space():
            session.progress.is_awaited = True
            return False
        self._waits_s.append(now - session.credit_at)
        session.lapse_s = min(MAX_LAPSE_S, 2 * (now - session.credit_at))
        session.credit_at, session.progress.is_awaited = now, False
        if route in self._idle:
            self._idle.remove(route)
            self._playing[route] = session
        return True

    def grant_credit(self, max_credits: int) -> None:
        """Share the queue's free slots among the sessions of segments that use their credit; of those with equal
        credit, the longest waiting comes first."""
        if not self._playing:
            return
        queue = self._queue
        self._take_back()
        open_credit = self.compute_open_credit()
        if self._round_length:
            grants = self._share_round(open_credit, max_credits)
        else:
            capacity = self._limit()
            capacity -= max(0, capacity - len(queue)) // 8 if self._idle else 0  # for what idle sessions send
            grants = grant_credit(open_credit, len(queue), capacity, max_credits, 1 if self._steps_ahead else 4)
        for route, grant in grants.items():
            session = self._playing[route] = self._playing.pop(route)
            session.reserved_limit = queue.ledger.get_account(session.key).next_seq + open_credit[route] + grant
            session.send_limit = max(session.send_limit, session.reserved_limit)
            session.credit_at = time.monotonic()
            self.touched[route] = None

    def _take_back(self) -> None:
        """Sessions that may send and do not become idle: they lose their slots, but not their send limit. An actor
        whose segment has found no slot is awaited with it."""
        now, get_account = time.monotonic(), self._queue.ledger.get_account
        new_s = self._lapse_s if self._round_length else min(self._lapse_s, NEW_LAPSE_S)
        silent = [
            (route, each)
            for route, each in self._playing.items()
            if now - each.credit_at > (max(self._lapse_s, each.lapse_s) if each.lapse_s else new_s)
        ]
        for route, each in silent:
            if each.send_limit > get_account(each.key).next_seq and not each.progress.is_awaited:
                each.reserved_limit = each.round_start = 0
                self._idle.add(route)
                del self._playing[route]

    def _share_round(self, open_credit: dict[bytes, int], max_credits: int) -> dict[bytes, int]:
        """Credit for the batch that the learner waits for, to actors that have its weights, as their pull says.

        Credit left from an earlier batch does not count: its actor may be dead, or may play on for long.
        """
        queue = self._queue
        if self._round != queue.num_batches:
            self._round = queue.num_batches
            self._lapse_s = max(ROUND_LAPSE_S, 3 * statistics.median(self._waits_s or [0.0]))
            self._waits_s.clear()
            for each in self._playing.values():
                each.round_start = each.reserved_limit
        credit = {
            route: min(num, self[route].reserved_limit - self[route].round_start) if num else 0
            for route, num in open_credit.items()
        }
        num_free = queue.capacity - len(queue) - sum(open_credit.values())
        num_missing = min(queue.count_missing(self._round_length) - sum(credit.values()), num_free)
        version = queue.awaited_version
        ready = {route: num for route, num in credit.items() if (self[route].pull_newer_than or 0) >= version}
        return grant_round_credit(ready, num_missing, max_credits)

    def describe_shortage(self) -> dict[str, Any] | None:
        """Who has been without credit for CREDIT_WAIT_S, and who holds the queue's slots; None while some are free."""
        queue, open_credit = self._queue, self.compute_open_credit()
        if self.count_free() > self._limit() // 8:
            return None
        deadline, get_account = time.monotonic() - CREDIT_WAIT_S, queue.ledger.get_account
        silent = [each for each in self._playing.values() if each.credit_at < deadline]
        waiting = [each for each in silent if each.send_limit <= get_account(each.key).next_seq]
        if not waiting:
            return None
        largest = sorted(open_credit, key=lambda route: -open_credit[route])[:MAX_HOLDERS]
        return {
            "waiting": len(waiting),
            "actors": [each.key[0] for each in waiting[:MAX_HOLDERS]],
            "queued": len(queue),
            "capacity": self._limit(),
            "credit": {self[route].key[0]: open_credit[route] for route in largest if open_credit[route]},
        }


def grant_credit(
    open_credit: Mapping[K, int], queued: int, capacity: int, max_credits: int, part: int = 4
) -> dict[K, int]:
    """How many more segments each session may send; `open_credit` is its present credit.

    Sessions with the least credit come first, equal ones in the order of `open_credit`. A session is topped up only
    when half of its window is used, since not every freed slot is worth a message. The window is one `part` of an equal
    share of the queue, at least 1 and at most `max_credits`: later sessions must find some left before unused credit
    lapses.
    """
    grants: dict[K, int] = {}
    if not open_credit:
        return grants
    free = capacity - queued - sum(open_credit.values())
    window = max(1, min(max_credits, capacity // (part * len(open_credit))))
    needy = [(session, credit) for session, credit in open_credit.items() if credit <= window // 2]
    for session, credit in sorted(needy, key=lambda each: each[1]):
        if free <= 0:
            break
        grants[session] = min(window - credit, free)
        free -= grants[session]
    return grants


def grant_round_credit(open_credit: Mapping[K, int], num_missing: int, max_credits: int) -> dict[K, int]:
    """Grant credit where actors pause between batches: for the `num_missing` segments of this batch, and no more.

    `open_credit` is what each session may still send of this batch. Segments are shared out one by one, each to a
    session with the least credit; of equal ones, the first in the order of `open_credit`.
    """
    grants: dict[K, int] = {}
    waiting = [(credit, order, session) for order, (session, credit) in enumerate(open_credit.items())]
    heapq.heapify(waiting)
    for _ in range(num_missing):
        if not waiting or waiting[0][0] >= max_credits:
            break
        credit, order, session = waiting[0]
        grants[session] = grants.get(session, 0) + 1
        heapq.heapreplace(waiting, (credit + 1, order, session))
    return grants


def find_hello_problem(
    hello: Hello, token: str, find_newest_incarnation: Callable[[str], int | None]
) -> tuple[str, str] | None:
    """The code and the message of an error about this hello; None for a good one. find_newest_incarnation: of an actor,
    by its id; called for those that have the token"""
    if hello.protocol != PROTOCOL_VERSION:
        violation = reject_version(hello.protocol)
        return violation.code, violation.message
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        return "bad_token", "the token is not the one of this gateway"
    if hello.actor_id == USERS_ACTOR_ID:
        return "malformed", f"actor_id {USERS_ACTOR_ID} is the endpoint's"
    if not 1 <= len(hello.actor_id) <= 64 or not hello.actor_id.isprintable():
        return "malformed", "actor_id takes 1 to 64 printable characters"
    if not 0 <= hello.incarnation < 2**63:
        return "malformed", "incarnation takes 0 to 2^63-1"
    if not 0 <= hello.acknowledged < 2**53:
        return "malformed", "acknowledged takes 0 to 2^53-1"
    newest = find_newest_incarnation(hello.actor_id)
    if newest is not None and hello.incarnation < newest:
        return "stale_incarnation", f"incarnation {newest} has been seen: use a larger one"
    if hello.inference not in (LOCAL, REMOTE):
        return "malformed", f'inference is "{LOCAL}" or "{REMOTE}"'
    if hello.behaviour and not is_behaviour(hello.behaviour):
        return "malformed", "behaviour takes 1 to 32 letters, digits, - and _"
    return None


def to_printable(text: str, max_length: int = 64) -> str:
    """Text that has an actor's words in it, made safe for a log."""
    return "".join(character if character.isprintable() else "?" for character in text[:max_length])
