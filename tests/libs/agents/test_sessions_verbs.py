"""`shoal sessions`: what agents and a model have said is listed, read, and written for fine-tuning."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from test_session_service import NoSampler
from test_token_tree import assistant, encode, make_tokenizer, user

from shoal import runs
from shoal.libs.agents.sessions.service import SessionService
from shoal.libs.agents.sessions.session import AgentSession, Ending, Opening
from shoal.libs.agents.sessions.store import TOKENIZER, SessionStore
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.hf.texts import IGNORED, TextSpec, encode_language, read_records
from shoal.runs import RunKind
from typed import complaint, said

END = "<|im_end|>"
TASK = {"messages": [{"role": "user", "content": "How many?"}], "data": {"answer": 7}}


async def fill(folder: Path) -> list[AgentSession]:
    """Two sessions of a group, the first one of three answers of which one was cut off, and one that is open."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER))
    store = SessionStore(folder)
    service = SessionService(store, tokenizer, AgentsSpec(), NoSampler(), lambda step: None, lambda: 1)

    async def say(session: AgentSession, history: list[Any], text: str, version: int, finish: str = "stop") -> None:
        tokens = encode(tokenizer, text)
        plan = session.tree.plan(history)
        answer = assistant(text.removesuffix(END))
        turn = session.tree.add(plan, answer, tokens, [-0.5] * len(tokens), [version] * len(tokens), finish=finish)
        await service.write_turns(session, [turn], "", None)

    opened = [(await service.open(Opening(group="g", group_size=3, task=TASK), ""))[0] for _ in range(3)]
    first, second, _ = opened
    await say(first, [user("How many?")], "six" + END, version=3)
    history = [user("How many?"), assistant("six"), user("Sure?")]
    await say(first, history, "no: seven" + END, version=4)
    await say(first, [*history, assistant("no: seven"), user("Why?")], "since", version=4, finish="length")
    await service.end(first.id, Ending(reward=0.75))
    await say(second, [user("How many?")], "five\x1b[2J" + END, version=3)
    await service.end(second.id, Ending(failed="the shop was closed"))
    store.close()
    return opened


@pytest.fixture
def sessions() -> list[AgentSession]:
    """Those of the newest run of agents."""
    with runs.create("agents", "", "20261130-agents", kind=RunKind("agents")):
        filled = asyncio.run(fill(runs.load("20261130-agents").folder))
    runs.create("train", "", "20261130-train").close()
    return filled


def test_sessions_are_listed(sessions: list[AgentSession]) -> None:
    listed = {each["id"]: each for each in json.loads(said("sessions list --json"))}
    first, failed, still_open = (listed[each.id] for each in sessions)
    assert (first["state"], first["turns"], first["reward"], first["tokens"]) == ("ended", 3, 0.75, 13)
    assert [version for version, _ in first["versions"]] == [3, 4]
    assert (failed["state"], failed["why"], failed["reward"]) == ("failed", "the shop was closed", None)
    assert still_open["state"] == "open"

    heading, line = said("sessions list 20261130-agents --state failed").splitlines()
    assert heading.split() == ["id", "state", "why", "group", "turns", "tokens", "reward", "age"]
    assert line.split()[:2] == [sessions[1].id, "failed"]
    assert len(said("sessions list --limit 1").splitlines()) == 2


def test_a_session_is_shown_turn_by_turn(sessions: list[AgentSession]) -> None:
    shown = said(f"sessions show {sessions[0].id}")
    for words in (
        *("of run 20261130-agents: ended, reward 0.75", "task: How many?", "<|im_start|>user\nHow many?"),
        *("turn 1 behind turn 0", "tokens of version 4, stop", "no: seven<|im_end|>", "version 4, length"),
    ):
        assert words in shown, words
    assert "five\N{REPLACEMENT CHARACTER}[2J" in said(f"sessions show {sessions[1].id}")
    described = json.loads(said(f"sessions show {sessions[0].id} --json"))
    assert described["task"] == TASK
    assert [each["parent"] for each in described["turns"]] == [None, 0, 1]
    assert described["turns"][1]["prompt"] == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_what_was_said_is_written_for_fine_tuning(sessions: list[AgentSession], tmp_path: Path) -> None:
    """The completions are the tokens that were sampled, and an answer that was cut off teaches no end."""
    path = tmp_path / "said.jsonl"
    path.write_text(said("sessions export"))
    tokenizer = make_tokenizer()
    samples = encode_language(read_records(path), TextSpec(tokenizer, 1000, False))
    learnt = [tokenizer.decode(each.labels[each.labels != IGNORED]) for each in samples]
    assert learnt == ["six" + END, "no: seven" + END]
    assert tokenizer.decode(samples[1].tokens).count("<|im_start|>") == 4

    assert said("sessions export --min-reward 0.8") == ""
    (whole,) = map(json.loads, said("sessions export --json").splitlines())
    (segment,) = whole["segments"]
    assert (whole["id"], sum(segment["trains"])) == (sessions[0].id, 13)
    assert {len(each) for each in segment.values()} == {len(segment["tokens"])}


def test_what_is_not_there_is_named(sessions: list[AgentSession]) -> None:
    assert "run 20261130-train has no sessions here" in complaint("sessions list 20261130-train")
    assert "has the session 's0'" in complaint("sessions show s0")


def test_without_a_run_of_agents_one_is_named() -> None:
    assert "shoal run agents" in complaint("sessions list")
