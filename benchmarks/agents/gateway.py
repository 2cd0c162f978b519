"""What the gateway of agents takes: processor time for a call, memory for a session, and the order of openings.

    python -m benchmarks.agents.gateway [--runs N] [--quick]

A run without Ray: the gateway's threads (HTTP, the sessions' file, its own) are those of this process but the engine's,
the learner's and the main one, by the kernel's count. Agents have the stock client of OpenAI, in a process of
.venv-clients, over connections that stay open: episodes of one call and of nine. Answers have up to 7 tokens of a Llama
of 0.4 million parameters: an engine is hardly cheaper.

Memory: 2,000 sessions are opened and get four turns each, of 600 tokens that are read and 400 that are sampled, through
the service and its file, without HTTP. Openings: the credit of the run is taken; 100 sessions are asked for, each once
the one before it waits; then the open ones end, one after the other.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from benchmarks.agents.letters import make_tokenizer, pretrain
from benchmarks.agents.run import CLIENTS_PYTHON, TOKEN, make_spec
from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write
from benchmarks.talk import say
from shoal.libs.agents.sessions.service import SessionService
from shoal.libs.agents.sessions.session import Opening
from shoal.libs.agents.sessions.store import SessionRecords, SessionStore
from shoal.libs.agents.setting import make_setting
from shoal.libs.agents.spec import AgentsSpec
from shoal.rl.local_loop import LocalLoop

START = QUICK_RESULTS / "agents_start"  # the weights that runs begin with
SESSIONS = "/shoal/v1/sessions"
SAMPLER, OTHERS = "sampler", ("learner", "MainThread")  # threads
ENGINE = "its engine"
CALL_BAR_MS, MEMORY_BAR_MB = 5.0, 200.0
NUM_IDLE, NUM_TURNS, NUM_READ, NUM_SAMPLED = 2000, 4, 600, 400
NUM_WAITING, FEW, MANY = 100, 1, 9
TIMEOUT_S = 240.0


@contextmanager
def open_run(folder: Path, **fields: Any) -> Iterator[LocalLoop]:
    spec = AgentsSpec.parse(make_spec(pretrain(START), length=512, **fields))
    setting = make_setting(spec, folder, TOKEN, "run")
    with LocalLoop(spec.make_rl_spec(), setting.experience, folder, TOKEN, front=setting.front) as loop:
        yield loop


def read_threads_s() -> dict[str, float]:
    """Processor seconds of each thread of this process, by its name; of all that Python has not named together."""
    names = {each.native_id: each.name for each in threading.enumerate()}
    taken: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), "")
        taken[name] = taken.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return taken


def measure_calls(turns: int, num_sessions: int, folder: Path) -> tuple[float, float]:
    """Milliseconds of an episode: the gateway's, and the engine's."""
    with open_run(folder, max_version_lag=3) as loop:

        def count_ended() -> int:
            return int(loop.gateway.stats()["sessions"].get("ended", 0))

        url = loop.gateway.stats()["sessions"]["url"]
        words = [url, "--agents", "64", "--group-size", "8", "--seed", "0", "--turns", str(turns)]
        with Child([CLIENTS_PYTHON, "-m", "benchmarks.agents.client", *words], folder, {"SHOAL_TOKEN": TOKEN}):
            wait_for(lambda: count_ended() >= 32)
            before, first = read_threads_s(), count_ended()
            wait_for(lambda: count_ended() >= first + num_sessions)
            after, num = read_threads_s(), count_ended() - first
    taken = {name: 1e3 * (after[name] - before.get(name, 0.0)) / num for name in after}
    print({name: round(each, 2) for name, each in taken.items() if each > 0.01}, flush=True)
    return sum(each for name, each in taken.items() if name not in (SAMPLER, *OTHERS)), taken[SAMPLER]


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it took too long"
        time.sleep(0.05)


def measure_memory(folder: Path, num: int) -> float:
    """MB that idle sessions add to the process."""
    tokenizer = make_tokenizer()
    store = SessionStore(folder)
    sampler: Any = None  # these sessions are filled by hand
    spec = AgentsSpec.parse(
        {"max_version_lag": 0, "algorithm": {"name": "grpo", "group_size": 1, "groups_per_step": num}}
    )
    service = SessionService(store, tokenizer, spec, sampler, lambda _: None, lambda: 1)
    samples = torch.randint(0, 256, (NUM_TURNS, NUM_SAMPLED), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [{"role": "user", "content": chr(97 + turn) * NUM_READ} for turn in range(NUM_TURNS)]

    async def fill(indices: range) -> None:
        for index in indices:
            session, _ = await service.open(Opening(group=f"g{index}"), "")
            history: list[dict[str, Any]] = []
            turns = []
            for question, sampled in zip(texts, samples, strict=True):
                history.append(question)
                plan = session.tree.plan(history)
                history.append({"role": "assistant", "content": tokenizer.decode(sampled)})
                turns.append(session.tree.add(plan, history[-1], sampled, [-1.0] * NUM_SAMPLED, [1] * NUM_SAMPLED))
            await service.write_turns(session, turns, "chatcmpl-1", None)

    asyncio.run(fill(range(20)))  # what is made at the first use
    gc.collect()
    before = psutil.Process().memory_info().rss
    asyncio.run(fill(range(20, num)))
    gc.collect()
    after = psutil.Process().memory_info().rss
    store.close()
    return (after - before) / 1e6 * num / (num - 20)


def count_out_of_order(folder: Path) -> int:
    """Of sessions that wait for credit, those that are admitted before one that has asked earlier."""
    with open_run(folder, max_version_lag=0) as loop, httpx.Client(timeout=TIMEOUT_S) as http:
        url = loop.gateway.stats()["sessions"]["url"]
        token = {"authorization": f"Bearer {TOKEN}"}

        def request(number: int) -> str:
            with httpx.Client(timeout=TIMEOUT_S) as own:
                reply = own.post(url + SESSIONS, json={"group": f"{number}"}, headers=token)
            return str(reply.raise_for_status().json()["id"])

        num_taken = int(loop.gateway.stats()["sessions"]["credit"])
        sessions = [request(-number) for number in range(num_taken)]
        with ThreadPoolExecutor(NUM_WAITING) as threads:
            waiting = []
            for number in range(1, NUM_WAITING + 1):
                waiting.append(threads.submit(request, number))
                wait_for(lambda number=number: loop.gateway.stats()["sessions"]["waiting"] == number)
            for session in itertools.chain(sessions, (each.result() for each in waiting)):
                http.post(f"{url}{SESSIONS}/{session}/end", json={"reward": 1.0}, headers=token)
                if not loop.gateway.stats()["sessions"]["waiting"]:
                    break
            wait([*waiting])
    admitted = [int(each.group) for each in SessionRecords(folder).list_all()[num_taken:]]
    assert len(admitted) == NUM_WAITING
    return sum(earlier > later for earlier, later in itertools.pairwise(admitted))


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "memory":
        say(megabytes=measure_memory(Path(sys.argv[2]), int(sys.argv[3])))
        return
    chosen = options(__doc__, runs=3)
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = {FEW: 64 if chosen.quick else 512, MANY: 32 if chosen.quick else 128}
    found: dict[int, list[tuple[float, float]]] = {FEW: [], MANY: []}
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        for number in range(chosen.runs):
            for turns, num in sizes.items():
                own = folder / f"{number}-{turns}"
                own.mkdir()
                found[turns].append(measure_calls(turns, num, own))
        num_idle = NUM_IDLE // 10 if chosen.quick else NUM_IDLE
        words = ["-m", "benchmarks.agents.gateway", "memory", str(folder), str(num_idle)]
        with Child([OUR_PYTHON, *words], folder) as child:
            megabytes = child.answer(TIMEOUT_S)["megabytes"] * NUM_IDLE / num_idle
        (folder / "order").mkdir()
        misplaced = count_out_of_order(folder / "order")
    calls = [
        [(many - few) / (MANY - FEW) for many, few in zip(longer, shorter, strict=True)]
        for longer, shorter in zip(found[MANY], found[FEW], strict=True)
    ]
    call, episode = "processor time of the gateway, a call", "processor time of the gateway, an episode of one call"
    ours, engine = ([each[side] for each in calls] for side in range(2))
    whole, of_engine = ([each[side] for each in found[FEW]] for side in range(2))
    note = "of 7 tokens at most, by a Llama of 0.4 million parameters; one more of an episode"
    memory = "memory of 2,000 idle sessions of 4,000 tokens"
    order = "of 100 openings that wait for credit, admitted before an earlier one"
    rows: list[Row] = [
        compare(call, "ms", "lower", ours, engine, ENGINE, CALL_BAR_MS, "value", note),
        compare(episode, "ms", "lower", whole, of_engine, ENGINE, note="opening, call and end"),
        compare(memory, "MB", "lower", [megabytes], bar=MEMORY_BAR_MB, bar_kind="value"),
        compare(order, "openings", "lower", [misplaced], bar=0.0, bar_kind="value"),
    ]
    write("agents_gateway", rows, chosen.results)


if __name__ == "__main__":
    main()
