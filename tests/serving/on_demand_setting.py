"""Endpoints with more models than fit: over real replicas and a real controller, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import signature
from pathlib import Path
from typing import Any

from serving.replica_set import ReplicaSet, infer, register, until
from shoal.registry import Registry
from shoal.serve.spec.model_source import model_from_ref

NUM_MODELS = 6
NAMES = [f"m{number}" for number in range(NUM_MODELS)]


def on_demand(
    num_replicas: int = 2, fit: int = 2, prepare: Callable[[Path], object] = lambda folder: None, **spec: Any
) -> Callable[..., Callable[[Path], None]]:
    """A test body that gets a running endpoint of six models, of which `fit` fit each replica.

    prepare: is called before, with the test's folder; its models are served, too
    """

    def decorate(body: Callable[..., Awaitable[None]]) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            size_bytes = max(register(name, aliases=("champion",)).manifest.size_bytes for name in NAMES)
            prepare(tmp_path)
            refs = [f"{name}@champion" for name in sorted({each.name for each in Registry().list()})]

            async def run() -> None:
                models = [model_from_ref(ref) for ref in refs]
                async with ReplicaSet(*models, memory=fit * size_bytes, **spec) as endpoint:
                    await endpoint.start(num_replicas)
                    states = endpoint.controller.state.models
                    await until(lambda: all(each.rollout.is_open for each in states.values()))
                    await (body(endpoint, tmp_path) if len(signature(body).parameters) == 2 else body(endpoint))

            asyncio.run(run())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def damage(name: str, version: int = 1) -> Path:
    """Move a version's weights away, to the returned path."""
    path = Registry().get(f"{name}@{version}").weight_file().path
    return path.rename(path.with_suffix(".away"))


def loaded(endpoint: ReplicaSet, *replicas: str) -> list[str]:
    """The models that these replicas have, of all replicas without a name."""
    names = replicas or tuple(endpoint.replicas)
    return sorted(model.name for name in names for model in endpoint.replicas[name].manager.list_loaded())


async def infer_everywhere(endpoint: ReplicaSet, *names: str) -> None:
    for name in names:
        for replica in endpoint.replicas.values():
            answer = await infer(replica, name)
            assert answer.status == 200, answer.body
