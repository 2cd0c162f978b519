"""Asks each model at an ingress, all at once: `python ask_models.py TOKEN PORT MODEL,MODEL... HOST`.

Says, as JSON, what each answered: a number, or its status, negative; 0 for no answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys

import httpx2

TIMEOUT_S = 100.0


async def _ask(client: httpx2.AsyncClient, url: str, model: str) -> int:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}]}
    try:
        answer = await client.post(f"{url}/v2/models/{model}/infer", json=body)
    except httpx2.HTTPError:
        return 0
    return int(answer.json()["outputs"][0]["data"][0]) if answer.status_code == 200 else -answer.status_code


async def main(token: str, port: str, models: list[str], host: str) -> None:
    trusting = ssl.create_default_context(cafile=os.environ["SHOAL_CA"])
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT_S, verify=trusting) as client:
        answers = await asyncio.gather(*(_ask(client, f"https://{host}:{port}", model) for model in models))
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    secret, number, names, there = sys.argv[1:]
    asyncio.run(main(secret, number, names.split(","), there))
