"""A checkpoint of one plan is read by any other: what follows is what one process would have done undisturbed."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import EPS, build, global_batch, share, trained

from programs import run_ranks
from shoal.parallel import ParallelSpec, World

Chain = list[tuple[int, dict[str, Any]]]
STAGES = {"pipeline": 2, "micro_batches": 4}
WHOLE = {"accumulate": 4}
CHAIN: Chain = [
    (2, WHOLE),
    (2, {"shard": True, **WHOLE}),
    (2, STAGES),
    (2, {"data": 1, "tensor": 2, **WHOLE}),
    (2, {**STAGES, "schedule": "zbv"}),
    (4, {"shard": True, "tensor": 2, **WHOLE}),
    (4, {"shard": True, "replicate": 2, **WHOLE}),
    (1, WHOLE),
]
ALL_DEGREES: Chain = [
    (4, {**STAGES, "data": 2, "shard": True}),
    (4, {**STAGES, "tensor": 2}),
    (4, {"shard": True, **WHOLE}),
    (4, {**STAGES, "tensor": 2, "schedule": "zbv"}),
    (4, {**STAGES, "data": 2, "shard": True, "schedule": "interleaved_1f1b"}),
    (1, WHOLE),
]
MODELS = ("mixture", "transformer")


def _take_links(world: World, folder: Path, plans: dict[int, dict[str, Any]]) -> dict[str, list[float]]:
    """By model: the loss of one step under each plan, resumed from the one before. plans: by step."""
    return {name: [_take_link(world, name, folder / name, *each) for each in plans.items()] for name in MODELS}


def _take_link(world: World, name: str, folder: Path, step: int, plan: dict[str, Any]) -> float:
    parallel = build(name, ParallelSpec.parse(plan), world)
    learning_rate = 1.0 if step else 0.02  # replaced by that of the checkpoint
    optimizer = torch.optim.AdamW([each for _, each in parallel.named_parameters()], learning_rate, eps=EPS)
    state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
    if step:
        dcp.load(state, checkpoint_id=folder / f"{step - 1}", no_dist=world.size == 1)
        parallel.load_model_state(state["model"])
        parallel.load_optimizer_state(optimizer, state["optimizer"])
    batch = share(global_batch(step), parallel.data_rank, parallel.num_data_ranks)
    loss = float(parallel.sum_over_data_ranks(parallel.train_step(batch, step)) / parallel.num_data_ranks)
    parallel.clip_gradients(0.5)
    optimizer.step()
    state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
    dcp.save(state, checkpoint_id=folder / f"{step}", no_dist=world.size == 1)
    return loss


@pytest.mark.parametrize(
    "chain", [CHAIN, pytest.param(ALL_DEGREES, marks=pytest.mark.soak)], ids=["few ranks", "all degrees"]
)
def test_each_plan_continues_from_the_one_before(tmp_path: Path, chain: Chain) -> None:
    losses: dict[str, list[float]] = {name: [] for name in MODELS}
    for size, links in groupby(enumerate(chain), key=lambda link: link[1][0]):
        first, *others = run_ranks(_take_links, size, tmp_path, {step: plan for step, (_, plan) in links})
        for name in MODELS:
            losses[name] += first[name]
            for other in others:
                assert other[name] == pytest.approx(first[name])
    for name, found in losses.items():
        expected = trained(name, ParallelSpec.parse(WHOLE), World.single("cpu"), len(chain))["losses"]
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
