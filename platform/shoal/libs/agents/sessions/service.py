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
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from shoal.errors import InferenceError
from shoal.libs.agents.sessions.credit import SessionCredit
from shoal.libs.agents.sessions.groups import SessionGroup, compare_group
from shoal.libs.agents.sessions.session import AgentSession, Ending, Opening, State, count_versions
from shoal.libs.agents.sessions.steps import LearnerSteps, Step
from shoal.libs.agents.sessions.store import (
    SessionStore,
    change_session,
    count,
    delete_answers,
    insert_answer,
    insert_record,
    insert_session,
)
from shoal.libs.agents.sessions.token_tree import TokenTree, Turn
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.language.engine.request import TextRequest, TokenEvent
from shoal.libs.language.text_model import TextCall

SWEEP_S = 0.25
MAX_TASK_BYTES = 65_536
# Means of the newest ones: rewards of sessions, sampled tokens of answers, those that were cut off by their limit, and
# groups that teach nothing, since all rewards are equal.
WINDOWS = {"reward": 256, "length": 1024, "cut_fraction": 1024, "no_signal_fraction": 64}


class SessionError(InferenceError):
    """A refusal with the code that clients of sessions know."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, message, retry_after_s, code=code)


class Sampler(Protocol):
    """Where tokens are sampled: engines of this process, or the replicas of an endpoint.

    context: tokens of a prompt and its answer together
    """

    context: int

    def generate(self, request: TextRequest, call: TextCall) -> AsyncGenerator[TokenEvent]:
        """See `TextModel`; without a version by the newest weights."""
        ...

    def pin(self, version: int) -> None:
        """Keep the weights of a version, where it has any. Raises InferenceError (404) for one that is not there."""
        ...

    def retain(self, versions: Collection[int]) -> None:
        """Free all other pinned versions."""
        ...


class SessionService:
    """spec: of the run. emit: takes the segments of a step. get_version: that of the newest weights; 0 before"""

    def __init__(
        self,
        store: SessionStore,
        tokenizer: Any,
        spec: AgentsSpec,
        sampler: Sampler,
        emit: Callable[[Step], None],
        get_version: Callable[[], int],
    ) -> None:
        self.spec, self.algorithm, self.rules = spec, spec.text_algorithm, spec.sessions
        self.tokenizer = tokenizer
        self.sampler = sampler
        self._store = store
        self._records = store.records
        self.get_version = get_version
        self._credit = SessionCredit(spec.credit)
        self._sessions: dict[str, AgentSession] = {}  # that are open
        self._groups: dict[str, SessionGroup] = {}
        self._opening: dict[str, asyncio.Task[bool]] = {}  # groups that wait for credit
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # by idempotency key: of one opening at a time
        self.counts = Counter[str]()
        self.steps = LearnerSteps(store, self.algorithm.groups_per_step, self._credit, emit, self.counts)
        self._recent = {name: deque[float](maxlen=size) for name, size in WINDOWS.items()}
        self._is_over = False

    # -- opening and ending ---------------------------------------------------------------------------------------

    async def open(self, opening: Opening, token_key: str) -> tuple[AgentSession, str]:
        """A new session and its key; with the same idempotency key again the same one. Raises SessionError (400, 410,
        429)."""
        if len(msgspec.json.encode(opening.task)) > MAX_TASK_BYTES:
            raise SessionError(400, "invalid", f"task: larger than {MAX_TASK_BYTES} bytes")
        if opening.version is not None and opening.purpose != "eval":
            raise SessionError(400, "invalid", "version: a session that trains is answered by the newest weights")
        if opening.group_size > self._credit.total:
            problem = f"group_size = {opening.group_size}: the run takes {self._credit.total} sessions at once"
            raise SessionError(400, "invalid", problem)
        session_id = f"s{secrets.token_hex(10)}"
        async with self._locks.setdefault(token_key or session_id, asyncio.Lock()):
            if not token_key or (known := self._records.find_by_token_key(token_key)) is None:
                return await self._open(session_id, opening, token_key)
            if (session := self._sessions.get(known.id)) is None:
                raise SessionError(410, "session_over", "the session of this idempotency-key has ended")
            key, session.key = make_key()  # in place of one whose answer may have been lost: only its hash is kept
            await self._store.write(change_session(session.id, key=session.key))
            return session, key

    async def _open(self, session_id: str, opening: Opening, token_key: str) -> tuple[AgentSession, str]:
        self._require_running()
        name = opening.group or f"g{secrets.token_hex(10)}"
        if opening.purpose == "train" and not await self._join_group(name, opening.group_size):
            self._require_running()
            problem = f"the run has as many sessions as it can learn from in time ({self._credit.total})"
            raise SessionError(429, "no_credit", problem, 5.0)
        if opening.purpose == "eval":
            opening = self._pin(opening)
        now_s, (key, hashed) = time.time(), make_key()
        tree = TokenTree(self.tokenizer)
        session = AgentSession(session_id, hashed, now_s, opening, name, tree=tree, seen_at=now_s)
        self._sessions[session.id] = session
        if session.trains:
            self._groups[name].members.append(session)
        try:
            await self._store.write(insert_session(session, token_key))
        except InferenceError:
            self._forget(session)
            raise
        self.counts["opened"] += 1
        return session, key

    def _pin(self, opening: Opening) -> Opening:
        """With the version that answers from begin to end. Raises InferenceError (404, 503)."""
        version = opening.version or self.get_version()
        if not version:
            raise InferenceError(503, "the run has no weights yet", retry_after_s=1.0)
        self.sampler.pin(version)
        return msgspec.structs.replace(opening, version=version)

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
            if self._records.has_group(name):
                raise SessionError(400, "group_over", f"the group {name!r} was closed: a group's name is its own")
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
            over = self._find_known(session_id)
            why = f": {over.why}" if over.why else ""
            raise SessionError(410, "session_over", f"the session is over ({over.state}{why})")
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
        return self._find_known(session_id).key

    def _find_known(self, session_id: str) -> AgentSession:
        """One that is open, or as the file has it. Raises SessionError (404)."""
        if (session := self._sessions.get(session_id) or self._records.find(session_id)) is None:
            raise SessionError(404, "session_unknown", "this run has never opened such a session")
        return session

    def load(self, session_id: str) -> AgentSession:
        """A session with its turns. Raises SessionError (404)."""
        session = self._find_known(session_id)
        return session if session_id in self._sessions else self._records.fill(session)

    async def end(self, session_id: str, ending: Ending) -> dict[str, Any]:
        """End a session; the same again is answered alike.

        Raises InferenceError (400), SessionError (404, 410, 422).
        """
        ending.require_valid()
        session = self.load(session_id)
        if session_id in self._sessions:
            await self._close(session, "failed" if ending.failed else "ended", ending.failed, ending)
        if session.ending is None:
            self.find(session_id)
        if session.ending != ending:
            raise SessionError(422, "end_differs", "the session has ended with another body")
        turns = session.tree.turns.values()
        trained = [each for each in turns if each.trains and session.state == "ended"]
        tokens = {"sampled": count_versions(turns).total(), "trains": count_versions(trained).total()}
        return {"state": session.state, "turns": len(turns), "tokens": tokens}

    async def _close(self, session: AgentSession, state: State, why: str, ending: Ending | None = None) -> None:
        """Let a session end, unless it has; its group may be complete by that. Raises InferenceError (503)."""
        async with session.closing:
            if session.state != "open":
                return
            now_s = time.time()
            encoded = None if ending is None else msgspec.json.encode(ending)
            ended = change_session(session.id, state=state, why=why, ending=encoded, end_time=now_s)
            await self._store.write(ended, delete_answers(session.id))
            session.state, session.why, session.ending = state, why, ending
            del self._sessions[session.id]
            self.counts[state] += 1
            if (group := self._groups.get(session.group)) is not None:
                group.first_end_at = group.first_end_at or now_s
            self._note_reward(session)
        await self._close_groups(now_s)

    def _note_reward(self, session: AgentSession) -> None:
        if session.reward is not None and session.trains:
            self._recent["reward"].append(session.reward)

    async def sweep(self) -> None:
        """Let sessions expire, and close groups whose time is over; until it is cancelled."""
        while True:
            self.sampler.retain({each.opening.version for each in self._sessions.values() if each.opening.version})
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
        accounts = ["sampled"] if session.trains else ["sampled", "eval"]
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
        if (turn := self._records.find_record(session.id, reply)) is None:
            raise SessionError(404, "turn_unknown", f"the session has no answer {reply[:80]!r}")
        session.rewards[turn] = reward
        rewards = msgspec.json.encode(session.rewards)
        await self._store.write(change_session(session.id, rewards=rewards))

    # -- groups ---------------------------------------------------------------------------------------------------

    async def _close_groups(self, now_s: float) -> None:
        for name, group in list(self._groups.items()):
            if not group.is_complete(now_s, self.rules.group_s):
                continue
            for each in group.members:
                if each.state == "open":
                    why = f"its group was closed without it after {self.rules.group_s:g} s"
                    await self._close(each, "evicted", why)
            if self._groups.get(name) is not group or any(each.num_running for each in group.members):
                continue  # another call has closed it, or the last tokens of an answer are on their way
            del self._groups[name]
            outcome = compare_group(group, self.algorithm.baseline, self.rules)
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
        self.counts.update(self._records.count_sessions())
        for session in self._records.list_last(WINDOWS["reward"]):
            self._note_reward(session)
        for session in self._records.list_unassigned():
            if not (session.trains or session.state == "open"):
                continue
            self._load(session)
            if session.state == "open":
                self._sessions[session.id] = session
            if session.trains:
                size = session.opening.group_size
                group = self._groups.get(session.group)
                if group is None:
                    group = self._groups[session.group] = SessionGroup(session.group, size)
                    self._credit.available -= size
                group.num_unopened -= 1
                group.members.append(session)
                if session.state != "open":
                    group.first_end_at = group.first_end_at or session.end_time
        return self.steps.restore(self._load, was_lost)

    def _load(self, session: AgentSession) -> AgentSession:
        session.seen_at = time.time()
        return self._records.fill(session, self.tokenizer)

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


def make_key() -> tuple[str, bytes]:
    """A session's key, and its SHA-256."""
    key = f"shs_{secrets.token_urlsafe(24)}"
    return key, hashlib.sha256(key.encode()).digest()
