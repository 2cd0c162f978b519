"""The waits of a CUDA stream, with events that tell a time of the test's: nothing here needs a GPU."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.parallel import ParallelSpec, World
from shoal.parallel.comm.collective_timer import CollectiveTimer, StreamWaits
from shoal.parallel.spmd.ddp import DdpModel

CUDA = torch.device("cuda", 0)


class Stream:
    """now_ms: the device's time; is_done: whether it has passed what was recorded."""

    now_ms = 0.0
    is_done = True

    def wait_event(self, event: object) -> None:
        Stream.now_ms += 7.0


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = Stream.now_ms

    def query(self) -> bool:
        return Stream.is_done

    def elapsed_time(self, later: Event) -> float:
        assert Stream.is_done  # torch raises otherwise
        return later.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    Stream.now_ms, Stream.is_done = 0.0, True
    computing = Stream()
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.Stream", Stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: computing)
    return computing


def test_a_wait_counts_once_the_device_has_passed_it(stream: Stream) -> None:
    waits = StreamWaits()
    Stream.is_done = False
    for wait_ms in (5.0, 3.0):
        began = waits.begin()
        Stream.now_ms += wait_ms
        waits.end(began)
        Stream.now_ms += 100.0  # computes
    assert waits.total_s == 0.0  # and nothing was waited for to find that out
    Stream.is_done = True
    assert waits.total_s == pytest.approx(0.008)
    assert waits.total_s == pytest.approx(0.008)


def test_events_are_released_though_no_one_asks(stream: Stream) -> None:
    waits = StreamWaits()
    for _ in range(100):
        waits.end(waits.begin())
    assert not waits._pending


def test_waits_of_the_computing_stream_count_on_every_thread(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass has a thread of its own on CUDA, in which FSDP waits for parameters."""
    timer, other = CollectiveTimer(CUDA), Stream()
    stream.wait_event(None)  # before the step
    with timer.time_collectives():
        stream.wait_event(None)
        backward = Thread(target=stream.wait_event, args=(None,))
        backward.start()
        backward.join()
        with monkeypatch.context() as patch:
            patch.setattr("torch.cuda.current_stream", lambda device=None: other)
            other.wait_event(None)  # beside the computation
    stream.wait_event(None)
    assert timer.waited_s == pytest.approx(0.014)


class OwnStep:
    """A Task with a step of its own, so its gradients are averaged all at once."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.mean()

    def train_step(self, model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).mean()
        return found


def test_the_exchange_of_a_tasks_own_step_is_timed(group_of_one: dist.ProcessGroup) -> None:
    spec, batch = ParallelSpec.parse({"backend": "gloo"}), torch.ones(2, 3)
    task: Any = OwnStep()
    model = DdpModel(nn.Linear(3, 2), task, spec, World(0, 1, batch.device), batch, 0, group_of_one)
    model.train_step(batch, 0)
    assert model.communication_s > 0
