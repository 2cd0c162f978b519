"""The replicas of an endpoint change, or are gone: each request has an answer, or a 503 that says when to come again."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from endpoint_process import Client, EndpointProcess
from serving.faulty_models import FINE, HANG, SIGNATURE, factory, weights
from shoal.open_inference import inference_pb2 as pb
from shoal.registry import Registry
from shoal.serve.grpc.methods import METHODS, SERVICE
from waiting import wait_for

STATE_TIMEOUT_S = 400.0
HELD_S = 400.0
SIZES = (1_000, 1_000_000)
COME_AGAIN = (503, "1")
pytestmark = pytest.mark.timeout(1200)


class Held:
    """An endpoint with a model whose forwards hang while `hold` is there, and that cannot be made while `start` is."""

    def __init__(self, process: EndpointProcess, folder: Path) -> None:
        self.process, self.hold, self.start = process, folder / "hold", folder / "start"
        model = factory(str(self.hold), str(self.start))
        Registry(process.registry).register("faulty", weights(1), model=model, signature=SIGNATURE)
        with closing(Client(process.url)) as client:
            status, _, body = client.request("POST", "/v2/repository/models/faulty/load", "{}")
            assert status == 200, body

    def ask(self, value: float = FINE, size_bytes: int = 1_000, is_kept: bool = False) -> tuple[int, str | None]:
        """The status of an answer, and when to come again. is_kept: on a connection that has had an answer before."""
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 1.0]}
        with closing(Client(self.process.url, HELD_S)) as client:
            if is_kept:
                client.request("GET", "/v2")
            request = json.dumps({"inputs": [tensor]}).ljust(size_bytes)
            status, headers, _ = client.request("POST", "/v2/models/faulty/infer", request)
        return status, headers["retry-after"]

    def ask_all(self, pool: ThreadPoolExecutor, value: float) -> list[Future[tuple[int, str | None]]]:
        """One request of each kind."""
        return [pool.submit(self.ask, value, size, is_kept) for size in SIZES for is_kept in (False, True)]

    def num_in_hand(self) -> int:
        """Requests that the replicas have taken in and not answered."""
        counts = [each["models"]["faulty"]["batcher"] for each in self.process.stats()]
        return sum(count["submitted"] - count["answered"] for count in counts)

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


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    spec = {"num_replicas": 1, "grpc_port": 0, "hang_s": HELD_S, "drain_s": HELD_S}
    with EndpointProcess(answer_s=HELD_S, **spec) as process:
        process.publish(1)
        wait_for(lambda: [each["version"] for each in process.stats()] == [1], STATE_TIMEOUT_S)
        yield Held(process, tmp_path_factory.mktemp("held"))


def call(channel: grpc.Channel, value: float) -> grpc.Future:
    """A call of gRPC, begun."""
    method = METHODS["ModelInfer"]
    begin = channel.unary_unary(f"/{SERVICE}/ModelInfer", method.request.SerializeToString, method.response.FromString)
    request = pb.ModelInferRequest(model_name="faulty", raw_input_contents=[np.array([value, 1.0], "<f4").tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return begin.future(request, timeout=STATE_TIMEOUT_S)


class Stream:
    """A conversation by gRPC about a model that is not there: its answers need no forward, so a hung one is no matter."""

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


def test_requests_and_streams_live_through_changes_of_replicas(held: Held) -> None:
    with ThreadPoolExecutor(8) as pool, held.blocked(held.hold), grpc.insecure_channel(held.process.grpc) as channel:
        slow = held.ask_all(pool, HANG)
        wait_for(lambda: held.num_in_hand() == len(slow), STATE_TIMEOUT_S)
        stream = Stream(channel)
        first = held.ingresses()
        for num_replicas in (2, 1, 2, 1):
            change(held, num_replicas)
            assert stream.answers()
        held.hold.unlink()
        assert [each.result(STATE_TIMEOUT_S) for each in slow] == [(200, None)] * len(slow)
        assert stream.answers()
        stream.close()
    wait_for(lambda: len(held.ingresses()) == 1 and not held.ingresses() & first, STATE_TIMEOUT_S, "end of displaced")


def test_dead_it_refuses_at_once_whatever_was_asked(held: Held) -> None:
    """No replica can start before the file is gone, so nothing here has waited for one."""
    with (
        ThreadPoolExecutor(8) as pool,
        grpc.insecure_channel(held.process.grpc) as channel,
        held.blocked(held.start),
        held.blocked(held.hold),
    ):
        assert call(channel, FINE).code() is grpc.StatusCode.OK
        slow, slow_call = held.ask_all(pool, HANG), call(channel, HANG)
        wait_for(lambda: held.num_in_hand() == len(slow) + 1, STATE_TIMEOUT_S)
        [victim] = held.pids()
        os.kill(victim, signal.SIGKILL)
        assert [each.result(STATE_TIMEOUT_S) for each in slow] == [COME_AGAIN] * len(slow)
        assert slow_call.code() is grpc.StatusCode.UNAVAILABLE
        before = held.ingresses()
        assert call(channel, FINE).code() is grpc.StatusCode.UNAVAILABLE
        assert {each.result(STATE_TIMEOUT_S) for each in held.ask_all(pool, FINE)} == {COME_AGAIN}
        wait_for(lambda: held.ingresses() - before, STATE_TIMEOUT_S, "ingress without the dead replica")
        assert {each.result(STATE_TIMEOUT_S) for each in held.ask_all(pool, FINE)} == {COME_AGAIN}
    wait_for(held.answers, STATE_TIMEOUT_S)


def test_asleep_a_request_waits_for_a_replica(held: Held) -> None:
    before = held.ingresses()
    held.process.command("hold_while_asleep", is_held=True)
    held.process.command("scale", num_replicas=0)
    wait_for(lambda: held.ingresses() - before, STATE_TIMEOUT_S, "ingress without a replica")
    with ThreadPoolExecutor(8) as pool:
        waiting = held.ask_all(pool, FINE)
        held.process.command("scale", num_replicas=1)
        assert [each.result(STATE_TIMEOUT_S) for each in waiting] == [(200, None)] * len(waiting)
    held.process.command("hold_while_asleep", is_held=False)
