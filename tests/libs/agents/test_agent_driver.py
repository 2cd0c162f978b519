"""A driver against a scripted gateway: what it opens, runs and ends, and what it makes of each error."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.libs.agents.scripted_gateway import TOKEN, ScriptedGateway, serve_sessions

from refusals import refused
from shoal.errors import ConfigError, RunError
from shoal.libs.agents import driver as driver_module
from shoal.libs.agents.driver import Driver, SessionClient, find_agent, find_reason, main
from shoal.libs.agents.tasks import GradedTasks
from waiting import wait_for

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".venv-clients"
SUMS = GradedTasks(lambda task, answer: float(answer == "4"), ["2 + 2?", "1 + 1?", "3 + 1?"])
AGENT = """
import json, os, sys, urllib.request

task = json.loads(os.environ["SHOAL_TASK"])
assert "SHOAL_TOKEN" not in os.environ
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
body = json.dumps({"model": "m", "messages": task["messages"]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
    answer = json.load(reply)["choices"][0]["message"]["content"]
print("thinking ...")
print(answer)
"""
BROKEN = "import sys; print(4); print('warming up', file=sys.stderr); sys.exit('no tools here')"


def drive(gateway: ScriptedGateway, environment: Any = SUMS, agent: str = "", **options: Any) -> Driver:
    """A driver that has run to its end."""

    async def run() -> Driver:
        client = SessionClient(gateway.url, TOKEN, 4)
        driver = Driver(client, environment, find_agent(client, agent, 10), **{"num_agents": 2, **options})
        try:
            await driver.run()
        finally:
            await client.close()
        return driver

    return asyncio.run(run())


def test_members_of_a_group_get_one_task() -> None:
    with serve_sessions(
        num_opened=6, write=lambda messages: "4" if "2 + 2" in messages[0]["content"] else "4" * 11
    ) as gateway:
        driver = drive(gateway, num_agents=4, group_size=3, num_groups=2)
    groups = defaultdict(list)
    for opened in gateway.opened.values():
        groups[opened["group"]].append(opened)
    assert [len(members) for members in groups.values()] == [3, 3]
    prompts = [{each["task"]["messages"][0]["content"] for each in members} for members in groups.values()]
    assert prompts == [{"2 + 2?"}, {"1 + 1?"}]
    assert {(each["group_size"], each["deadline_s"]) for each in gateway.opened.values()} == {(3, 3600.0)}
    ends = [[gateway.ends[each["id"]] for each in members] for members in groups.values()]
    assert ends == [[{"reward": 1.0, "truncated": False}] * 3, [{"reward": 0.0, "truncated": True}] * 3]
    assert (driver.outcomes, driver.mean_reward) == ({"rewarded": 6}, 0.5)


def test_a_driver_ends_with_the_run() -> None:
    with serve_sessions(num_opened=2) as gateway:
        driver = drive(gateway, num_agents=1)
    assert driver.outcomes == {"rewarded": 2}
    assert {each["group_size"] for each in gateway.opened.values()} == {8}


def test_without_credit_or_while_the_gateway_restarts_the_same_is_asked_again() -> None:
    with serve_sessions() as gateway:
        gateway.first["open"].extend([(429, "no_credit"), (503, "restarts")])
        gateway.first["chat"].extend([(503, "restarts"), (429, "busy")])
        gateway.first["end"].extend([(503, "restarts")])
        drive(gateway, num_groups=1, group_size=1)
    assert [len({*keys}) for keys in gateway.keys.values()] == [1, 1, 1]
    assert [len(gateway.keys[kind]) for kind in ("open", "chat", "end")] == [3, 3, 2]
    assert gateway.ends == {"s0": {"reward": 1.0, "truncated": False}}


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [("open", (410, "session_over")), ("open", (400, "group_over")), ("chat", (410, "session_over"))],
)
def test_a_session_that_is_over_has_no_end_and_the_others_go_on(asked: str, refusal: tuple[int, str]) -> None:
    """Also one of which the opening was repeated, once it had expired, or comes after its group was closed."""
    with serve_sessions(num_opened=2) as gateway:
        gateway.first[asked].append(refusal)
        driver = drive(gateway, num_groups=1, group_size=2)
    assert driver.outcomes == {"over": 1, "rewarded": 1}
    assert len(gateway.ends) == 1


def test_a_session_that_its_agent_has_ended_stays_so() -> None:
    def end_it(task: Any, answer: str) -> float:
        gateway.ends["s0"] = {"reward": 0.25}
        return 1.0

    with serve_sessions() as gateway:
        driver = drive(gateway, GradedTasks(end_it, ["2 + 2?"]), num_groups=1, group_size=1)
    assert (driver.outcomes, gateway.ends) == ({"over": 1}, {"s0": {"reward": 0.25}})


def test_a_grader_or_a_model_that_fails_is_a_failed_episode() -> None:
    with serve_sessions(num_opened=2) as gateway:
        drive(gateway, GradedTasks(lambda task, answer: float("nan"), ["2 + 2?"]), num_groups=1, group_size=1)
        gateway.first["chat"].append((400, "context_length_exceeded"))
        drive(gateway, num_groups=1, group_size=1)
    reason = "the gateway answered 400: context_length_exceeded"
    assert gateway.ends == {"s0": {"failed": "the grader gave nan"}, "s1": {"failed": reason}}


def test_a_driver_whose_episodes_all_fail_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MAX_FAILURES", 3)
    with serve_sessions(num_opened=9) as gateway, pytest.raises(RunError, match=r"3 episodes in a row .* gave inf"):
        drive(gateway, GradedTasks(lambda task, answer: float("inf"), ["2 + 2?"]), num_agents=1)
    assert gateway.ends.keys() == {each["id"] for each in gateway.opened.values()}


def test_a_key_that_is_refused_ends_the_driver() -> None:
    with serve_sessions() as gateway, refused(401, "bad_key"):
        gateway.first["open"].append((401, "bad_key"))
        drive(gateway)


@pytest.fixture
def write_agent(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "my_agent.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_program_is_an_agent_and_its_last_line_the_answer(
    write_agent: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    with serve_sessions() as gateway:
        drive(gateway, agent=write_agent(AGENT), num_groups=1, group_size=1)
    assert gateway.ends == {"s0": {"reward": 1.0, "truncated": False}}


@pytest.mark.soak
def test_the_example_with_the_stock_client_is_an_agent() -> None:
    if not [*CLIENTS.glob("lib/*/site-packages/openai")]:
        pytest.skip("there is no openai in .venv-clients: make test brings it")

    def write(messages: list[dict[str, Any]]) -> str:
        return "5" if len(messages) == 1 else f"No.\nIt is {'4' if messages[1]['content'] == '5' else '?'}."

    with serve_sessions(write=write) as gateway:
        drive(
            gateway,
            GradedTasks(lambda task, answer: float(answer == "No. It is 4."), ["2 + 2?"]),
            agent=f"{CLIENTS}/bin/python {ROOT}/jobs/agent.py",
            num_groups=1,
            group_size=1,
        )
    assert gateway.ends == {"s0": {"reward": 1.0, "truncated": False}}


def test_a_program_that_fails_says_why(write_agent: Callable[[str], str]) -> None:
    with serve_sessions() as gateway:
        drive(gateway, agent=f"{sys.executable} {write_agent(BROKEN)}", num_groups=1, group_size=1)
    assert gateway.ends == {"s0": {"failed": "the agent ended with status 1: no tools here"}}


def test_a_program_that_takes_too_long_is_killed() -> None:
    with serve_sessions() as gateway:
        drive(gateway, agent="sleep 600", num_groups=1, group_size=1, deadline_s=0.1)
    assert gateway.ends == {"s0": {"failed": "took longer than 0.1 s"}}


@pytest.mark.parametrize("agent", ["no_such_agent.py", "no-such-program at all"])
def test_an_agent_that_is_not_there_is_named(agent: str) -> None:
    with serve_sessions() as gateway, pytest.raises(ConfigError, match="agent = "):
        drive(gateway, agent=agent)
    assert gateway.opened == {}


@pytest.mark.parametrize("by_lifeline", [False, True])
def test_a_driver_that_is_stopped_ends_its_open_sessions(tmp_path: Path, by_lifeline: bool) -> None:
    (tmp_path / "my_env.py").write_text("tasks = ['2 + 2?']\ndef grade(task, answer): return 1.0\n")
    waiting, released = threading.Event(), threading.Event()

    def write(messages: list[dict[str, Any]]) -> str:
        waiting.set()
        released.wait()
        return "4"

    with serve_sessions(num_opened=9, write=write) as gateway:
        command = [
            sys.executable,
            "-m",
            "shoal.libs.agents.driver",
            gateway.url,
            "--env",
            "my_env.py:grade",
            "--lifeline",
        ]
        environment = {**os.environ, "SHOAL_TOKEN": TOKEN}
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path, env=environment) as process:
            wait_for(waiting.is_set)
            if by_lifeline:
                assert process.stdin is not None
                process.stdin.close()
            else:
                process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        released.set()
    assert gateway.ends == {"s0": {"failed": "driver stopped"}}


def test_the_command_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:9", "--env", "no_such_module_at_all:grade", "--token", TOKEN]) == 1
    assert capsys.readouterr().err.startswith("error: env = 'no_such_module_at_all:grade'")


def test_the_reason_of_a_program_is_its_last_line_or_above_a_trace_of_node() -> None:
    assert find_reason(["Traceback", "ValueError: no", "Unable to go on"]) == "Unable to go on"
    trace = ["agent.mjs:16", "TypeError: no choices", "    at file.mjs", "", "Node.js v20.20.2"]
    assert find_reason(trace) == "TypeError: no choices"
