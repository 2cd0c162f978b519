"""The devices on which a model may run; outputs on their way to the host, without a device; what a warm-up measures."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.serve.messages.desired_state import EndpointPlan, ModelPlan
from shoal.serve.model import device
from shoal.serve.model.device import devices, is_device_lost
from shoal.serve.model.formats import torch_forward
from shoal.serve.model.warm_up import MAX_MEASURE_S, batch_sizes, time_warm_forwards
from shoal.serve.replica.loader import StagingError, VersionLoader
from shoal.serve.replica.model_manager import ModelManager
from shoal.serve.replica.model_memory import MEASURED_FROM_BYTES, ModelMemory
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions


@pytest.mark.parametrize(
    ("options", "without", "with_cuda"),
    [
        ({}, ["cpu"], ["cpu", "cuda"]),  # a process that has reserved no GPU sees none
        ({"device": "cpu"}, ["cpu"], ["cpu"]),
        ({"precision": "int8"}, ["cpu"], ["cpu"]),
        ({"device": "cuda"}, "device", ["cuda"]),
        ({"cuda_graphs": True}, "cuda_graphs", ["cuda"]),
        ({"cuda_graphs": True, "compile": True}, "cuda_graphs", ["cuda"]),
        ({"device": "cpu", "cuda_graphs": True}, "device", "device"),
        ({"device": "cuda", "precision": "int8"}, "precision", "precision"),
    ],
)
def test_a_model_runs_where_its_options_and_the_process_allow(
    options: dict[str, Any], without: list[str] | str, with_cuda: list[str] | str
) -> None:
    for has_cuda, expected in ((False, without), (True, with_cuda)):
        if isinstance(expected, list):
            assert devices(ModelOptions.parse(options), has_cuda) == expected
            continue
        with pytest.raises(ConfigError) as caught:
            devices(ModelOptions.parse(options), has_cuda)
        assert caught.value.field == expected


def test_a_device_is_lost_when_every_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    try:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        assert not is_device_lost()
        monkeypatch.setattr(torch.cuda, "synchronize", fail)
        assert is_device_lost()
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        assert is_device_lost()
    finally:
        device.device_lost.clear()


def test_large_outputs_are_pinned_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    waits: list[int] = []

    def allocate(like: Tensor) -> Tensor:
        pinned.append(torch.empty(like.shape, dtype=like.dtype))
        return pinned[-1]

    monkeypatch.setattr(torch_forward, "_allocate_pinned", allocate)
    monkeypatch.setattr(torch_forward, "_wait_for_copies", lambda: waits.append(len(pinned)))
    monkeypatch.setattr(torch_forward, "PINNED_BYTES", 64)
    outputs = [torch.arange(16.0), torch.arange(15.0), "text", torch.arange(32.0).view(4, 8).t(), torch.tensor(3)]
    found = torch_forward.copy_to_host(outputs)
    assert waits == [2]
    assert (found[0] is pinned[0], found[2], found[3] is pinned[1]) == (True, "text", True)
    for copied, output in zip(found, outputs, strict=True):
        if isinstance(output, Tensor):
            assert torch.equal(copied, output)
            assert copied.data_ptr() != output.data_ptr()
    assert [each.tolist() for each in torch_forward.copy_to_host(outputs[1:2])] == [outputs[1].tolist()]
    assert waits == [2]


def test_warm_up_sizes_are_powers_of_two_and_the_largest_batch() -> None:
    assert [batch_sizes(size) for size in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


class Machine:
    """Forwards that take as long as they are told, on a clock that nothing else moves."""

    def __init__(self, *seconds: float) -> None:
        self.now_s, self._seconds = 0.0, list(seconds)
        self.sizes: list[int] = []

    def forward(self, size: int) -> None:
        self.sizes.append(size)
        self.now_s += self._seconds.pop(0)

    def measured(self, *sizes: int) -> list[tuple[int, float]]:
        return time_warm_forwards(self.forward, sizes, lambda: self.now_s)


def test_what_else_the_machine_does_is_not_measured() -> None:
    machine = Machine(0.01, 0.5, 0.3, 0.02)
    assert machine.measured(1, 2) == [(1, pytest.approx(0.01)), (2, pytest.approx(0.02))]
    assert machine.sizes == [1, 1, 2, 2]


def test_a_slow_model_is_measured_as_far_as_the_time_reaches() -> None:
    machine = Machine(0.4 * MAX_MEASURE_S, 0.4 * MAX_MEASURE_S, 5.0, 7.0)
    assert machine.measured(1, 2, 4) == [(1, pytest.approx(0.4 * MAX_MEASURE_S)), (2, pytest.approx(5.0))]
    assert machine.sizes == [1, 1, 2]


# -- the memory of a replica's models: who waits for it, who gets it; and a plan that changes during a load


def plan(name: str, size_bytes: int, is_pinned: bool = False) -> ModelPlan:
    return ModelPlan(name, "/registry", {}, replicas=None if is_pinned else ("r",), size_bytes=size_bytes)


async def load(memory: ModelMemory, name: str, size_bytes: int, **fields: bool) -> str:
    """Load a model, and account for it."""
    async with memory.reserve(1, lambda: plan(name, size_bytes, **fields)) as is_wanted:
        assert is_wanted
        await asyncio.sleep(0)
        memory.add(name, plan(name, size_bytes), 0.5)
    return name


async def test_a_load_waits_for_memory_and_no_load_exceeds_it() -> None:
    memory = ModelMemory(100, lambda: 0)
    await load(memory, "a", 60)
    waiting = asyncio.create_task(load(memory, "b", 60))
    await load(memory, "c", 40)
    assert (memory.used_bytes, waiting.done()) == (100, False)
    memory.account("a", 0)
    assert await waiting == "b"
    assert memory.used_bytes == 100
    assert memory.resident_bytes["b"] == 60
    assert (memory.loads["b"].loads, memory.loads["b"].load_s) == (1, 0.5)


async def test_what_is_no_longer_wanted_does_not_wait() -> None:
    memory, wanted = ModelMemory(100, lambda: 0), [plan("b", 60)]
    await load(memory, "a", 60)

    async def give_up() -> bool:
        async with memory.reserve(1, lambda: wanted[0] if wanted else None) as found:
            return found

    waiting = asyncio.create_task(give_up())
    await asyncio.sleep(0)
    wanted.clear()
    memory.notify()
    assert not await waiting
    assert memory.used_bytes == 60


async def test_a_load_that_fails_gives_its_memory_back_and_a_pinned_model_does_not_wait() -> None:
    memory = ModelMemory(100, lambda: 0)
    with pytest.raises(RuntimeError):
        async with memory.reserve(1, lambda: plan("a", 80)):
            raise RuntimeError("the file is damaged")
    assert memory.used_bytes == 0
    await load(memory, "b", 80)
    await load(memory, "pinned", 80, is_pinned=True)
    assert memory.used_bytes == 160


async def test_a_large_model_s_load_is_measured_and_counts_as_the_plan_says() -> None:
    process_bytes, size_bytes = [0, 500, 500 + 3 * MEASURED_FROM_BYTES], MEASURED_FROM_BYTES
    memory = ModelMemory(1 << 40, lambda: process_bytes.pop(0))
    await load(memory, "a", size_bytes)  # the first load imports its code: it says nothing
    assert memory.loads["a"].measured_bytes == {}
    await load(memory, "b", size_bytes)
    assert memory.loads["b"].measured_bytes == {1: 3 * size_bytes}
    assert memory.used_bytes == 2 * size_bytes  # the controller decides, and says so in the plan
    memory.account("b", 3 * size_bytes)
    assert memory.used_bytes == 4 * size_bytes


@pytest.mark.parametrize("later", ["old", "new"])
async def test_a_load_is_used_by_the_model_that_it_was_begun_for(monkeypatch: pytest.MonkeyPatch, later: str) -> None:
    """A model is deleted while it loads, and one of its name is deployed, of the same registry or of another."""
    begun: list[str] = []
    may_end = asyncio.Event()

    async def load(loader: VersionLoader, source: Any, *_: object) -> None:
        begun.append(source.registry)
        await may_end.wait()
        raise StagingError(source.registry)

    def plan(*registries: str) -> EndpointPlan:
        models = (ModelPlan("m", each, {}, stable=1, staged=(1,)) for each in registries)
        return EndpointPlan(1, tuple(models))

    monkeypatch.setattr(VersionLoader, "load_version", load)
    batcher: Any = SimpleNamespace(computing_s=0.0)
    manager = ModelManager("r1", EndpointSpec(name="e"), {}, batcher, controller=Any)
    for step in (plan("old"), plan(), plan(later)):
        manager.apply(step)
        await asyncio.sleep(0)
    may_end.set()
    async with asyncio.timeout(10.0):
        while "m" not in manager.report().models:
            await asyncio.sleep(0)
    assert manager.find_startup_error() == f"model 'm' cannot be served: {later}"
    manager.close()
    assert begun == ["old", later]
