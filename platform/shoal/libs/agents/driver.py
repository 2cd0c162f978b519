"""A driver: opens sessions at a run's gateway, lets an agent answer a task in each, and ends them with rewards.

    SHOAL_TOKEN=... python -m shoal.libs.agents.driver URL --env reasoning_gym:chain_sum --agents 8
    SHOAL_TOKEN=... python -m shoal.libs.agents.driver URL --env my_env.py:grade --agent my_agent.py

Runs anywhere, many episodes in one process. Started by hand, and by `shoal run agents --agents N`. What it says to the
gateway is in docs/agents-protocol.md; it knows nothing of tokens, models or groups' baselines.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from shoal.errors import ConfigError, ConnectionLost, InferenceError, RunError, ShoalError, summarize_error
from shoal.extend.client import (
    AsyncTransport,
    EndpointRequest,
    RetryPolicy,
    normalize_address,
    request_with_retries,
)
from shoal.home import read_existing_token
from shoal.libs.agents.tasks import AgentEnvironment, AgentTask, EpisodeFailed, grade_answer, load_environment

SESSIONS_PATH = "/shoal/v1/sessions"
CALL_S = 600.0  # of stock clients: a gateway may hold a request for minutes
NUM_RETRIES = 270  # without a connection, a second each: actors try for five minutes, too
BUSY_S = 1.0  # between two requests where the gateway names no time
STOP_S = 2.0  # for the ends of open sessions
MAX_FAILURES = 50  # in a row: the agent or the grader is at fault
OVER = 410
_log = logging.getLogger("shoal.agents")


class OpenedSession(msgspec.Struct, frozen=True):
    """What the gateway says of a session that it has opened. env: variables for an agent's process"""

    id: str
    base_url: str
    key: str
    env: dict[str, str]


class AgentAnswer(NamedTuple):
    """is_truncated: it was cut off, by `max_tokens` or the context"""

    text: str
    is_truncated: bool = False


Agent = Callable[[OpenedSession, AgentTask], Awaitable[AgentAnswer]]


class SessionClient:
    """The gateway's paths for sessions, for one event loop. `close` it.

    Each request has an idempotency-key, or may be repeated anyway: while the gateway restarts, or has no credit, it is
    sent again. All raise InferenceError for another answer, and ConnectionLost when none comes for five minutes.
    """

    def __init__(self, url: str, token: str, num_connections: int) -> None:
        self._transport = AsyncTransport(normalize_address(url), token, num_connections)

    async def open(self, key: str, **fields: Any) -> OpenedSession:
        """Open a session, once for each key. Waits for credit."""
        return msgspec.json.decode(
            await self._post(SESSIONS_PATH, fields, {"idempotency-key": key}), type=OpenedSession
        )

    async def complete_chat(self, session: OpenedSession, task: AgentTask, **fields: Any) -> AgentAnswer:
        """The answer of the session's model to the task, by one chat completion. fields: of its body"""
        path = f"{urlsplit(session.base_url).path}/chat/completions"  # of this gateway, which is known to answer here
        headers = {"authorization": f"Bearer {session.key}", "idempotency-key": session.id}
        reply = await self._post(path, {"model": "policy", "messages": task.messages, **fields}, headers)
        choice = msgspec.json.decode(reply)["choices"][0]
        return AgentAnswer(choice["message"]["content"] or "", choice["finish_reason"] == "length")

    async def end(self, session: OpenedSession, **outcome: Any) -> None:
        """End a session with `reward` and `truncated`, or as `failed` with the reason."""
        await self._post(f"{SESSIONS_PATH}/{session.id}/end", outcome, {})

    async def _post(self, path: str, body: Any, headers: dict[str, str]) -> bytes:
        headers = {"content-type": "application/json", **headers}
        request = EndpointRequest("POST", path, headers, msgspec.json.encode(body))
        policy = RetryPolicy(CALL_S, NUM_RETRIES, retry_lost=True)
        while True:
            try:
                return (await request_with_retries(request, policy, self._transport)).body
            except InferenceError as refused:
                if refused.status not in (429, 503):
                    raise
                await asyncio.sleep(refused.retry_after_s or BUSY_S)

    async def close(self) -> None:
        await self._transport.close()


async def run_program(command: Sequence[str], session: OpenedSession, task: AgentTask) -> AgentAnswer:
    """Run a program as the agent: the answer is the last line that it prints.

    Its environment has the session's variables, and the task as JSON in $SHOAL_TASK, but not the driver's token. Raises
    EpisodeFailed, with the last line of its errors, when it exits with another status than 0.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SHOAL_TOKEN"}
    environment |= session.env | {"SHOAL_TASK": task.encode().decode()}
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise EpisodeFailed(f"the agent ended with status {process.returncode}: {find_reason(_read_lines(errors))}")
    return AgentAnswer(_read_lines(output)[-1])


def _read_lines(output: bytes) -> list[str]:
    return output.decode(errors="replace").strip().splitlines() or [""]


def find_reason(lines: Sequence[str]) -> str:
    """The line that says why a program has failed: the last one, or of Node.js the error above its trace."""
    is_node = lines[-1].startswith("Node.js v")
    return next((line for line in reversed(lines) if is_node and re.match(r"\w*Error\b", line)), lines[-1])


class Driver:
    """Runs episodes until the run is over.

    agent:      answers a task in a session; raises EpisodeFailed
    num_agents: episodes at a time
    group_size: sessions with one task, whose rewards are compared
    num_groups: after which it ends by itself; None: never
    seed:       of the first task; the next ones follow
    deadline_s: of an episode, from the opening of its session on

    `outcomes` counts the episodes by how they ended; `mean_reward` is that of those with a reward.
    """

    def __init__(
        self,
        client: SessionClient,
        environment: AgentEnvironment,
        agent: Agent,
        *,
        num_agents: int = 1,
        group_size: int = 8,
        num_groups: int | None = None,
        seed: int = 0,
        deadline_s: float = 3600.0,
    ) -> None:
        self._client, self._environment, self._agent = client, environment, agent
        self._num_agents, self._group_size, self._num_groups = num_agents, group_size, num_groups
        self._next_seed = self._first_seed = seed
        self._deadline_s = deadline_s
        self._name = secrets.token_hex(4)  # no other driver's groups have it
        self._members: list[tuple[str, AgentTask]] = []
        self._lock = asyncio.Lock()
        self._num_failures = 0
        self._total_reward = 0.0
        self.outcomes = Counter[str]()

    @property
    def mean_reward(self) -> float:
        return self._total_reward / max(1, self.outcomes["rewarded"])

    async def run(self) -> None:
        """Run until the gateway says that the run is over, or all groups have ended. When it is cancelled, sessions
        that are open end as failed.

        Raises ConfigError for a task that does not fit, InferenceError for a session that is refused, ConnectionLost
        without a gateway, RunError when `MAX_FAILURES` episodes in a row have failed, and what `make_task` raises.
        """
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._num_agents))
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._num_agents):
                    workers.create_task(self._run_episodes())
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if not (isinstance(first, InferenceError) and first.status == OVER):
                raise first from None

    async def _run_episodes(self) -> None:
        while (member := await self._take_member()) is not None:
            await self._run_episode(*member)

    async def _take_member(self) -> tuple[str, str, AgentTask] | None:
        """The next episode's group, key and task; None after the last group."""
        async with self._lock:
            if not self._members:
                if self._next_seed - self._first_seed == self._num_groups:
                    return None
                task = await asyncio.to_thread(self._environment.make_task, self._next_seed)
                self._members = [(f"{self._name}-{self._next_seed}", task)] * self._group_size
                self._next_seed += 1
            group, task = self._members.pop()
            return group, f"{group}-{len(self._members)}", task

    async def _run_episode(self, group: str, key: str, task: AgentTask) -> None:
        fields = {"group": group, "group_size": self._group_size, "deadline_s": self._deadline_s}
        try:
            session = await self._client.open(key, **fields, task=msgspec.Raw(task.encode()))
        except InferenceError as refused:
            # It was opened and has expired, while its answer was lost, or its group was closed without it.
            if refused.code not in ("session_over", "group_over"):
                raise
            self.outcomes["over"] += 1
            return
        try:
            outcome = await self._compute_outcome(session, task)
            await self._client.end(session, **outcome)
        except InferenceError as refused:  # it has expired, was evicted, or its agent has ended it
            _log.info("session %s of group %s is over: %s", session.id, group, refused)
            self.outcomes["over"] += 1
        except asyncio.CancelledError:
            with suppress(InferenceError, ConnectionLost, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._client.end(session, failed="driver stopped")
            raise
        else:
            self._count(group, outcome)

    async def _compute_outcome(self, session: OpenedSession, task: AgentTask) -> dict[str, Any]:
        """The body of the session's end. Raises InferenceError for a session that is over."""
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._agent(session, task)
                reward = await asyncio.to_thread(grade_answer, self._environment, task, answer.text)
        except EpisodeFailed as failed:
            return {"failed": summarize_error(failed)}
        except TimeoutError:
            return {"failed": f"took longer than {self._deadline_s:g} s"}
        except InferenceError as refused:
            if refused.status == OVER:
                raise
            return {"failed": f"the gateway answered {refused.status}: {summarize_error(refused)}"}
        return {"reward": reward, "truncated": answer.is_truncated}

    def _count(self, group: str, outcome: dict[str, Any]) -> None:
        if (reason := outcome.get("failed")) is None:
            self.outcomes["rewarded"] += 1
            self._total_reward += outcome["reward"]
            self._num_failures = 0
            return
        _log.info("an episode of group %s has failed: %s", group, reason)
        self.outcomes["failed"] += 1
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            raise RunError(f"{MAX_FAILURES} episodes in a row have failed, the last one since {reason}")


def find_program(agent: str) -> list[str]:
    """The words of the program that is named: a file of Python, or a command; none for "". Raises ConfigError."""
    if not agent:
        return []
    program, *rest = shlex.split(agent)
    is_python = program.endswith(".py")
    if not (os.path.isfile(program) if is_python else shutil.which(program)):
        raise ConfigError(
            "agent", agent, "is neither a file of Python nor a program", f"give its path from {os.getcwd()}"
        )
    return [sys.executable] * is_python + [program, *rest]


def find_agent(client: SessionClient, agent: str, max_tokens: int | None) -> Agent:
    """The agent that is named, as `find_program` says; "" for one chat completion. Raises ConfigError."""
    if command := find_program(agent):
        return partial(run_program, command)
    fields: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    return partial(client.complete_chat, **fields)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m shoal.libs.agents.driver",
        description="Run episodes of agents for a run, until it is over.",
        epilog="The token is --token, $SHOAL_TOKEN, or the file `token` in $SHOAL_HOME (default ~/.shoal).",
        allow_abbrev=False,
    )
    parser.add_argument("url", help="the gateway: http://HOST:PORT")
    parser.add_argument("--env", required=True, help="tasks and rewards: reasoning_gym:NAME, module:name, file.py:name")
    parser.add_argument("--agent", default="", help="a file of Python, or a command; default: one chat completion")
    parser.add_argument("--agents", type=int, default=1, help="episodes at a time (default 1)")
    parser.add_argument("--group-size", type=int, default=8, help="episodes with the same task (default 8)")
    parser.add_argument("--groups", type=int, help="end after so many groups; default: with the run")
    parser.add_argument("--seed", type=int, help="of the first task; default: a random one")
    parser.add_argument("--max-tokens", type=int, help="of the default agent's answers")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="of an episode (default 3600)")
    parser.add_argument("--token", default="", help="visible to all users of this machine: better in $SHOAL_TOKEN")
    parser.add_argument(
        "--lifeline", action="store_true", help="end when standard input closes: for a program that starts drivers"
    )
    return parser


async def _drive(options: argparse.Namespace) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)

    def watch_lifeline() -> None:
        if not os.read(0, 1024):
            loop.remove_reader(0)
            task.cancel()

    if options.lifeline:
        loop.add_reader(0, watch_lifeline)
    environment = load_environment(options.env)
    client = SessionClient(options.url, options.token or read_existing_token(), options.agents)
    driver = Driver(
        client,
        environment,
        find_agent(client, options.agent, options.max_tokens),
        num_agents=options.agents,
        group_size=options.group_size,
        num_groups=options.groups,
        seed=random.randrange(2**31) if options.seed is None else options.seed,
        deadline_s=options.deadline_s,
    )
    try:
        await driver.run()
    finally:
        await client.close()
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(driver.outcomes.items()))
        _log.info("episodes: %s; mean reward %.3g", counts or "none", driver.mean_reward)


def main(arguments: Sequence[str] | None = None) -> int:
    """Drive until the run is over or a signal comes; returns the exit status."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    _log.setLevel(logging.INFO)
    try:
        asyncio.run(_drive(options))
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:  # by SIGTERM, or the lifeline
        return 0
    except ShoalError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
