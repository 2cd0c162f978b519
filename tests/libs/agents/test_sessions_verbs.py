"""What is typed: `shoal sessions` lists, reads and writes what agents and a model have said, `shoal evaluate` grades
answers, and `shoal run agents` refuses what cannot learn."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from agents_rig import save_model
from test_session_service import NoSampler
from test_token_tree import assistant, encode, make_tokenizer, user

from shoal import runs
from shoal.errors import ShoalError
from shoal.libs.agents.sessions.service import SessionService
from shoal.libs.agents.sessions.session import AgentSession, Ending, Opening
from shoal.libs.agents.sessions.store import TOKENIZER, SessionStore
from shoal.libs.agents.setting import check
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.hf.texts import IGNORED, TextSpec, encode_language, read_records
from shoal.libs.hf.transfer import pull
from shoal.runs import RunKind
from typed import complaint, said, typed

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


GRADED = """
tasks = ["ab", "cd", "ef"]

def grade(task, answer):
    return 1 / (task.prompt != "cd") + len(answer)
"""


@pytest.fixture
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tasks, of which the second one cannot be graded, in this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "graded_words", raising=False)
    path = tmp_path / "graded_words.py"
    path.write_text(GRADED)
    return path


def test_the_answers_of_a_registered_model_are_graded(graded: Path, shoal_home: Path) -> None:
    """The likeliest ones, the same each time; one that the grader refuses is no low reward."""
    pull(str(save_model(graded.parent / "model", make_tokenizer())), "tiny")
    line = "evaluate tiny graded_words.py:grade --tasks 3 --max-tokens 4"
    evaluated = json.loads(said(f"{line} --json"))
    first, failed, last = evaluated["answers"]
    assert [each["task"] for each in evaluated["answers"]] == ["ab", "cd", "ef"]
    assert (evaluated["model"], first["reward"]) == ("tiny@1", 1 + len(first["answer"]))
    assert evaluated["reward"] == (first["reward"] + last["reward"]) / 2
    assert (failed["reward"], "ZeroDivisionError" in failed["failed"]) == (None, True)
    assert json.loads(said(f"{line} --json")) == evaluated
    assert "tiny@1: mean reward" in said(f"{line} --seed 2").splitlines()[-1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([], "model = '': is not given. name a folder"),
        (["model=m", "algorithm=ppo"], "algorithm=grpo, rloo or reinforce_pp"),
        (["model=m", "agents=2"], "env=reasoning_gym:chain_sum, or agents=0"),
        (["model=m", "agents=2", "env=nothing.py:grade"], "there is no file nothing.py in"),
        (["model=m", "agents=2", "env=graded_words.py:grades"], "name a function (task, answer) -> reward"),
        (["model=m", "agents=2", "env=graded_words.py:grade", "agent=my_agent.py"], "give its path from"),
        (["model=nothing@1"], "nothing"),
        (["algorithm.learning_rat=1e-5"], "learning_rate"),
        (["max_step=3"], "max_steps"),
    ],
)
def test_a_run_that_cannot_learn_is_refused(fields: list[str], said: str, graded: Path, shoal_home: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        check(AgentsSpec().override(fields))
    assert said in str(refused.value)


def test_it_is_refused_before_a_cluster_starts(
    graded: Path, shoal_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = complaint(f"run agents model={graded.parent} env=nothing.py:grade agents=2")
    assert told.startswith("env = 'nothing.py:grade': there is no file nothing.py")
    assert typed("run agents --help").exit_code == 0
    assert "algorithm.learning_rate" in capfd.readouterr().out
