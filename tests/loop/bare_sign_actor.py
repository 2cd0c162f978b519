"""Plays a game of signs by remote inference until the gateway says bye: pyzmq and msgpack, nothing else."""

from __future__ import annotations

import random
import struct
import sys

import msgpack
import zmq


def main(address: str, token: str, name: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    hello = {"kind": "hello", "protocol": 1, "token": token, "actor_id": name, "incarnation": 1, "inference": "remote"}
    socket.send(msgpack.packb(hello))
    episode, step, reward, seen = 0, 0, 0.0, [0.0] * 4
    while socket.poll(30_000):
        header = msgpack.unpackb(socket.recv_multipart()[0])
        if header["kind"] == "bye":
            break
        if header["kind"] not in ("welcome", "action"):
            continue
        if header["kind"] == "action":
            assert not header["reason"], header
            if header["action"] is None:
                episode, step, reward = episode + 1, 0, 0.0
            else:
                step, reward = step + 1, float(header["action"] == (seen[0] > 0))
        seen = [random.uniform(-1, 1) for _ in range(4)]
        act = {"kind": "act", "episode": episode, "step": step, "reward": reward, "truncated": step == 8}
        socket.send_multipart([msgpack.packb(act), struct.pack("<4f", *seen)])
    assert not {"numpy", "torch"} & set(sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
