"""The memory of a replica's models: who waits for it, who gets it; and a plan that changes during a load."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.serve.messages.desired_state import EndpointPlan, ModelPlan
from shoal.serve.replica.loader import StagingError, VersionLoader
from shoal.serve.replica.model_manager import ModelManager
from shoal.serve.replica.model_memory import MEASURED_FROM_BYTES, ModelMemory
from shoal.serve.spec.endpoint import EndpointSpec


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
