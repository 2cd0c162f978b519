"""A game of the benchmarks: it asks for one action after another, by ZeroMQ, or by WebSocket without a library.

    python -m benchmarks.ours.websocket_game KIND ADDRESS NUMBER PERIOD_S [FOLDER]

KIND: `zmq` (pyzmq and msgpack), `binary` or `text` (a socket; its frames have a mask of zeros). Prints the time of
each answer, and its latency, until its input is closed; with a FOLDER it appends a byte to FOLDER/ended-NUMBER for each
episode whose end was answered, and connects again whenever the gateway is away.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgpack
import numpy as np

from benchmarks.ours.remote_inference_server import TOKEN
from benchmarks.talk import commands, say

EPISODE_STEPS = 200
NUM_ACTORS = 32  # a process with a number beyond is another incarnation of one below
MAX_ASKED_S = 60.0


class Link(Protocol):
    """A connection to the gateway. Both raise OSError when it is lost."""

    def send(self, message: dict[str, Any], observation: np.ndarray | None) -> None: ...

    def receive(self) -> dict[str, Any]: ...


class ZmqLink:
    def __init__(self, address: str) -> None:
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)

    def send(self, message: dict[str, Any], observation: np.ndarray | None) -> None:
        frames = [] if observation is None else [observation.tobytes()]
        self._socket.send_multipart([msgpack.packb(message), *frames])

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = msgpack.unpackb(self._socket.recv_multipart()[0])
        return answer


class WebSocketLink:
    """Small messages over a socket."""

    def __init__(self, address: str, is_text: bool, origin: str = "") -> None:
        url = urlsplit(address)
        self.socket = socket.create_connection((url.hostname, url.port), MAX_ASKED_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_text, self._pending = is_text, b""
        lines = [f"GET {url.path or '/'} HTTP/1.1", f"Host: {url.netloc}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13"]
        lines += [f"Origin: {origin}"] if origin else []
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        while b"\r\n\r\n" not in self._pending:
            self._fill()
        self.answer, _, self._pending = self._pending.partition(b"\r\n\r\n")
        self.is_open = b" 101 " in self.answer

    def send(self, message: dict[str, Any], observation: np.ndarray | None) -> None:
        if self._is_text:
            values = {} if observation is None else {"observation": observation.tolist()}
            return self.send_frame(0x81, json.dumps({**message, **values}).encode())
        frames = [msgpack.packb(message), *([] if observation is None else [observation.tobytes()])]
        self.send_frame(0x82, b"".join(struct.pack("<I", len(each)) + each for each in frames))

    def send_frame(self, first: int, data: bytes) -> None:
        size = bytes([0x80 | len(data)]) if len(data) < 126 else struct.pack(">BH", 0xFE, len(data))
        self.socket.sendall(bytes([first]) + size + bytes(4) + data)

    def receive(self) -> dict[str, Any]:
        first, data = self._receive_frame()
        while first & 0x0F == 9:  # a ping
            self.send_frame(0x8A, data)
            first, data = self._receive_frame()
        if first & 0x0F == 8:
            raise OSError("closed")
        answer: dict[str, Any] = json.loads(data) if self._is_text else msgpack.unpackb(data[4:])
        return answer

    def _receive_frame(self) -> tuple[int, bytes]:
        self._need(2)
        first, size, begin = self._pending[0], self._pending[1], 2
        if size == 126:
            self._need(4)
            size, begin = struct.unpack_from(">H", self._pending, 2)[0], 4
        self._need(begin + size)
        data, self._pending = self._pending[begin : begin + size], self._pending[begin + size :]
        return first, data

    def _need(self, size: int) -> None:
        while len(self._pending) < size:
            self._fill()

    def _fill(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise OSError("closed")
        self._pending += data


def join(kind: str, address: str, number: int, incarnation: int) -> Link:
    """Connect and say hello."""
    link: Link = ZmqLink(address) if kind == "zmq" else WebSocketLink(address, kind == "text")
    hello = {
        "kind": "hello",
        "protocol": 1,
        "token": TOKEN,
        "actor_id": f"game-{number % NUM_ACTORS}",
        "incarnation": incarnation,
    }
    link.send({**hello, "inference": "remote"}, None)
    if (welcome := link.receive())["kind"] != "welcome":
        raise OSError(str(welcome))
    return link


def join_again(kind: str, address: str, number: int, incarnation: int) -> Link:
    """Until the gateway is there."""
    deadline = time.monotonic() + MAX_ASKED_S
    while True:
        try:
            return join(kind, address, number, incarnation)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def list_steps(number: int) -> Generator[dict[str, Any], bool | None]:
    """The messages of one episode after the other; each reward is another number, exact in float32."""
    episode, reward = 0, number << 18
    while True:
        for step in range(EPISODE_STEPS + 1):
            reward += 1 if step else 0
            message = {"kind": "act", "episode": episode, "step": step, "reward": reward if step else 0}
            if (yield {**message, "terminated": step == EPISODE_STEPS}):
                break
        episode += 1


def play(kind: str, address: str, number: int, period_s: float, ended: Callable[[], None], results: list[Any]) -> None:
    incarnation = time.time_ns() // 1_000_000
    link, random = join_again(kind, address, number, incarnation), np.random.default_rng(number)
    steps = list_steps(number)
    message, due_at = next(steps), time.monotonic()
    while True:
        due_at = max(due_at + period_s, time.monotonic()) if period_s else 0.0
        time.sleep(max(0.0, due_at - time.monotonic()))
        asked_at = time.monotonic()
        observation = random.random(4, np.float32)
        while True:
            try:
                link.send(message, observation)
                answer = link.receive()
                break
            except OSError:
                link = join_again(kind, address, number, incarnation)
        results.append((asked_at, time.monotonic() - asked_at))
        if message["terminated"] and not answer["reason"]:
            ended()
        # A gateway that has restarted does not know the episode: another one begins.
        message = steps.send(True) if answer["reason"] else next(steps)


def main(kind: str, address: str, number: int, period_s: float, folder: Path | None) -> None:
    results: list[Any] = []
    file = None if folder is None else (folder / f"ended-{number}").open("ab", buffering=0)
    ended = (lambda: None) if file is None else (lambda: file.write(b".") and None)
    words = (kind, address, number, period_s, ended, results)
    threading.Thread(target=play, args=words, daemon=True).start()
    for asked in commands():
        begin_at, end_at = asked["begin_at"], asked["end_at"]
        say(latencies_s=[latency for at, latency in results if begin_at <= at < end_at])
    os._exit(0)  # its thread waits for an answer


if __name__ == "__main__":
    places = [Path(word) for word in sys.argv[5:]]
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), places[0] if places else None)
