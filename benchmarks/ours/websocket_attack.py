"""A hostile client of a WebSocket gateway, with the least priority, until it is killed.

    python -m benchmarks.ours.websocket_attack KIND ADDRESS

`fuzz`: random bytes behind a handshake; `origins`: handshakes of another site's page; `strangers`: messages without a
session; `session`: an actor that sends nonsense as fast as it can; `idle`: as many connections as the system allows, up
to 10,000, opened again when they are closed.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
import time
from contextlib import suppress
from urllib.parse import urlsplit

import numpy as np

from benchmarks.ours.websocket_game import WebSocketLink, join
from benchmarks.talk import say

NUM_IDLE = 10_000


def fuzz(address: str) -> None:
    noise = np.random.default_rng(os.getpid())
    while True:
        try:
            link = WebSocketLink(address, is_text=False)
            for _ in range(20):
                link.socket.sendall(noise.bytes(int(noise.integers(1, 4000))))
        except OSError:
            continue


def pretend_origins(address: str) -> None:
    while True:
        assert not WebSocketLink(address, is_text=True, origin="https://evil.example").is_open


def speak_without_session(address: str) -> None:
    while True:
        try:
            link = WebSocketLink(address, is_text=True)
            while True:
                link.send_frame(0x81, b'{"kind":"ping"}')
        except OSError:
            continue


def flood(address: str) -> None:
    link = join("text", address, os.getpid(), 1)
    assert isinstance(link, WebSocketLink)
    frames = (bytes([0x81, 0x80 | 19]) + bytes(4) + b'{"kind":"nonsense"}') * 100
    link.socket.setblocking(False)
    while True:
        _, writable, _ = select.select([link.socket], [link.socket], [])
        with suppress(BlockingIOError):
            link.socket.recv(1 << 20)
        if writable:
            try:
                sent = link.socket.send(frames)
            except BlockingIOError:
                continue
            while rest := frames[sent % 25 :][: (25 - sent % 25) % 25]:  # a frame is sent to its end
                select.select([], [link.socket], [])
                sent += link.socket.send(rest)


def idle(address: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    url, number = urlsplit(address), min(NUM_IDLE, hard - 100)
    poller, opened, is_told = select.epoll(), dict[int, socket.socket](), False
    while True:
        while len(opened) < number:
            one = socket.create_connection((url.hostname, url.port), 60.0)
            opened[one.fileno()] = one
            poller.register(one, select.EPOLLIN)
            if len(opened) % 100 == 0:
                time.sleep(0.01)
        if not is_told:
            is_told = True
            say(connections=number)
        for descriptor, _ in poller.poll(1.0):
            opened.pop(descriptor).close()


KINDS = {"fuzz": fuzz, "origins": pretend_origins, "strangers": speak_without_session, "session": flood, "idle": idle}

if __name__ == "__main__":
    os.nice(19)
    if sys.argv[1] != "idle":
        say(connections=1)
    KINDS[sys.argv[1]](sys.argv[2])
