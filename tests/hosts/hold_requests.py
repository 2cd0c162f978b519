"""Long requests, and a stream, at each of two ingresses.

    python hold_requests.py TOKEN MODEL SECONDS NUM_MESSAGES PORT GRPC_PORT HOST HOST

The model takes as long as its input says, and its output says whose replica it was. First both ingresses are asked
until each has had an answer of both hosts. Says "asking" when all is sent. Then it asks the second ingress whether it
is ready until it says no, and says, as JSON, what became of everything.
"""

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np

from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.methods import METHODS, SERVICE

TIMEOUT_S = 300.0
NUM_REQUESTS = 2  # for each ingress
POLL_S = 0.2
BRIEF_S = 0.1
MESSAGE_S = 0.25


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


async def _ask(client: httpx2.AsyncClient, url: str, seconds: float) -> str:
    """The host that has answered, or what has become of the request."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [seconds] * 4}]}
    try:
        answer = await client.post(url, json=body)
    except httpx2.HTTPError as error:
        return f"lost: {error!r}"
    return (
        str(answer.json()["outputs"][0]["data"][0])
        if answer.status_code == 200
        else f"{answer.status_code} {answer.text}"
    )


async def _wait_for_both(client: httpx2.AsyncClient, url: str) -> None:
    """Two at once, since HAProxy has no reason to ask the second replica for one at a time."""
    while seen := set(await asyncio.gather(*(_ask(client, url, BRIEF_S) for _ in range(2)))):
        if seen == {"0.0", "1.0"}:
            return
        assert seen <= {"0.0", "1.0", "503"}, seen


async def _converse(address: str, credentials: grpc.ChannelCredentials, token: str, model: str, number: int) -> str:
    async def speak() -> AsyncIterator[pb.ModelInferRequest]:
        for _ in range(number):
            raw = np.full((1, 4), MESSAGE_S, np.float32).tobytes()
            message = pb.ModelInferRequest(model_name=model, raw_input_contents=[raw])
            message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
            yield message

    method: Any = METHODS["ModelStreamInfer"]
    async with grpc.aio.secure_channel(address, credentials) as channel:
        made = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", method.request.SerializeToString, method.response.FromString
        )
        # Without a deadline: the model's times differ so much that the endpoint would think that it cannot meet any.
        call = made(speak(), metadata=(("authorization", f"Bearer {token}"),))
        try:
            answers = [answer.error_message async for answer in call]
        except grpc.aio.AioRpcError as error:
            return f"cut: {error.details()}"
        return "".join(answers) or f"{len(answers)} answers"


async def _wait_until_left(client: httpx2.AsyncClient, url: str) -> str:
    while True:
        try:
            status = (await client.get(f"{url}/v2/health/ready")).status_code
        except httpx2.HTTPError as error:
            return f"gone: {error!r}"
        if status != 200:
            return str(status)
        await asyncio.sleep(POLL_S)


async def main(
    token: str, model: str, seconds: float, num_messages: int, port: str, grpc_port: str, hosts: list[str]
) -> None:
    headers, limits = {"Authorization": f"Bearer {token}"}, httpx2.Limits(max_connections=None)
    ca = os.environ["SHOAL_CA"]
    trusting, credentials = ssl.create_default_context(cafile=ca), grpc.ssl_channel_credentials(Path(ca).read_bytes())
    async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=TIMEOUT_S, verify=trusting) as client:
        urls = [f"https://{host}:{port}" for host in hosts]
        places = [f"{url}/v2/models/{model}/infer" for url in urls]
        for place in places:
            await asyncio.wait_for(_wait_for_both(client, place), TIMEOUT_S)
        asked = [_ask(client, place, seconds) for place in places for _ in range(NUM_REQUESTS)]
        spoken = [_converse(f"{host}:{grpc_port}", credentials, token, model, num_messages) for host in hosts]
        going = asyncio.gather(asyncio.gather(*asked), asyncio.gather(*spoken))
        await asyncio.sleep(seconds / 5)  # by then all are there, on any machine on which they are not over
        _say("asking")
        left = await _wait_until_left(client, urls[-1])
        answers, streams = await asyncio.wait_for(going, TIMEOUT_S)
        _say(json.dumps({"answers": answers, "streams": streams, "left": left}))


if __name__ == "__main__":
    secret, name, duration, number, *rest = sys.argv[1:]
    asyncio.run(main(secret, name, float(duration), int(number), rest[0], rest[1], rest[2:]))
