"""Agents of six frameworks and clients, unchanged, while the gateway and replicas are killed: what each has recorded.

    python -m benchmarks.agents.frameworks [--minutes N] [--quick]

Fifty episodes of each, or as many as begin in the time, one after the other, all frameworks at the same time:
openai-agents (chat and responses), langgraph with langchain-openai, smolagents (CodeAgent, which gets code, and
ToolCallingAgent, which is forced to call), Anthropic's client, and clients/agents/agent.mjs with that of npm. An agent
has the variables of its session; a client repeats a request up to 20 times, but npm's, which is as it comes. The model
of `shoal run agents` writes noise: frameworks answer it with errors, and ask again. Two replicas sample. SIGKILL ends
the gateway and a replica by turns. Rewards are random.

Of an episode that went well the session's turns and tokens must be those that the framework has counted; of
agent.mjs, which counts nothing, the two answers. Each session has one end, each token its account.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.agents.framework_agents import FRAMEWORKS
from benchmarks.agents.killed import Books, KilledRun, Killer, find_errors, read_books
from benchmarks.agents.letters import make_model, make_tokenizer
from benchmarks.children import AGENTS, AGENTS_PYTHON, ROOT, Child, scratch
from benchmarks.result import Row, compare, options, write
from shoal.errors import InferenceError
from shoal.home import read_existing_token
from shoal.libs.agents.driver import OpenedSession, SessionClient, run_program
from shoal.libs.agents.tasks import AgentTask, EpisodeFailed

NODE = "npm's openai"
NUM_EPISODES, MINUTES, KILL_S, EPISODE_S, READY_S = 50, 30.0, 15.0, 400.0, 600.0
CONTEXT, MAX_TOKENS, MEAN_LENGTH = 32768, 64, 8
Episode = tuple[str, dict[str, Any]]  # the session's id, and what the framework says
FIELDS = {
    **{"name": "noise", "replicas": 2, "replica.num_cpus": 0.1, "learner.num_cpus": 0.1, "max_tokens": MAX_TOKENS},
    **{"length": CONTEXT, "slots": 8, "algorithm.group_size": 2, "algorithm.groups_per_step": 4, "max_version_lag": 3},
    **{"learner.max_restarts": 1000, "sessions.group_s": 300.0},
}


async def play_node(session: OpenedSession, text: str) -> dict[str, Any]:
    try:
        await run_program(["node", str(AGENTS / "agent.mjs")], session, AgentTask(text))
    except EpisodeFailed as failed:
        return {"failed": str(failed)}
    return {"answers": 2}


async def play_all(name: str, num: int, until_s: float, run: KilledRun, child: Child | None) -> list[Episode]:
    """The episodes of a framework, in pairs. child: that plays them; None for Node.js"""
    client = SessionClient(run.url, read_existing_token(), 1)
    chances, episodes = random.Random(name), list[Episode]()
    try:
        for number in range(num):
            if number % 2 == 0 and time.monotonic() > until_s:
                break
            fields = {"group": f"{name} {number // 2}", "group_size": 2, "deadline_s": 600.0}
            session = await client.open(f"{name} {number}", **fields)
            if child is None:
                found = await play_node(session, f"cabbed {number}")
            else:
                found = await asyncio.to_thread(child.ask, EPISODE_S, env=session.env, text=f"cabbed {number}")
            episodes.append((session.id, found))
            failed = found.get("failed")
            with suppress(InferenceError):
                await client.end(session, **({"failed": failed} if failed else {"reward": chances.random()}))
    finally:
        await client.close()
    return episodes


async def play_while_killing(
    num: int, until_s: float, run: KilledRun, children: dict[str, Child | None], killer: Killer
) -> tuple[dict[str, list[Episode]], list[str]]:
    """The episodes of each framework, and where the accounts did not hold meanwhile."""
    playing = {
        name: asyncio.ensure_future(play_all(name, num, until_s, run, child)) for name, child in children.items()
    }
    everything, errors = asyncio.gather(*playing.values()), list[str]()
    while not everything.done():
        await asyncio.wait([everything], timeout=KILL_S)
        run.require_running()
        if not everything.done():
            part = await asyncio.to_thread(killer.kill)
            errors += find_errors(await asyncio.to_thread(read_books, run.folder))
            print(f"killed: {part or '-'}", *errors, flush=True)
    return dict(zip(playing, await everything, strict=True)), errors


def check(episodes: list[Episode], books: Books) -> dict[str, Any]:
    """What was recorded of a framework's episodes, beside what it has counted."""
    states = {session: state for session, state, *_ in books.sessions}
    differing, num_turns, tokens = list[str](), 0, 0
    for session, found in episodes:
        turns = [turn for _, turn in books.turns.get(session, ())]
        num_turns += len(turns)
        tokens += sum(len(turn.tokens) for turn in turns)
        recorded = {"answers": len(turns), "tokens": sum(len(turn.tokens) for turn in turns)}
        if "failed" not in found and any(recorded[what] != num for what, num in found.items()):
            differing.append(f"{session}: {found}, recorded {recorded}")
    failures = Counter(found["failed"].partition(":")[0] for _, found in episodes if "failed" in found)
    return {
        "differing": differing,
        "open": [session for session, _ in episodes if states[session] == "open"],
        "failures": failures,
        "turns": num_turns,
        "tokens": tokens,
    }


def save_model(folder: Path) -> Path:
    """A Llama that writes noise, and after each token ends with a probability of one in MEAN_LENGTH."""
    import torch

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=32, layers=1, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        tokens = torch.randint(256, (16, 64))
        tokens[torch.rand(tokens.shape) < 1 / MEAN_LENGTH] = tokenizer.eos_token_id
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    chosen = options(__doc__, runs=1, minutes=MINUTES)
    num = 4 if chosen.quick else NUM_EPISODES
    shutil.copy(ROOT / "clients" / "agents" / "agent.mjs", AGENTS)  # where Node.js finds npm's packages
    with scratch() as folder, ExitStack() as closing:
        run = closing.enter_context(KilledRun(folder, model=save_model(folder / "model"), **FIELDS))
        environment = {"PYTHONDONTWRITEBYTECODE": ""}
        children: dict[str, Child | None] = {NODE: None}
        for name in FRAMEWORKS:
            words = [AGENTS_PYTHON, "-m", "benchmarks.agents.framework_agents", name]
            children[name] = closing.enter_context(Child(words, folder, environment, goodbye_s=2.0))
        run.wait()
        os.environ["SHOAL_HOME"] = str(run.home)
        for child in filter(None, children.values()):
            child.answer(READY_S)
        until_s = time.monotonic() + 60 * chosen.minutes
        killer = Killer(0, {part: partial(run.find, part) for part in ("gateway", "replica")})
        episodes, errors = asyncio.run(play_while_killing(num, until_s, run, children, killer))
        books = read_books(run.folder)
    errors += find_errors(books)
    kills = f"of the gateway {killer.num['gateway']}, of a replica {killer.num['replica']}"
    what = "agents of frameworks, gateway and replicas killed"
    rows: list[Row] = []
    for name, played in episodes.items():
        found = check(played, books)
        print(name, found, flush=True)
        failed = ", ".join(f"{number} {kind}" for kind, number in found["failures"].items())
        note = f"of {len(played)}, failed: {failed or 'none'}; {found['turns']:,} answers, {found['tokens']:,} tokens"
        note += f"; kills: {kills}"
        wrong = len(found["differing"]) + len(found["open"])
        title = f"{what}: episodes of {name} that are recorded otherwise than it says, or have no end"
        rows.append(compare(title, "", "lower", [wrong], bar=0, bar_kind="value", note=note))
    fates = ", ".join(f"{what} {each.total():,}" for what, each in books.counts.items())
    title = f"{what}: differences in the accounts"
    rows.append(compare(title, "", "lower", [len(errors)], bar=0, bar_kind="value", note=f"tokens: {fates}"))
    write("agents_frameworks", rows, chosen.results)


if __name__ == "__main__":
    main()
