"""A replica's peer, and one that calls it: `python call_peer.py serve HOST`, `python call_peer.py call HOST`.

The peer answers `/fine`, and never anything else. The caller has one request answered and another sent, says "sent",
and what became of the latter and of a later one, as JSON.
"""

import asyncio
import json
import sys

from shoal.errors import ConnectionLost
from shoal.serve.replica.peers import PeerTransport

PORT = 8000


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


async def serve(host: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST /fine "):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        _say("asked")
        await asyncio.Event().wait()

    async with await asyncio.start_server(answer, host, PORT) as server:
        _say("listening")
        await server.serve_forever()


async def call(host: str) -> None:
    transport, address = PeerTransport(), f"{host}:{PORT}"

    async def post(path: str) -> str:
        try:
            return str((await transport.post(address, path, {}, b""))[0])
        except ConnectionLost as error:
            return type(error).__name__

    first = asyncio.create_task(post("/fine"))
    held = asyncio.create_task(post("/hold"))
    assert await first == "200"  # and its connection is idle
    _say("sent")
    _say(json.dumps([await held, await post("/fine")]))


if __name__ == "__main__":
    role, there = sys.argv[1:]
    asyncio.run({"serve": serve, "call": call}[role](there))
