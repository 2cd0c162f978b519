"""A checkpoint goes from a pipeline to any other plan and back; what follows is what one process would have done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import EPS, build, global_batch, share, trained

from programs import run_ranks
from shoal.parallel import ParallelSpec, World

PIPELINE = {"pipeline": 2, "micro_batches": 4}
CHAIN: list[tuple[int, dict[str, Any]]] = [
    (2, {"accumulate": 4}),
    (2, PIPELINE),
    (2, {"shard": True, "accumulate": 4}),
    (2, {**PIPELINE, "schedule": "zbv"}),
    (2, PIPELINE),
    (1, {"accumulate": 4}),
]


ALL_DEGREES: list[tuple[int, dict[str, Any]]] = [
    (4, {**PIPELINE, "data": 2, "shard": True}),
    (4, {**PIPELINE, "tensor": 2}),
    (4, {"shard": True, "accumulate": 4}),
    (4, {**PIPELINE, "tensor": 2, "schedule": "zbv"}),
    (4, {**PIPELINE, "data": 2, "shard": True, "schedule": "interleaved_1f1b"}),
    (1, {"accumulate": 4}),
]


def links(world: World, name: str, folder: str, chain: list[tuple[int, dict[str, Any]]]) -> list[float]:
    """One step under each plan of this many ranks, each resumed from the one before; the losses."""
    losses = []
    for step, (size, plan) in enumerate(chain):
        if size != world.size:
            continue
        parallel = build(name, ParallelSpec.parse(plan), world)
        optimizer = torch.optim.AdamW(
            [each for _, each in parallel.named_parameters()], 0.02 if not step else 1.0, eps=EPS
        )
        state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
        if step:
            dcp.load(state, checkpoint_id=f"{folder}/{step - 1}", no_dist=size == 1)
            parallel.load_model_state(state["model"])
            parallel.load_optimizer_state(optimizer, state["optimizer"])
        batch = share(global_batch(step), parallel.data_rank, parallel.num_data_ranks)
        losses.append(float(parallel.sum_over_data_ranks(parallel.train_step(batch, step)) / parallel.num_data_ranks))
        parallel.clip_gradients(0.5)
        optimizer.step()
        state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/{step}", no_dist=size == 1)
    return losses


def all_links(world: World, folder: str, chain: list[tuple[int, dict[str, Any]]]) -> dict[str, list[float]]:
    return {name: links(world, name, f"{folder}/{name}", chain) for name in ("mixture", "transformer")}


@pytest.mark.parametrize(
    "chain", [CHAIN, pytest.param(ALL_DEGREES, marks=pytest.mark.soak)], ids=["two ranks", "all degrees"]
)
def test_a_run_goes_on_under_other_plans(tmp_path: Path, chain: list[tuple[int, dict[str, Any]]]) -> None:
    found = run_ranks(all_links, chain[0][0], str(tmp_path), chain)
    (rest,) = run_ranks(all_links, 1, str(tmp_path), chain)
    for name in rest:
        expected = trained(name, ParallelSpec(accumulate=4), World.single("cpu"), len(chain))["losses"]
        for losses in found:
            torch.testing.assert_close(losses[name] + rest[name], expected, rtol=2e-4, atol=2e-5)
