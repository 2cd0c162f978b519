"""Replicas come and go, and are killed, as are HAProxy and the weight store: every request gets an answer or a code."""

import json
import os
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from endpoint_process import Client, EndpointProcess, Load
from leftovers import children_of
from serving.faulty_models import FINE, HANG, SIGNATURE, factory, weights
from shoal.cluster.ingress.serve_environment import BUFFER_BYTES
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.methods import METHODS, SERVICE
from shoal.registry import Registry
from waiting import wait_for

STATE_TIMEOUT_S = 400.0
HELD_S = 400.0
NUM_SMALL, NUM_LARGE = 8, 4
SIZES = (1_000, 1_000_000)
COME_AGAIN = (503, "1")
pytestmark = [pytest.mark.timeout(1500), pytest.mark.soak]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    # A request that is held is in hand for as long as the test takes to see where it is: the survivor can be asked only
    # when the other one has been replaced, which takes a busy machine more than a minute.
    spec = {"num_replicas": 2, "grpc_port": 0, "hang_s": HELD_S, "drain_s": HELD_S}
    with EndpointProcess(answer_s=HELD_S, **spec) as process:
        process.publish(1)
        wait_for(lambda: versions(process) == [1, 1], STATE_TIMEOUT_S)
        wait_for(lambda: process.reaches(2), STATE_TIMEOUT_S)
        yield process


def versions(endpoint: EndpointProcess) -> list[int]:
    return [replica["version"] for replica in endpoint.stats()]


def pids(endpoint: EndpointProcess) -> set[int]:
    return {replica["pid"] for replica in endpoint.stats()}


def recovered(endpoint: EndpointProcess) -> set[int]:
    """The replicas that answer; while one is being replaced, asking all of them may fail."""
    try:
        return pids(endpoint)
    except RuntimeError:
        return set()


def test_killing_the_weight_store_and_serves_controller_stops_neither_answers_nor_new_weights(
    endpoint: EndpointProcess,
) -> None:
    with Load(endpoint.url, num_clients=4) as load:
        for pid in (endpoint.command("store_pid"), *children_of(endpoint.pid, "ray::ServeController")):
            os.kill(pid, signal.SIGKILL)
        newest = max(versions(endpoint))
        endpoint.publish(newest + 1)
        wait_for(lambda: versions(endpoint) == [newest + 1] * 2, STATE_TIMEOUT_S)
        wait_for(lambda: newest + 1 in load.versions, STATE_TIMEOUT_S)
    assert load.hung == 0
    assert list(load.counts) == ["answered"], load.surprises[:3]


class Held:
    """The endpoint, with a model whose forwards hang while `hold` is there, and that is not made while `start` is."""

    def __init__(self, process: EndpointProcess, folder: Path) -> None:
        self.process = process
        self.hold = folder / "hold"
        self.start = folder / "start"
        model = factory(str(self.hold), str(self.start))
        Registry(process.registry).register("slow", weights(1), model=model, signature=SIGNATURE)
        with closing(Client(process.url)) as client:
            status, _, body = client.request("POST", "/v2/repository/models/slow/load", "{}")
            assert status == 200, body

    def ask(self, value: float = FINE, size_bytes: int = 1_000, is_kept: bool = False) -> tuple[int, str | None]:
        """The status of an answer, and when to come again. is_kept: on a connection that has had an answer before."""
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 1.0]}
        with closing(Client(self.process.url, HELD_S)) as client:
            if is_kept:
                client.request("GET", "/v2")
            request = json.dumps({"inputs": [tensor]}).ljust(size_bytes)
            status, headers, _ = client.request("POST", "/v2/models/slow/infer", request)
        return status, headers["retry-after"]

    def ask_all(self, pool: ThreadPoolExecutor, value: float) -> list[Future[tuple[int, str | None]]]:
        """One request of each kind."""
        return [pool.submit(self.ask, value, size, is_kept) for size in SIZES for is_kept in (False, True)]

    def counts(self, name: str) -> list[int]:
        """By replica, how many requests it has `submitted` or `answered`."""
        return [each["models"]["slow"]["batcher"][name] for each in self.process.stats()]

    def num_in_hand(self) -> list[int]:
        """By replica, requests that it has taken in and not answered; empty while one is being replaced."""
        try:
            counts = [each["models"]["slow"]["batcher"] for each in self.process.stats()]
        except (RuntimeError, KeyError):  # it has just died, or is not as far
            return []
        return [each["submitted"] - each["answered"] for each in counts]

    def answers(self) -> bool:
        return self.ask() == (200, None)

    @contextmanager
    def blocked(self, file: Path) -> Iterator[None]:
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def pids(self) -> set[int]:
        return {each["pid"] for each in self.process.stats()}

    def ingresses(self) -> set[int]:
        """HAProxy's processes: the one that listens, and displaced ones."""
        found = set()
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found |= {each.pid} if each.name() == "haproxy" else set()
        return found

    def has_displaced(self, before: set[int]) -> bool:
        """Whether there is one ingress, none of those from `before`."""
        now = self.ingresses()
        return len(now) == 1 and not now & before


@pytest.fixture(scope="module")
def slow(endpoint: EndpointProcess, tmp_path_factory: pytest.TempPathFactory) -> Held:
    return Held(endpoint, tmp_path_factory.mktemp("held"))


def test_what_a_killed_replica_had_in_hand_is_asked_of_the_other(slow: Held) -> None:
    """As long as no byte of the answer was there. What is too large to be kept by HAProxy is a 503, to come again."""
    before = slow.pids()
    assert len(before) == 2
    # HAProxy learns of a new replica after Serve does.
    wait_for(lambda: slow.answers() and all(slow.counts("answered")), STATE_TIMEOUT_S, "answer of each replica")
    with ThreadPoolExecutor(NUM_SMALL + NUM_LARGE) as pool, slow.blocked(slow.hold):
        small = [pool.submit(slow.ask, HANG) for _ in range(NUM_SMALL)]
        wait_for(lambda: slow.num_in_hand() == [NUM_SMALL // 2] * 2, STATE_TIMEOUT_S)
        large = [pool.submit(slow.ask, HANG, BUFFER_BYTES + 1_000) for _ in range(NUM_LARGE)]
        wait_for(lambda: slow.num_in_hand() == [(NUM_SMALL + NUM_LARGE) // 2] * 2, STATE_TIMEOUT_S)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        survivors = NUM_SMALL + NUM_LARGE // 2
        wait_for(lambda: survivors in slow.num_in_hand(), STATE_TIMEOUT_S)
        slow.hold.unlink()
        assert [each.result(STATE_TIMEOUT_S) for each in small] == [(200, None)] * NUM_SMALL
        become = sorted(each.result(STATE_TIMEOUT_S) for each in large)
        assert become == [(200, None)] * (NUM_LARGE // 2) + [COME_AGAIN] * (NUM_LARGE // 2)
    wait_for(lambda: len(now := recovered(slow.process)) == 2 and victim not in now, STATE_TIMEOUT_S)
    wait_for(lambda: len(set(versions(slow.process))) == 1, STATE_TIMEOUT_S)


@pytest.fixture(scope="module")
def held(slow: Held) -> Held:
    """With one replica from then on."""
    before = slow.ingresses()
    change(slow, 1)
    wait_for(lambda: slow.has_displaced(before), STATE_TIMEOUT_S, "end of ingresses that know the other replica")
    return slow


def call(channel: grpc.Channel, value: float) -> grpc.Future:
    """A call of gRPC, begun."""
    method = METHODS["ModelInfer"]
    begin = channel.unary_unary(f"/{SERVICE}/ModelInfer", method.request.SerializeToString, method.response.FromString)
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[np.array([value, 1.0], "<f4").tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return begin.future(request, timeout=STATE_TIMEOUT_S)


class Stream:
    """A conversation by gRPC about a model that is not there: its answers wait for no forward."""

    def __init__(self, channel: grpc.Channel) -> None:
        method, self._requests = METHODS["ModelStreamInfer"], queue.SimpleQueue[pb.ModelInferRequest | None]()
        make = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", method.request.SerializeToString, method.response.FromString
        )
        self._answers = make(iter(self._requests.get, None), timeout=STATE_TIMEOUT_S)

    def answers(self) -> bool:
        self._requests.put(pb.ModelInferRequest(model_name="none"))
        return "no model 'none'" in next(self._answers).error_message

    def close(self) -> None:
        self._requests.put(None)
        assert list(self._answers) == []


def change(held: Held, num_replicas: int) -> None:
    """Change the number of replicas; returns once the ingress has heard of it."""
    before = held.ingresses()
    held.process.command("scale", num_replicas=num_replicas)
    wait_for(lambda: len(held.pids()) == num_replicas, STATE_TIMEOUT_S)
    wait_for(lambda: held.ingresses() - before, STATE_TIMEOUT_S, "new ingress")


@pytest.mark.parametrize("num_changes", [1, pytest.param(21, marks=pytest.mark.soak)])
def test_requests_and_streams_live_through_changes_of_replicas(held: Held, num_changes: int) -> None:
    """Also requests in hand of a replica that is removed: the newest one. The stream is at the oldest."""
    with ThreadPoolExecutor(8) as pool, grpc.insecure_channel(held.process.grpc) as channel:
        stream = Stream(channel)
        assert stream.answers()
        first = held.ingresses()
        change(held, 2)
        wait_for(lambda: held.answers() and all(held.counts("answered")), STATE_TIMEOUT_S, "answer of each replica")
        with held.blocked(held.hold):
            slow = held.ask_all(pool, HANG) + held.ask_all(pool, HANG)
            wait_for(lambda: sum(now := held.num_in_hand()) == len(slow) and all(now), STATE_TIMEOUT_S)
            for number in range(num_changes):
                change(held, 1 + number % 2)
                assert stream.answers()
        assert [each.result(STATE_TIMEOUT_S) for each in slow] == [(200, None)] * len(slow)
        assert stream.answers()
        stream.close()
    wait_for(lambda: held.has_displaced(first), STATE_TIMEOUT_S, "end of displaced ingresses")


def test_dead_it_refuses_at_once_whatever_was_asked(held: Held) -> None:
    """No replica can start before the file is gone, so nothing here has waited for one."""
    with (
        ThreadPoolExecutor(8) as pool,
        grpc.insecure_channel(held.process.grpc) as channel,
        held.blocked(held.start),
        held.blocked(held.hold),
    ):
        assert call(channel, FINE).code() is grpc.StatusCode.OK
        stream = Stream(channel)
        assert stream.answers()
        slow, slow_call = held.ask_all(pool, HANG), call(channel, HANG)
        wait_for(lambda: held.num_in_hand() == [len(slow) + 1], STATE_TIMEOUT_S)
        [victim] = held.pids()
        os.kill(victim, signal.SIGKILL)
        assert [each.result(STATE_TIMEOUT_S) for each in slow] == [COME_AGAIN] * len(slow)
        assert slow_call.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as ended:
            stream.answers()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        before = held.ingresses()
        assert call(channel, FINE).code() is grpc.StatusCode.UNAVAILABLE
        assert {each.result(STATE_TIMEOUT_S) for each in held.ask_all(pool, FINE)} == {COME_AGAIN}
        wait_for(lambda: held.ingresses() - before, STATE_TIMEOUT_S, "ingress without the dead replica")
        assert {each.result(STATE_TIMEOUT_S) for each in held.ask_all(pool, FINE)} == {COME_AGAIN}
    wait_for(held.answers, STATE_TIMEOUT_S)


def test_a_killed_haproxy_comes_back(held: Held) -> None:
    before = held.ingresses()
    for pid in before:
        os.kill(pid, signal.SIGKILL)

    def answers() -> bool:
        with suppress(OSError, HTTPException):  # nobody listens yet
            return held.answers()
        return False

    wait_for(lambda: held.ingresses() - before and answers(), STATE_TIMEOUT_S, "answer through another HAProxy")
