"""A client of remote inference written from docs/protocol.md: pyzmq and msgpack, nothing else. Two episodes at once."""

from __future__ import annotations

import struct
import sys
from typing import Any

import msgpack
import zmq

STEPS = 5


def main(address: str, token: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)

    def hear(kind: str) -> dict[str, Any]:
        while socket.poll(20_000):
            header: dict[str, Any] = msgpack.unpackb(socket.recv_multipart()[0])
            if header["kind"] == kind:
                return header
        raise SystemExit(f"no {kind}")

    hello = {
        "kind": "hello",
        "protocol": 1,
        "token": token,
        "actor_id": "bare",
        "incarnation": 1,
        "inference": "remote",
    }
    socket.send(msgpack.packb(hello))
    size = hear("welcome")["spec"]["observation"]["shape"][0]
    for step in range(STEPS + 1):
        for episode in (1, 2):
            header = {"kind": "act", "episode": episode, "step": step, "reward": 1.0, "terminated": step == STEPS}
            socket.send_multipart([msgpack.packb(header), struct.pack(f"<{size}f", *[0.1 * episode] * size)])
        for _ in (1, 2):
            answer = hear("action")
            assert not answer["reason"], answer
            assert (answer["action"] is None) == (step == STEPS), answer
    assert not {"numpy", "torch"} & set(sys.modules)
    context.destroy(linger=200)


if __name__ == "__main__":
    main(*sys.argv[1:])
