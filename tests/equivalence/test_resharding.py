"""A checkpoint of one plan is read by any other: what follows is what one process would have done undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cases import EPS, build, global_batch, share, trained

from programs import run_ranks
from shoal.parallel import ParallelSpec, World

CHAIN: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"shard": True}),
    (2, {"data": 1, "tensor": 2}),
    (4, {"shard": True, "tensor": 2}),
    (4, {"shard": True, "replicate": 2}),
    (1, {}),
]


def _links(world: World, name: str, folder: str, first: int) -> list[float]:
    """One step under each plan of this many ranks, each resumed from the one before; the losses."""
    losses = []
    for step, (size, plan) in enumerate(CHAIN):
        if size != world.size or step < first:
            continue
        parallel = build(name, ParallelSpec.parse(plan), world)
        optimizer = torch.optim.AdamW([each for _, each in parallel.named_parameters()], 0.5, eps=EPS)
        state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
        if step:
            dcp.load(state, checkpoint_id=f"{folder}/{step - 1}", no_dist=world.size == 1)
            parallel.load_model_state(state["model"])
            parallel.load_optimizer_state(optimizer, state["optimizer"])
        optimizer.param_groups[0]["lr"] = 0.02 if not step else optimizer.param_groups[0]["lr"]
        batch = share(global_batch(step), parallel.data_rank, parallel.num_data_ranks)
        losses.append(float(parallel.sum_over_data_ranks(parallel.train_step(batch, step)) / parallel.num_data_ranks))
        parallel.clip_gradients(0.5)
        optimizer.step()
        state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/{step}", no_dist=world.size == 1)
    return losses


def test_each_plan_goes_on_from_the_one_before(tmp_path: Path) -> None:
    for name in ("mixture", "transformer"):
        folder = str(tmp_path / name)
        losses = run_ranks(_links, 2, name, folder, 0)[0]
        losses += run_ranks(_links, 4, name, folder, 3)[0]
        losses += run_ranks(_links, 1, name, folder, 5)[0]
        expected = trained(name, ParallelSpec(), World.single("cpu"), len(CHAIN))["losses"]
        torch.testing.assert_close(losses, expected, rtol=2e-4, atol=2e-5)
