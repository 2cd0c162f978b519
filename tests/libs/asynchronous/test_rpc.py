"""Calls between the processes of a run: each is made once, also over a link that is cut or slow, and only by a process
of the run. Rounds of peers by such calls."""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import msgspec
import pytest
import torch
import zmq
from torch import nn
from torch.optim import SGD

from shoal.channel import rpc
from shoal.channel.rpc import CallId, CurveKeys, Request, RpcClient, RpcService
from shoal.errors import ConnectionLost, TrainError, WorkerDeparted
from shoal.libs.asynchronous.controller import ControllerSetting, make_controller
from shoal.libs.asynchronous.messages import LeaveRun
from shoal.libs.asynchronous.peers import PeerController, PeerSync
from shoal.parallel import World
from shoal.sync.config import SyncConfig
from shoal.sync.synchronizer import Connection as PeerConnection
from shoal.sync.synchronizer import RankSignals, Replica, StateAccess, make_synchronizer

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


# -- rounds of peers: what each receives, and that none waits for one that has died


class OwnConfig(SyncConfig):
    kind: str = "own"

    synchronizer: ClassVar[str] = f"{Path(__file__).name.removesuffix('.py')}:Mean"


class Mean(PeerSync):
    """The mean of all weights after every second step."""

    def after_step(self) -> None:
        if self.num_steps % 2 == 0 and (found := self.gather(self.weights)):
            self.load_weights([torch.stack(each).mean(0) for each in zip(*found.values(), strict=True)])


class Member:
    """A worker with one weight, in a thread of its own; its gradient in each step is `gradient`."""

    def __init__(self, folder: Path, worker: int, num_workers: int, weight: float) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._parameter, self.is_noticed = nn.Parameter(torch.tensor([weight])), False
        place = worker, num_workers, f"ipc://{folder}/controller", list[str](), TIMEOUT_S, None
        state = StateAccess(dict, lambda found: None, lambda: (1.0, 1.0))
        optimizer, connection = SGD([self._parameter], 1.0), PeerConnection(*place, lambda: self.is_noticed)
        replica = Replica(OwnConfig(), Mock(), optimizer, World.single("cpu"), state, connection)
        sync = self.call(lambda: make_synchronizer(replica)).result(TIMEOUT_S)
        assert isinstance(sync, Mean)
        self.sync = sync

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._thread.submit(function, *arguments)

    def begin(self, step: int = 0) -> Any:
        return self.call(self.sync.begin, step)

    def step(self, gradient: float) -> Any:
        def take() -> tuple[int, float]:
            self.sync.before_step()
            self._parameter.grad = torch.tensor([gradient])
            return self.sync.apply_gradients(), self._parameter.item()

        return self.call(take)

    def close(self) -> None:
        self.call(self.sync.close).result(TIMEOUT_S)
        self._thread.shutdown()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[PeerController]:
    made = make_controller(OwnConfig(), ControllerSetting(f"ipc://{tmp_path}/controller", [], 2, None, TIMEOUT_S, None))
    assert isinstance(made, PeerController)
    made.start()
    yield made
    made.close()


@pytest.fixture
def pair(tmp_path: Path, controller: PeerController) -> Iterator[list[Member]]:
    """Both have begun with the weight of the chief, at step 7."""
    members = [Member(tmp_path, worker, 2, 10.0 * worker) for worker in range(2)]
    late = members[1].begin()  # waits for the chief's weights
    assert members[0].begin(7).result(TIMEOUT_S) == late.result(TIMEOUT_S) == 7
    yield members
    for each in members:
        each.close()


def leave(folder: Path, worker: int) -> None:
    """As the process that has started the run says of a worker that died."""
    client = RpcClient(f"ipc://{folder}/controller", TIMEOUT_S)
    client.call(LeaveRun(worker))
    client.close()


def test_workers_go_on_with_what_all_have_given(pair: list[Member], controller: PeerController) -> None:
    first, second = pair
    assert first.step(1.0).result(TIMEOUT_S) == (8, -1.0)
    waiting = first.step(1.0)
    assert second.step(2.0).result(TIMEOUT_S) == (8, -2.0)
    assert second.step(2.0).result(TIMEOUT_S) == waiting.result(TIMEOUT_S) == (9, -3.0)
    assert first.sync.round == second.sync.round == 1
    assert controller.describe() == {"peers": {"rounds": 1}}


def test_a_worker_that_dies_is_not_waited_for_and_its_replacement_begins_with_the_chief_s_weights(
    tmp_path: Path, pair: list[Member]
) -> None:
    first, second = pair
    first.step(1.0).result(TIMEOUT_S)
    waiting = first.step(1.0)
    leave(tmp_path, 1)
    assert waiting.result(TIMEOUT_S) == (9, -2.0), "the round of one"
    replacement = Member(tmp_path, 1, 2, 99.0)
    assert replacement.begin().result(TIMEOUT_S) == 9
    replacement.step(1.0).result(TIMEOUT_S)
    both = replacement.step(1.0), first.step(0.0), first.step(0.0)
    assert [each.result(TIMEOUT_S) for each in both] == [(11, -3.0), (10, -2.0), (11, -3.0)]
    replacement.step(1.0).result(TIMEOUT_S)
    waiting = replacement.step(1.0)
    second.step(1.0).result(TIMEOUT_S)
    with pytest.raises(WorkerDeparted, match="was taken for dead"):
        second.step(777.0).result(TIMEOUT_S)
    both = first.step(0.0), first.step(0.0), waiting
    assert both[1].result(TIMEOUT_S) == both[2].result(TIMEOUT_S) == (13, -4.0), "not what the dead one gave"
    replacement.close()


def test_a_worker_may_leave_after_the_end_has_released_those_that_wait(pair: list[Member]) -> None:
    first, second = pair
    second.call(second.sync.exchange, RankSignals(stop=True)).result(TIMEOUT_S)
    first.step(1.0).result(TIMEOUT_S)
    first.step(1.0).result(TIMEOUT_S)
    second.call(second.sync.end).result(TIMEOUT_S)


def test_what_is_no_call_ends_no_service(controller: PeerController, pair: list[Member]) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(controller.service.address)
        stranger.send_multipart([b"no", b"call"])
        test_workers_go_on_with_what_all_have_given(pair, controller)


def test_the_end_of_the_run_releases_those_that_wait(pair: list[Member]) -> None:
    first, second = pair
    second.step(1.0).result(TIMEOUT_S)
    waiting = second.step(1.0)
    first.call(first.sync.end).result(TIMEOUT_S)
    assert waiting.result(TIMEOUT_S) == (9, -2.0), "its own weights"
    assert second.sync.is_exchange_due()
    assert second.call(second.sync.exchange, RankSignals()).result(TIMEOUT_S).stop


def test_a_worker_that_is_asked_to_leaves_between_two_steps(pair: list[Member]) -> None:
    first, second = pair
    second.is_noticed = True
    with pytest.raises(WorkerDeparted, match="worker 1 left after 0 steps"):
        second.step(1.0).result(TIMEOUT_S)
    for _ in range(2):
        found = first.step(1.0).result(TIMEOUT_S)
    assert found == (9, -2.0)
