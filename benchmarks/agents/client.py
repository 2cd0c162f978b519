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

from benchmarks.agents.letters import compute_reward, tasks

SESSIONS = "/shoal/v1/sessions"


async def play(http: Any, url: str, group: str, group_size: int, task: dict[str, Any], max_tokens: int | None) -> None:
    """One episode: three requests."""
    driver = {"authorization": f"Bearer {os.environ['SHOAL_TOKEN']}"}
    body = {"group": group, "group_size": group_size}
    reply = await http.post(url + SESSIONS, json=body, headers=driver)
    if reply.status_code == 410:
        sys.exit(0)
    session = reply.raise_for_status().json()
    client = openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["key"], http_client=http)
    messages = [{"role": "user", "content": task["prompt"]}]
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    answer = await client.chat.completions.create(model="policy", messages=messages, **fields)
    reward = compute_reward(answer.choices[0].message.content, task["data"]["answer"])
    ended = await http.post(f"{url}{SESSIONS}/{session['id']}/end", json={"reward": reward}, headers=driver)
    ended.raise_for_status()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    for name in ("--agents", "--group-size", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--max-tokens", type=int)
    chosen = parser.parse_args()
    asyncio.get_running_loop().add_reader(0, lambda: sys.exit(0))
    seeds = itertools.count(chosen.seed)
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as http:

        async def play_groups() -> None:
            for seed in seeds:
                episode = (http, chosen.url, f"g{seed}", chosen.group_size, tasks(seed), chosen.max_tokens)
                await asyncio.gather(*(play(*episode) for _ in range(chosen.group_size)))

        await asyncio.gather(*(play_groups() for _ in range(chosen.agents // chosen.group_size)))


if __name__ == "__main__":
    asyncio.run(main())
