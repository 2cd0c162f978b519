"""Sessions under what seldom happens: requests at the same moment, a disk that takes nothing, ends amid an answer."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from agents_rig import (
    chat,
    end,
    find_url,
    make_spec,
    open_run,
    open_session,
    post,
    read_counts,
    save_model,
)
from test_sessions import until
from test_token_tree import assistant, make_tokenizer, user

from shoal.errors import InferenceError
from shoal.libs.agents.sessions.credit import SessionCredit
from shoal.libs.agents.sessions.groups import SessionGroup, compare_group
from shoal.libs.agents.sessions.local_sampler import LocalSampler
from shoal.libs.agents.sessions.service import SessionError, SessionService
from shoal.libs.agents.sessions.session import Ending, Opening
from shoal.libs.agents.sessions.store import SessionStore
from shoal.libs.agents.spec import AgentsSpec, SessionsSpec

PAIR = Opening(group="g", group_size=2)


class NoSampler:
    context = 256

    def pin(self, version: int) -> None: ...

    def retain(self, versions: Any) -> None: ...

    def generate(self, request: Any, call: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SessionService]:
    store = SessionStore(tmp_path)
    algorithm = {"name": "grpo", "group_size": 2, "groups_per_step": 1}
    spec = AgentsSpec.parse({"algorithm": algorithm, "max_version_lag": 0, "sessions": {"wait_s": 60.0}})
    yield SessionService(store, make_tokenizer(), spec, NoSampler(), lambda step: None, lambda: 1)
    store.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_tokenizer())


def test_credit_that_comes_as_a_wait_ends_is_not_lost() -> None:
    async def run() -> None:
        credit = SessionCredit(1)
        await credit.take(1, 60)
        waiting = asyncio.ensure_future(credit.take(1, 0.01))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.02, credit.give_back, 1)
        time.sleep(0.03)  # the loop finds both at once
        assert await waiting != credit.available

    asyncio.run(run())


def test_an_opening_that_comes_twice_at_once_is_one(service: SessionService) -> None:
    async def run() -> None:
        twice = await asyncio.gather(*(service.open(PAIR, "once") for _ in range(2)))
        assert twice[0][0] is twice[1][0]
        await service.open(PAIR, "")

    asyncio.run(run())


def test_a_group_that_was_closed_takes_no_further_session(service: SessionService, tmp_path: Path) -> None:
    """It would wait for others that never come, and a restarted gateway would take both for one."""

    async def run() -> None:
        for _ in range(2):
            session, _ = await service.open(PAIR, "")
            await service.end(session.id, Ending(reward=1.0))
        with pytest.raises(SessionError, match="was closed"):
            await service.open(PAIR, "")

    asyncio.run(run())


def test_an_opening_that_no_disk_takes_has_no_place(service: SessionService, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(SessionStore, "_execute", refuse)
            with pytest.raises(InferenceError, match="disk is full"):
                await service.open(Opening(group_size=2), "")
        for _ in range(2):
            await service.open(PAIR, "")

    asyncio.run(run())


def test_an_opening_that_waits_when_the_run_ends_is_refused(service: SessionService) -> None:
    async def run() -> None:
        await service.open(PAIR, "")
        waiting = asyncio.ensure_future(service.open(Opening(), ""))
        while not service.describe()["waiting"]:
            await asyncio.sleep(0)
        late = asyncio.ensure_future(service.open(Opening(), ""))
        await asyncio.sleep(0)
        service.close()
        for each in (waiting, late):  # one waits, the other is about to
            with pytest.raises(SessionError, match="the run is over"):
                await each

    asyncio.run(run())


@pytest.mark.parametrize(("baseline", "num_segments"), [("global", 1), ("group_mean", 0)])
def test_an_answer_without_advantage_is_learnt_where_the_learner_compares_it(
    service: SessionService, baseline: Any, num_segments: int
) -> None:
    """A failure, of a group of its own: with the others of its batch it is below the mean."""

    async def run() -> int:
        session, _ = await service.open(Opening(), "")
        tree = session.tree
        tree.add(tree.plan([user("ab")]), assistant("c"), [1, 2], [-0.5, -0.5], [3, 3])
        session.ending = Ending(reward=0.0)
        outcome = compare_group(SessionGroup("g", 0, [session]), baseline, SessionsSpec())
        return len(outcome.segments)

    assert asyncio.run(run()) == num_segments


@pytest.mark.parametrize(("baseline", "deviation"), [("group_mean_std", 0.5001), ("group_mean", 1.0)])
def test_a_token_counts_the_rewards_of_its_own_and_later_answers(
    service: SessionService, baseline: Any, deviation: float
) -> None:
    """Totals of 1, 0 and 0.5: the first episode has rewards of its answers, one of them in another branch; the last has
    the mean, and its tokens count in the denominator of the loss."""

    async def say(session: Any, history: list[Any], text: str, reply: str) -> None:
        turn = session.tree.add(session.tree.plan(history), assistant(text), [1, 2], [-0.5] * 2, [3, 3])
        await service.write_turns(session, [turn], reply, None)

    async def run() -> list[Any]:
        first, second = [(await service.open(PAIR, ""))[0] for _ in range(2)]
        await say(first, [user("ab")], "c", "one")
        await say(first, [user("else")], "d", "two")
        await say(first, [user("ab"), assistant("c"), user("ef")], "g", "three")
        for reply, reward in (("one", 9.0), ("one", 0.25), ("two", 0.5)):  # a later one is in place of an earlier one
            await service.reward_answer(first, reply, reward)
        await say(second, [user("ab")], "c", "four")
        first.ending, second.ending = Ending(reward=0.25), Ending(reward=0.0)
        third = replace(second, ending=Ending(reward=0.5))
        return compare_group(SessionGroup("g", 0, [first, second, third]), baseline, SessionsSpec()).segments

    extras = [each.extras for each in asyncio.run(run())]
    trained = sorted((each["advantage"][each["trains"]] * deviation).round(5).tolist() for each in extras)
    assert trained == [[-0.5, -0.5], [0.0, 0.0], [0.25, 0.25], [0.5, 0.5, -0.25, -0.25]]
    assert sorted((each["advantage"][-1] * deviation).round(5) for each in extras) == [-0.5, 0.0, 0.5, 0.5]


def test_tokens_of_an_evaluation_have_an_account(service: SessionService, tmp_path: Path) -> None:
    async def run() -> None:
        session, _ = await service.open(Opening(purpose="eval"), "")
        tree = session.tree
        turn = tree.add(tree.plan([user("ab")]), assistant("c"), [1, 2], [-0.5, -0.5], [3, 3], False, "eval")
        await service.write_turns(session, [turn], "", None)

    asyncio.run(run())
    assert read_counts(tmp_path) == {"sampled": 2, "eval": 2}


@dataclass
class Gate:
    """An answer stands still behind its first token."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, generate = Gate(), LocalSampler.generate

    async def stop(self: LocalSampler, request: Any, call: Any) -> AsyncIterator[Any]:
        async for event in generate(self, request, call):
            yield event
            gate.has_begun.set()
            while not gate.goes_on.is_set():
                await asyncio.sleep(0.01)

    monkeypatch.setattr(LocalSampler, "generate", stop)
    return gate


def test_a_session_that_ends_amid_an_answer_has_all_its_tokens_counted(model: Path, tmp_path: Path, gate: Gate) -> None:
    with open_run(make_spec(model), tmp_path) as loop, ThreadPoolExecutor(1) as threads:
        url = find_url(loop)
        session = open_session(url)
        body = {"model": "x", "messages": [{"role": "user", "content": "ab"}]}
        answering = threads.submit(post, session["base_url"] + "/chat/completions", body, session["key"])
        gate.has_begun.wait(60)
        assert end(url, session, reward=1.0).status == 200
        gate.goes_on.set()
        reply = answering.result()
        assert (reply.status, reply.body["error"]["code"]) == (410, "session_over")
        other = open_session(url)  # the step's second group
        chat(other, "cd")
        end(url, other, reward=1.0)
        until(lambda: loop.gateway.stats()["sessions"].get("steps"))
    counts = read_counts(tmp_path)
    assert counts["sampled"] == counts["no_signal"]


def test_repetitions_of_equal_requests_in_progress_get_one_answer_each(model: Path, tmp_path: Path, gate: Gate) -> None:
    with open_run(make_spec(model), tmp_path) as loop, ThreadPoolExecutor(4) as threads:
        session = open_session(find_url(loop))
        sessions = loop.gateway._front._service
        first, second = (threads.submit(chat, session, "ab") for _ in range(2))
        until(lambda: sessions.find(session["id"]).num_running == 2)
        repeated = {"headers": {"x_stainless_retry_count": "1"}}
        again = [threads.submit(chat, session, "ab", **repeated) for _ in range(2)]
        until(lambda: sessions.counts["repeated"] == 2)
        gate.goes_on.set()
        ids = [{each.result()["id"] for each in pair} for pair in ((first, second), again)]
        assert (len(ids[0]), ids[0]) == (2, ids[1])


def test_a_session_does_not_idle_while_it_is_answered(model: Path, tmp_path: Path, gate: Gate) -> None:
    with open_run(make_spec(model), tmp_path) as loop, ThreadPoolExecutor(1) as threads:
        session = open_session(find_url(loop), idle_s=100)
        answering = threads.submit(chat, session, "ab")
        gate.has_begun.wait(60)
        loop.gateway._front._service.find(session["id"]).seen_at -= 200
        gate.goes_on.set()
        answering.result()
        chat(session, "cd")
