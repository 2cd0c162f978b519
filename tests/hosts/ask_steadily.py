"""Asks a model at a rate, whatever becomes of it: `python ask_steadily.py URL TOKEN MODEL RATE SECONDS`.

Says "asking" when it has sent a quarter of them, then the longest time to an answer of each status, and at last how
many were answered with which status, as JSON; "lost" are those without an answer, and "503 for ever" those that do not
say when to come again.
"""

import asyncio
import json
import os
import ssl
import sys
import time
from collections import Counter

import httpx2

TIMEOUT_S = 100.0  # the endpoint's own is 60 s where nothing is set


async def _ask(client: httpx2.AsyncClient, url: str, body: object) -> tuple[str, float]:
    began_s = time.monotonic()
    became = await _find_status(client, url, body)
    return became, time.monotonic() - began_s


async def _find_status(client: httpx2.AsyncClient, url: str, body: object) -> str:
    try:
        answer = await client.post(url, json=body)
        return (
            "503 for ever"
            if answer.status_code == 503 and "retry-after" not in answer.headers
            else str(answer.status_code)
        )
    except httpx2.HTTPError:
        return "lost"


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


async def main(url: str, token: str, model: str, rate: float, seconds: float) -> None:
    place = f"{url}/v2/models/{model}"
    headers, limits = {"Authorization": f"Bearer {token}"}, httpx2.Limits(max_connections=None)
    trusting = ssl.create_default_context(cafile=os.environ.get("SHOAL_CA"))
    async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=TIMEOUT_S, verify=trusting) as client:
        (spec,) = (await client.get(place)).json()["inputs"]
        size = spec["shape"][1]
        body = {"inputs": [{**spec, "shape": [1, size], "data": [0.0] * size}]}
        asked, number = [], int(rate * seconds)
        for sent in range(number):
            if sent == number // 4:
                _say("asking")
            asked.append(asyncio.create_task(_ask(client, f"{place}/infer", body)))
            await asyncio.sleep(1 / rate)
        answers = await asyncio.gather(*asked)
        _say(f"the longest: { {status: round(taken_s, 2) for status, taken_s in sorted(answers)} } s")
        _say(json.dumps(Counter(status for status, _ in answers)))


if __name__ == "__main__":
    address, secret, name, *numbers = sys.argv[1:]
    asyncio.run(main(address, secret, name, float(numbers[0]), float(numbers[1])))
