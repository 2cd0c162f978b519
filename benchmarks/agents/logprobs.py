"""Log-probabilities of the trainer less those of the sampler, by the same version of the weights.

    python -m benchmarks.agents.logprobs [--quick]

A run without Ray learns while agents talk to it over HTTP: with tools, with an edited history that has a call and its
result (a branch), with two answers to one question (branches), and with answers that go on under newer weights. Before
each update the trainer computes the batch that it is about to learn, each token by its weights of the version that has
sampled it. A Llama of 0.4 million parameters in float32: all weights learn; then adapters (LoRA of rank 8), which the
sampler has on its base. Then with a sampler in bf16, whose weights are the trainer's, rounded: a trainer in float32,
and one that computes in bf16 too. There π / μ, truncated, is what the loss weighs each token with: its mean is 1 where
it makes up for the difference.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.agents.letters import compute_reward, pretrain, tasks
from benchmarks.agents.run import TOKEN, make_spec
from benchmarks.children import scratch
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write
from shoal.libs.agents.sessions.store import SessionRecords
from shoal.libs.agents.setting import check, make_setting
from shoal.libs.agents.spec import AgentsSpec
from shoal.rl.local_loop import LocalLoop

START = QUICK_RESULTS / "agents_start"
SESSIONS = "/shoal/v1/sessions"
GROUPS, GROUP_SIZE = 2, 4
RHO_BAR = 2.0  # the default of the algorithms
NUM_TOKENS, MEAN_BAR, MAX_BAR, TIMEOUT_S = 10_000, 1e-5, 1e-4, 600.0
SIDES: dict[str, dict[str, Any]] = {
    "all weights": {"learning_rate": 1e-3},
    "LoRA": {"learning_rate": 3e-3, "lora": {"rank": 8}},
    "sampler in bf16": {"learning_rate": 1e-3, "weights": "bf16"},
    "sampler and trainer in bf16": {"learning_rate": 1e-3, "weights": "bf16", "precision": "bf16"},
}
TOOLS = [{"type": "function", "function": {"name": "sort", "parameters": {"type": "object", "properties": {}}}}]


class Differences:
    """Of a learner's batches: log p of the trainer - log p of the sampler of each token, by the trainer's weights of
    the version that has sampled it."""

    def __init__(self, algorithm: Any) -> None:
        self._algorithm, self._update = algorithm, algorithm.update
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self.found: list[np.ndarray] = []
        algorithm.update = self.update

    def update(self, batch: Any) -> Iterator[Any]:
        model = self._algorithm.model
        newest, is_published = batch.extras["newest"][0]
        state = {name: each.clone() for name, each in model.state_dict().items()}
        if is_published:
            self._states[int(newest)] = state
        trains = np.delete(batch.extras["trains"], np.cumsum(batch.lengths + 1) - 1)
        for version in np.unique(batch.versions[trains]).tolist():
            if version in self._states:
                model.load_state_dict(self._states[version])
                differences = self._algorithm.compute_log_ratios(batch)
                self.found.append(differences[trains & (batch.versions == version)])
        model.load_state_dict(state)
        yield from self._update(batch)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.found))


async def play(http: httpx.AsyncClient, group: str, task: dict[str, Any], chance: random.Random) -> None:
    """An episode of three requests: tools and two answers; a call of another and its result; and one that goes on."""
    token = {"authorization": f"Bearer {TOKEN}"}
    session = (
        (await http.post(SESSIONS, json={"group": group, "group_size": GROUP_SIZE}, headers=token))
        .raise_for_status()
        .json()
    )

    async def ask(messages: list[dict[str, Any]], **fields: Any) -> str:
        body = {"model": "policy", "messages": messages, "tools": TOOLS, **fields}
        key = {"authorization": f"Bearer {session['key']}"}
        reply = await http.post(f"/s/{session['id']}/v1/chat/completions", json=body, headers=key)
        return str(reply.raise_for_status().json()["choices"][0]["message"]["content"] or "")

    question = {"role": "user", "content": task["prompt"]}
    answer = await ask([question], n=2)
    call = {"id": "call_1", "type": "function", "function": {"name": "sort", "arguments": '{"text": "b a"}'}}
    history = [
        question,
        {"role": "assistant", "content": answer, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a b"},
    ]
    answer = await ask(history)
    history += [{"role": "assistant", "content": answer}, question]
    answer = await ask(history)
    reward = compute_reward(answer, task["data"]["answer"]) + chance.random()
    (await http.post(f"{SESSIONS}/{session['id']}/end", json={"reward": reward}, headers=token)).raise_for_status()


async def play_until(url: str, differences: Differences, num_tokens: int) -> None:
    chance, deadline_s = random.Random(0), time.monotonic() + TIMEOUT_S
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits()) as http:

        async def play_groups(first: int) -> None:
            for number in range(first, 1_000_000, 2 * GROUPS):
                if differences.num_tokens >= num_tokens or time.monotonic() > deadline_s:
                    return
                await asyncio.gather(*(play(http, f"g{number}", tasks(number), chance) for _ in range(GROUP_SIZE)))

        await asyncio.gather(*(play_groups(first) for first in range(2 * GROUPS)))
    assert differences.num_tokens >= num_tokens, "it took too long"


def measure(algorithm: dict[str, Any], num_tokens: int, folder: Path) -> tuple[np.ndarray, str]:
    """The differences, and what they are of."""
    sizes = {"group_size": GROUP_SIZE, "groups_per_step": GROUPS}  # small steps: weights change within answers
    spec = AgentsSpec.parse(
        make_spec(pretrain(START), {**sizes, **algorithm}, max_tokens=24, length=512, learner={"publish_interval_s": 0})
    )
    check(spec)
    folder.mkdir()
    setting = make_setting(spec, folder, TOKEN, "run")
    with LocalLoop(spec.make_rl_spec(), setting.experience, folder, TOKEN, front=setting.front) as loop:
        differences = Differences(loop.learner.algorithm)
        asyncio.run(play_until(loop.gateway.stats()["sessions"]["url"], differences, num_tokens))
        num_updates = loop.learner.stats()["updates"]
    records = SessionRecords(folder)
    turns = [turn for session in records.list_all() for turn in records.load_turns(session.id)]
    num_swapped = sum(len(each.spans) > 1 for each in turns)
    num_branches = sum(each.parent is None for each in turns)
    found = np.concatenate(differences.found)
    note = f"{len(found):,} tokens, {num_updates} updates; of {len(turns):,} answers {num_swapped} under two versions"
    return found, f"{note}, {len(turns) - num_branches} that continue another"


def main() -> None:
    chosen = options(__doc__, runs=1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        for name, algorithm in SIDES.items():
            found, note = measure(algorithm, NUM_TOKENS // 10 if chosen.quick else NUM_TOKENS, folder / name)
            title = f"log p of the trainer less the sampler's, one version, {name}"
            ratios = np.exp(found.astype(np.float64))
            weights = ratios.clip(max=RHO_BAR)
            note += (
                f"; π / μ: {(ratios > RHO_BAR).sum()} truncated at {RHO_BAR:g}, largest {ratios.max():.4g}, mean of "
                f"the truncated 1 {weights.mean() - 1:+.1e} ± {weights.std() / len(weights) ** 0.5:.1e}"
            )
            bars: tuple[Any, ...] = (None, None) if "weights" in algorithm else (MEAN_BAR, MAX_BAR)
            sizes = np.abs(found)
            for what, value, bar in zip(("mean", "largest"), (sizes.mean(), sizes.max()), bars, strict=True):
                kind: Any = None if bar is None else "value"
                rows.append(compare(f"{title}, {what}", "", "lower", [float(value)], bar=bar, bar_kind=kind, note=note))
                note = ""
    write("agents_logprobs", rows, chosen.results)


if __name__ == "__main__":
    main()
