"""Calls between the processes of a run: each is made once, also over a link that is cut or slow, and only by a process
of the run."""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from shoal.channel import rpc
from shoal.channel.rpc import CallId, CurveKeys, Request, RpcClient, RpcService
from shoal.errors import ConnectionLost, TrainError

HERE, THERE = "198.18.9.1", "198.18.9.2"  # of RFC 2544, for tests of networks
TIMEOUT_S = 60.0
_CLONE_NEWNET = 0x40000000


def has_namespaces() -> bool:
    tools = all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter"))
    return os.geteuid() == 0 and tools and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root and iproute2")


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
            assert holder.stdout.readline() == "up\n"
            holders.append(holder.pid)
        yield Link(*holders)


class Add(Request[int], frozen=True):
    number: int
    padding: bytes = b""


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
        context = multiprocessing.get_context("forkserver")
        keys = CurveKeys.make()
        self._count = count
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


@needs_namespaces
def test_a_link_that_is_cut_loses_no_call_and_repeats_none(link: Link) -> None:
    calls = Calls(link, 150, 2_000)
    for number in (20, 80):
        calls.wait_for(number)
        link.cut(1.2)
    calls.finish()


@needs_namespaces
def test_a_slow_link_is_not_loaded_twice(link: Link) -> None:
    """Each call takes longer on the way than a caller on one host waits before it sends it again."""
    link.slow_down("2500kbit")
    count, size = 2, 300_000
    assert count * size <= Calls(link, count, size).finish() < 1.5 * count * size


class Unknown(Request[int], frozen=True):
    """No service has a handler for it."""


def test_a_call_that_is_sent_again_is_made_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def count(caller: CallId, request: Add) -> int:
        calls.append(request.number)
        threading.Event().wait(0.3)  # so long that the caller sends it again
        return 10 * request.number

    service = RpcService(f"ipc://{tmp_path}/service", {Add: count})
    client = RpcClient(f"ipc://{tmp_path}/service", TIMEOUT_S, again_s=0.02)
    service.start()
    try:
        assert [client.call(Add(number)) for number in range(2)] == [0, 10]
        with pytest.raises(TrainError, match="request: ValidationError"):
            client.call(Unknown())
        assert client.call(Add(2)) == 20
        assert calls == [0, 1, 2]
    finally:
        client.close()
        service.close()


def test_only_a_process_with_the_runs_key_gets_in() -> None:
    calls: list[Add] = []
    handlers = {Add: lambda caller, request: calls.append(request)}
    service = RpcService("tcp://127.0.0.1:0", handlers, CurveKeys.make())
    service.start()
    stranger = RpcClient(service.address, 0.3, again_s=0.1, keys=CurveKeys.make())
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    try:
        with pytest.raises(ConnectionLost, match="has not answered"):
            stranger.call(Add(0))
        plain.connect(service.address)
        plain.send(msgspec.msgpack.encode((0, Add(0))))
        assert plain.poll(300) == 0
        assert calls == []
    finally:
        stranger.close()
        plain.close(linger=0)
        service.close()
