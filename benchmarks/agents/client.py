"""Agents with the stock client of OpenAI, in .venv-clients: episodes of the task of `letters`, and no code of ours.

    SHOAL_TOKEN=... python -m benchmarks.agents.client URL --agents 64 --group-size 8 --seed 0

Ends with the run, or when its input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from typing import Any

import httpx2
import openai

from benchmarks.agents.letters import MAX_TOKENS, REWARDS, tasks

SESSIONS = "/shoal/v1/sessions"


async def play(http: Any, chosen: argparse.Namespace, group: str, task: dict[str, Any]) -> None:
    """One episode: an opening, `turns` completions, and an end. The last answer is rewarded."""
    driver = {"authorization": f"Bearer {os.environ['SHOAL_TOKEN']}"}
    body = {"group": group, "group_size": chosen.group_size}
    reply = await http.post(chosen.url + SESSIONS, json=body, headers=driver)
    if reply.status_code == 410:
        sys.exit(0)
    session = reply.raise_for_status().json()
    client = openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["key"], http_client=http)
    messages = [{"role": "user", "content": task["prompt"]}]
    text = ""
    for turn in range(chosen.turns):
        if turn:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": task["prompt"]}]
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=chosen.max_tokens)
        text = answer.choices[0].message.content
    reward = REWARDS[chosen.reward](text, task["data"]["answer"])
    ended = await http.post(f"{chosen.url}{SESSIONS}/{session['id']}/end", json={"reward": reward}, headers=driver)
    ended.raise_for_status()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    for name in ("--agents", "--group-size", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--reward", choices=REWARDS, default="letters")
    chosen = parser.parse_args()
    asyncio.get_running_loop().add_reader(0, lambda: sys.exit(0))
    seeds = itertools.count(chosen.seed)
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as http:

        async def play_groups() -> None:
            for seed in seeds:
                members = range(chosen.group_size)
                await asyncio.gather(*(play(http, chosen, f"g{seed}", tasks(seed)) for _ in members))

        await asyncio.gather(*(play_groups() for _ in range(chosen.agents // chosen.group_size)))


if __name__ == "__main__":
    asyncio.run(main())
