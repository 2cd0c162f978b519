"""A driver of the letters' task that notes what it is given: its agent asks once, and at times again with the same key.

    SHOAL_TOKEN=... python -m benchmarks.agents.player URL --log FILE --agents 16 --seed 0

Ends with the run. A line of FILE is {"ask": SESSION}, {"answer": SESSION, "id": ID, "tokens": [...]} or
{"again": SESSION, "is_same": BOOL}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from typing import Any
from urllib.parse import urlsplit

from benchmarks.agents.letters import GROUP_SIZE
from shoal.home import read_existing_token
from shoal.libs.agents.driver import AgentAnswer, Driver, OpenedSession, SessionClient
from shoal.libs.agents.tasks import AgentTask, load_environment

DEADLINE_S, AGAIN, AGAIN_S = 60.0, 0.125, 4.0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--log", required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    chosen = parser.parse_args()
    log = os.open(chosen.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    client = SessionClient(chosen.url, read_existing_token(), chosen.agents)
    numbers = random.Random(chosen.seed)

    def note(**content: Any) -> None:
        os.write(log, (json.dumps(content) + "\n").encode())

    async def answer(session: OpenedSession, task: AgentTask) -> AgentAnswer:
        path = f"{urlsplit(session.base_url).path}/chat/completions"
        headers = {"authorization": f"Bearer {session.key}", "idempotency-key": session.id}
        body = {"model": "policy", "messages": task.messages, "return_token_ids": True}
        note(ask=session.id)
        reply = await client._post(path, body, headers)
        read = json.loads(reply)
        note(answer=session.id, id=read["id"], tokens=read["choices"][0]["token_ids"])
        if numbers.random() < AGAIN:
            await asyncio.sleep(AGAIN_S * numbers.random())
            note(again=session.id, is_same=await client._post(path, body, headers) == reply)
        return AgentAnswer(read["choices"][0]["message"]["content"] or "")

    environment = load_environment("benchmarks.agents.letters:grade")
    sizes = {"num_agents": chosen.agents, "group_size": GROUP_SIZE}
    driver = Driver(client, environment, answer, **sizes, seed=chosen.seed, deadline_s=DEADLINE_S)
    try:
        await driver.run()
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
