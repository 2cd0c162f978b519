"""The sessions of a run as they live: opened by credit, continued, ended, compared in groups; all is written first.

Lives on the event loop of the gateway's HTTP server. A group that is over gives segments; those of a whole step of
the learner are handed over at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal
from weakref import WeakValueDictionary

import msgspec

from shoal.errors import InferenceError
from shoal.libs.agents.sessions.credit import SessionCredit
from shoal.libs.agents.sessions.groups import (
    MAX_TASK_BYTES,
    AgentSession,
    Ending,
    GroupRules,
    Opening,
    SessionGroup,
    State,
    count_versions,
)
from shoal.libs.agents.sessions.steps import LearnerSteps, Step
from shoal.libs.agents.sessions.store import (
    SessionRecords,
    SessionStore,
    StoredSession,
    change_session,
    count,
    delete_answers,
    insert_answer,
    insert_record,
    insert_session,
)
from shoal.libs.agents.sessions.token_tree import TokenTree, Turn

SWEEP_S = 0.25
# Means of the newest ones: rewards of sessions, sampled tokens of answers, those that were cut off by their limit, and
# groups that teach nothing, since all rewards are equal.
WINDOWS = {"reward": 256, "length": 1024, "cut_fraction": 1024, "no_signal_fraction": 64}


class SessionError(InferenceError):
    """A refusal with the code that clients of sessions know."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, message, retry_after_s)
        self.code = code


@dataclass(frozen=True)
class SessionRules:
    """What the run says of its sessions.

    groups:          how they are compared
    groups_per_step: groups that the learner takes at once
    credit:          sessions that may be open or unlearnt
    wait_s:          for credit, within a request
    temperature:     of what is sampled for training
    max_tokens:      of an answer, at most
    cancelled:       whether an answer is learnt whose client has left
    """

    groups: GroupRules
    groups_per_step: int
    credit: int
    wait_s: float = 30.0
    temperature: float = 1.0
    max_tokens: int | None = None
    cancelled: Literal["drop", "train"] = "drop"


class SessionService:
    """tokenizer: of the model. emit: takes the segments of a step. get_version: that of the newest weights"""

    def __init__(
        self,
        store: SessionStore,
        tokenizer: Any,
        rules: SessionRules,
        emit: Callable[[Step], None],
        get_version: Callable[[], int],
    ) -> None:
        self.rules = rules
        self.tokenizer = tokenizer
        self._store = store
        self._records = store.records
        self.get_version = get_version
        self._credit = SessionCredit(rules.credit)
        self._sessions: dict[str, AgentSession] = {}  # that are open
        self._groups: dict[str, SessionGroup] = {}
        self._opening: dict[str, asyncio.Task[bool]] = {}  # groups that wait for credit
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # by idempotency key: of one opening at a time
        self.counts = Counter[str]()
        self.steps = LearnerSteps(store, rules.groups_per_step, self._credit, emit, self.counts)
        self._recent = {name: deque[float](maxlen=size) for name, size in WINDOWS.items()}
        self._is_over = False

    # -- opening and ending ---------------------------------------------------------------------------------------

    async def open(self, opening: Opening, token_key: str) -> tuple[AgentSession, str]:
        """A new session and its key; with the same idempotency key again the same one. Raises SessionError (400, 410,
        429)."""
        if len(msgspec.json.encode(opening.task)) > MAX_TASK_BYTES:
            raise SessionError(400, "invalid", f"task: larger than {MAX_TASK_BYTES} bytes")
        if opening.group_size > self._credit.total:
            problem = f"group_size = {opening.group_size}: the run takes {self._credit.total} sessions at once"
            raise SessionError(400, "invalid", problem)
        session_id = f"s{secrets.token_hex(10)}"
        async with self._locks.setdefault(token_key or session_id, asyncio.Lock()):
            if token_key and (known := self._records.find_by_token_key(token_key)) is not None:
                session = self._sessions.get(known.id)
                if session is None:
                    raise SessionError(410, "session_over", "the session of this idempotency-key has ended")
                return session, await self._renew_key(session)
            return await self._open(session_id, opening, token_key)

    async def _open(self, session_id: str, opening: Opening, token_key: str) -> tuple[AgentSession, str]:
        self._require_running()
        name = opening.group or f"g{secrets.token_hex(10)}"
        if opening.purpose == "train" and not await self._join_group(name, opening.group_size):
            self._require_running()
            problem = f"the run has as many sessions as it can learn from in time ({self._credit.total})"
            raise SessionError(429, "no_credit", problem, 5.0)
        now_s, key = time.time(), f"shs_{secrets.token_urlsafe(24)}"
        session = AgentSession(
            session_id,
            hashlib.sha256(key.encode()).digest(),
            opening,
            now_s,
            TokenTree(self.tokenizer),
            now_s,
            name,
        )
        self._sessions[session.id] = session
        if opening.purpose == "train":
            self._groups[name].members.append(session)
        try:
            await self._store.write(insert_session(session.to_row(), token_key))
        except InferenceError:
            self._forget(session)
            raise
        self.counts["opened"] += 1
        return session, key

    def close(self) -> None:
        """The run is over: refuse openings, also those that wait."""
        self._is_over = True
        self._credit.close()

    def _require_running(self) -> None:
        if self._is_over:
            raise SessionError(410, "run_over", "the run is over")

    def _forget(self, session: AgentSession) -> None:
        """A session that could not be written: its place in the group is free again."""
        self._sessions.pop(session.id, None)
        group = self._groups.get(session.group)
        if group is None or session not in group.members:
            return
        group.members.remove(session)
        group.num_unopened += 1
        if not group.members:
            del self._groups[session.group]
            self._credit.give_back(group.num_unopened)

    async def _renew_key(self, session: AgentSession) -> str:
        """Another key in place of one whose answer may have been lost: only its hash is kept."""
        key = f"shs_{secrets.token_urlsafe(24)}"
        session.key = hashlib.sha256(key.encode()).digest()
        await self._store.write(change_session(session.id, key=session.key))
        return key

    async def _join_group(self, name: str, size: int) -> bool:
        """A place in the group, whose first session takes the credit of all."""
        group = self._groups.get(name)
        if group is None:
            task = self._opening.get(name)
            if task is None:
                task = self._opening[name] = asyncio.ensure_future(self._open_group(name, size))
            if not await asyncio.shield(task):
                return False
            group = self._groups[name]
        if not group.num_unopened:
            raise SessionError(400, "group_full", f"the group {name!r} has its sessions")
        group.num_unopened -= 1
        return True

    async def _open_group(self, name: str, size: int) -> bool:
        try:
            has_credit = await self._credit.take(size, self.rules.wait_s)
            if has_credit:
                self._groups[name] = SessionGroup(name, size)
            return has_credit
        finally:
            del self._opening[name]

    def find(self, session_id: str) -> AgentSession:
        """An open session. Raises SessionError (404, 410)."""
        session = self._sessions.get(session_id)
        if session is None:
            row = require_known(self._records.find(session_id))
            why = f": {row.why}" if row.why else ""
            raise SessionError(410, "session_over", f"the session is over ({row.state}{why})")
        if lapse := session.describe_lapse(time.time()):
            raise SessionError(410, "session_over", f"the session is over (expired: {lapse})")
        return session

    def touch(self, session_id: str) -> AgentSession:
        """An open session that is in use. Raises SessionError (404, 410)."""
        session = self.find(session_id)
        session.seen_at = time.time()
        return session

    def find_key(self, session_id: str) -> bytes:
        """SHA-256 of a session's key, also of one that is over. Raises SessionError (404)."""
        if (session := self._sessions.get(session_id)) is not None:
            return session.key
        return require_known(self._records.find(session_id)).key

    def export(self, session_id: str) -> dict[str, Any]:
        """A session with its turns and segments, as plain values. Raises SessionError (404)."""
        return export_session(self._records, session_id, self.tokenizer)

    async def end(self, session_id: str, ending: Ending) -> dict[str, Any]:
        """End a session; the same again is answered alike.

        Raises InferenceError (400), SessionError (404, 410, 422).
        """
        ending.require_valid()
        encoded = msgspec.json.encode(ending)
        session = self._sessions.get(session_id)
        if session is not None:
            await self._close(session, "failed" if ending.failed else "ended", ending.failed, ending)
        row = require_known(self._records.find(session_id))
        if row.ending is None:
            self.find(session_id)
        if row.ending != encoded:
            raise SessionError(422, "end_differs", "the session has ended with another body")
        tree = load_tree(self._records, session_id, self.tokenizer) if session is None else session.tree
        return self._describe_end(row.state, tree)

    @staticmethod
    def _describe_end(state: str, tree: TokenTree) -> dict[str, Any]:
        turns = tree.turns.values()
        trained = [each for each in turns if each.trains] if state == "ended" else []
        tokens = {"sampled": count_versions(turns).total(), "trains": count_versions(trained).total()}
        return {"state": state, "turns": len(turns), "tokens": tokens}

    async def _close(self, session: AgentSession, state: State, why: str, ending: Ending | None = None) -> None:
        """Let a session end, unless it has; its group may be complete by that. Raises InferenceError (503)."""
        async with session.closing:
            if session.state != "open":
                return
            now_s = time.time()
            encoded = None if ending is None else msgspec.json.encode(ending)
            ended = change_session(session.id, state=state, why=why, ending=encoded, end_time=now_s)
            await self._store.write(ended, delete_answers(session.id))
            session.state = state
            session.why = why
            session.ending = ending
            del self._sessions[session.id]
            self._count_end(session)
            if (group := self._groups.get(session.group)) is not None:
                group.first_end_at = group.first_end_at or now_s
        await self._close_groups(now_s)

    def _count_end(self, session: AgentSession) -> None:
        self.counts[session.state] += 1
        if session.reward is not None and session.opening.purpose == "train":
            self._recent["reward"].append(session.reward)

    async def sweep(self) -> None:
        """Let sessions expire, and close groups whose time is over; until it is cancelled."""
        while True:
            now_s = time.time()
            with suppress(InferenceError):  # a disk that takes nothing now: the next time
                for session in list(self._sessions.values()):
                    if lapse := session.describe_lapse(now_s):
                        await self._close(session, "expired", lapse)
                await self._close_groups(now_s)
            await asyncio.sleep(SWEEP_S)

    # -- turns ----------------------------------------------------------------------------------------------------

    async def write_turns(
        self, session: AgentSession, turns: Sequence[Turn], reply: str, answer: tuple[bytes, bytes, bytes] | None
    ) -> None:
        """Put turns on the disk, and the answer (the request's key, its head and body) for who asks again.

        Raises InferenceError (503): the turns do not exist.
        """
        statements = [insert_record(session.id, reply, each) for each in turns]
        sampled = count_versions(turns)
        accounts = ["sampled", "eval"] if session.opening.purpose == "eval" else ["sampled"]
        statements += [count(what, version, num) for what in accounts for version, num in sampled.items()]
        if answer is not None:
            statements.append(insert_answer(session.id, *answer))
        try:
            await self._store.write(*statements)
        except InferenceError:
            session.tree.discard(turns)
            raise
        for what in accounts:
            self.counts[f"tokens/{what}"] += sampled.total()
        self.counts["answers"] += len(turns)
        self._recent["length"].extend(len(each.tokens) for each in turns)
        self._recent["cut_fraction"].extend(each.finish == "length" for each in turns)

    def find_answer(self, session: AgentSession, request: bytes) -> tuple[bytes, bytes] | None:
        """The head and the body of the answer to this request, if it was written."""
        return self._records.find_answer(session.id, request)

    async def reward_answer(self, session: AgentSession, reply: str, reward: float) -> None:
        """Reward an answer by its id. Raises SessionError (404)."""
        if not self._records.has_reply(session.id, reply):
            raise SessionError(404, "turn_unknown", f"the session has no answer {reply[:80]!r}")
        session.rewards[reply] = reward
        rewards = msgspec.json.encode(session.rewards)
        await self._store.write(change_session(session.id, rewards=rewards))

    # -- groups ---------------------------------------------------------------------------------------------------

    async def _close_groups(self, now_s: float) -> None:
        for name, group in list(self._groups.items()):
            if not group.is_complete(now_s, self.rules.groups.group_s):
                continue
            for each in group.members:
                if each.state == "open":
                    await self._close(
                        each, "evicted", f"its group was closed without it after {self.rules.groups.group_s:g} s"
                    )
            if self._groups.get(name) is not group or any(each.num_running for each in group.members):
                continue  # another call has closed it, or the last tokens of an answer are on their way
            del self._groups[name]
            outcome = self.rules.groups.compare(group)
            self._recent["no_signal_fraction"].append("no_signal" in outcome.num_sessions and not outcome.segments)
            self.steps.add(outcome)
        await self.steps.hand_over()

    # -- after a crash --------------------------------------------------------------------------------------------

    def restore(self, was_lost: Callable[[int], bool]) -> list[Step]:
        """Continue with what is on the disk: sessions that are open or not in a step, and steps that are not learnt.

        was_lost: whether the segments of a step are to be queued again, under another number. Returns the steps to
        queue, or to wait for. Before the event loop runs.
        """
        for what, by_version in self._records.count_tokens().items():
            self.counts[f"tokens/{what}"] = sum(by_version.values())
        rows = self._records.list_all()
        self.counts["opened"] = len(rows)
        for row in sorted(rows, key=lambda each: each.end_time or 0.0):
            if row.state != "open":
                self._count_end(AgentSession.from_row(row, TokenTree(self.tokenizer), 0.0))
        for row in self._records.list_unassigned():
            is_training = msgspec.json.decode(row.opening, type=Opening).purpose == "train"
            if not (is_training or row.state == "open"):
                continue
            session = self._load(row)
            if session.state == "open":
                self._sessions[session.id] = session
            if is_training:
                size = session.opening.group_size
                group = self._groups.get(session.group)
                if group is None:
                    group = self._groups[session.group] = SessionGroup(session.group, size)
                    self._credit.available -= size
                group.num_unopened -= 1
                group.members.append(session)
                if session.state != "open":
                    group.first_end_at = group.first_end_at or row.end_time
        return self.steps.restore(self._load, was_lost)

    def _load(self, row: StoredSession) -> AgentSession:
        return AgentSession.from_row(row, load_tree(self._records, row.id, self.tokenizer), time.time())

    def describe(self) -> Mapping[str, Any]:
        """Counts, for the record of the run: sessions, answers, `tokens/` by what became of them, and `drops/`, the
        sessions that are not learnt, by reason."""
        return {
            **self.counts,
            "open": len(self._sessions),
            "waiting": self._credit.num_waiting,
            "credit": self._credit.available,
            "window": WINDOWS["reward"],
            **{name: fmean(each) if each else None for name, each in self._recent.items()},
        }


def require_known(row: StoredSession | None) -> StoredSession:
    """Raises SessionError (404) for a session that this run has never opened."""
    if row is None:
        raise SessionError(404, "session_unknown", "this run has never opened such a session")
    return row


def load_tree(records: SessionRecords, session_id: str, tokenizer: Any) -> TokenTree:
    """The turns of a session that are on the disk."""
    tree = TokenTree(tokenizer)
    tree.restore(records.load_turns(session_id))
    return tree


def export_session(records: SessionRecords, session_id: str, tokenizer: Any) -> dict[str, Any]:
    """A session with its turns and segments, as plain values. Raises SessionError (404)."""
    row = require_known(records.find(session_id))
    tree = load_tree(records, session_id, tokenizer)
    segments = [
        {name: getattr(segment, name).tolist() for name in ("tokens", "trains", "logprobs", "versions")}
        for segment in tree.segments()
    ]
    return {
        "id": session_id,
        **msgspec.json.decode(row.opening),
        "state": row.state,
        "why": row.why,
        "ending": None if row.ending is None else msgspec.json.decode(row.ending),
        "turns": len(tree.turns),
        "segments": segments,
    }
