"""Calls between processes of a run over a link that is cut, and one that is slow: between two network namespaces."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shoal.sync import rpc
from shoal.sync.rpc import CallId, CurveKeys, Request, RpcClient, RpcService

HERE, THERE = "198.18.9.1", "198.18.9.2"  # of RFC 2544, for tests of networks
TIMEOUT_S = 60.0
_CLONE_NEWNET = 0x40000000


def has_namespaces() -> bool:
    tools = all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter"))
    return os.geteuid() == 0 and tools and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root and iproute2")


class Link:
    """Two namespaces, each held by a process, and the link between them."""

    def __init__(self, here: int, there: int) -> None:
        self.here, self.there = here, there
        self._run(here, f"ip link add near type veth peer name far netns {there}")
        for namespace, device, address in ((here, "near", HERE), (there, "far", THERE)):
            self._run(namespace, "ip link set lo up")
            self._run(namespace, f"ip addr add {address}/24 dev {device}")
            self._run(namespace, f"ip link set {device} up")

    def cut(self, seconds: float) -> None:
        self._run(self.there, "ip link set far down")
        time.sleep(seconds)
        self._run(self.there, "ip link set far up")

    def slow_down(self, rate: str) -> None:
        for namespace, device in ((self.here, "near"), (self.there, "far")):
            self._run(namespace, f"tc qdisc add dev {device} root tbf rate {rate} burst 16kb latency 500ms")

    def _run(self, namespace: int, words: str) -> None:
        done = subprocess.run(
            ["nsenter", "-t", str(namespace), "-n", *words.split()],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"


@pytest.fixture
def link() -> Iterator[Link]:
    with ExitStack() as closing:
        holders = []
        for _ in range(2):
            words = ["unshare", "--net", "sh", "-c", "echo up; read -r _"]
            holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            closing.callback(holder.communicate)
            closing.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            holders.append(holder.pid)
        yield Link(*holders)


class Add(Request[int], frozen=True):
    number: int
    padding: bytes


def enter(namespace: int) -> None:
    """Connections break after half a second without a sign of life."""
    rpc.UNACKNOWLEDGED_MS = 500
    with Path(f"/proc/{namespace}/ns/net").open() as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) == 0


def answer_calls(namespace: int, keys: CurveKeys, parent: Connection) -> None:
    """In a process of the namespace, until the parent asks what has come: the sum of the numbers so far."""
    enter(namespace)
    numbers: list[int] = []

    def add(caller: CallId, request: Add) -> int:
        numbers.append(request.number)
        return sum(numbers)

    service = RpcService(f"tcp://{HERE}:0", {Add: add}, keys)
    service.start()
    parent.send(service.address)
    parent.recv()
    [line] = [each for each in Path("/proc/self/net/dev").read_text().splitlines() if "near:" in each]
    parent.send((numbers, int(line.split()[1])))
    service.close()


def make_calls(namespace: int, keys: CurveKeys, address: str, parent: Connection, count: int, size: int) -> None:
    enter(namespace)
    client = RpcClient(address, TIMEOUT_S, again_s=0.2, keys=keys)
    for number in range(count):
        parent.send(number)
        assert client.call(Add(number, size * b"x")) == number * (number + 1) // 2
        time.sleep(0.01)
    client.close()
    parent.send(count)


class Calls:
    """A service on one side of the link, and the calls of a client on the other."""

    def __init__(self, link: Link, count: int, size: int) -> None:
        context, keys, self._count = multiprocessing.get_context("forkserver"), CurveKeys.make(), count
        self._service, beyond = context.Pipe()
        self._calls, client = context.Pipe()
        self._processes = [context.Process(target=answer_calls, args=(link.here, keys, beyond))]
        self._processes[0].start()
        arguments = link.there, keys, self._receive(self._service), client, count, size
        self._processes.append(context.Process(target=make_calls, args=arguments))
        self._processes[1].start()

    def _receive(self, pipe: Connection) -> Any:
        assert pipe.poll(TIMEOUT_S)
        return pipe.recv()

    def wait_for(self, number: int) -> None:
        while self._receive(self._calls) < number:
            pass

    def finish(self) -> int:
        """Each call was made once. Returns the bytes that the service's side has received."""
        self.wait_for(self._count)
        self._service.send("end")
        numbers, received = self._receive(self._service)
        assert numbers == list(range(self._count))
        for each in self._processes:
            each.join(TIMEOUT_S)
            assert each.exitcode == 0
        return int(received)


def test_a_link_that_is_cut_loses_no_call_and_repeats_none(link: Link) -> None:
    calls = Calls(link, 150, 2_000)
    for number in (20, 80):
        calls.wait_for(number)
        link.cut(1.2)
    calls.finish()


def test_a_slow_link_is_not_loaded_twice(link: Link) -> None:
    """Each call takes longer on the way than a caller on one host waits before it sends it again."""
    link.slow_down("2500kbit")
    count, size = 2, 300_000
    assert count * size <= Calls(link, count, size).finish() < 1.5 * count * size
