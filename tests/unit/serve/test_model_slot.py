"""A model whose plan changes while a version of it loads. No model is loaded: each load waits, then fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.serve.messages.desired_state import EndpointPlan, ModelPlan
from shoal.serve.replica.loader import StagingError, VersionLoader
from shoal.serve.replica.model_manager import ModelManager
from shoal.serve.spec.endpoint import EndpointSpec


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
