"""Our side of benchmarks/som.py: maps of the rows in FOLDER, as one of torchrun's ranks or alone.

    python -m benchmarks.ours.som FOLDER THREADS [bound]

Speaks to its parent by lines (benchmarks/talk.py). `bound` adds how often a Hamerly bound would have proved a row's old
unit, for each epoch: what a warm search could save.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.talk import commands, say
from shoal.libs.som.network import (
    RANKS,
    Grid,
    UnitSearch,
    compute_sigma,
    draw_weights,
    find_units,
    fit_epoch,
    measure_errors,
)
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.comm.world import World

PROBES = 2000  # rows by which the bound is judged
Sum = Callable[[Tensor], Tensor]


def fit(rows: Tensor, weights: Tensor, grid: Grid, epochs: int, first: list[float], sum_over_ranks: Sum | None = None,
        ranks: tuple[int, ...] = RANKS) -> Tensor:  # fmt: skip
    """Maps [M, K, D] after all epochs, and then each row's unit, as fastersom's fit gives them."""
    for epoch in range(epochs):
        sigmas = [compute_sigma(epoch, epochs, each, 0.1 * grid.default_sigma) for each in first]
        weights = fit_epoch(rows, weights, grid, sigmas, sum_over_ranks, ranks)
    find_units(rows, weights, ranks)
    return weights


def prove_by_bound(rows: Tensor, weights: Tensor, grid: Grid, epochs: int) -> list[float]:
    """For each epoch after the first, of some rows: the share whose old unit is proved the nearest by its new distance
    and the old distance to the second-best, less the largest movement of a node (Hamerly, SDM 2010)."""
    probes, shares = rows[:: max(1, len(rows) // PROBES)], []
    for epoch in range(epochs):
        old = torch.cdist(probes, weights, compute_mode="donot_use_mm_for_euclid_dist").topk(2, largest=False)
        sigma = compute_sigma(epoch, epochs, grid.default_sigma, 0.1 * grid.default_sigma)
        before, weights = weights, fit_epoch(rows, weights[None], grid, [sigma])[0]
        now = (probes - weights[old.indices[:, 0]]).norm(dim=1)
        largest = (weights - before).norm(dim=1).max()
        shares.append(float((now <= old.values[:, 1] - largest).double().mean()))
    return shares


def main(folder: str, threads: str, *more: str) -> None:
    torch.set_num_threads(int(threads))
    world = World.from_environment("cpu")
    shared = ShmAllReduce.try_create(dist.group.WORLD) if world.size > 1 else None
    rows = torch.from_numpy(np.load(Path(folder, "rows.npy")))
    first = torch.from_numpy(np.load(Path(folder, "weights.npy")))
    side = int(len(first) ** 0.5)
    grid, share = Grid(side, side), rows.tensor_split(world.size)[world.rank].clone()
    fit_epoch(share[:512], first[None], grid, [2.0])  # what torch makes at its first use

    def measure(epochs: int, maps: int, stacked: bool, ranks: tuple[int, ...] = RANKS) -> dict[str, float]:
        seeds = torch.stack([first, *(draw_weights(rows, len(first), seed) for seed in range(1, maps))])
        widths = [grid.default_sigma * float(each) for each in (np.linspace(0.5, 1.5, maps) if maps > 1 else [1.0])]
        world.barrier()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        total = shared.sum if shared else None
        if stacked:
            made = fit(share, seeds, grid, epochs, widths, total, ranks)
        else:
            each = zip(seeds, widths, strict=True)
            made = torch.cat([fit(share, seed[None], grid, epochs, [width], total, ranks) for seed, width in each])
        world.barrier()
        took = {"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}
        return {**took, **measure_errors(rows, made[0], grid)} if world.is_first else took

    if "bound" in more:
        say(shares=prove_by_bound(rows, first, grid, 10), rank=UnitSearch(first, rows[:256]).rank)
    elif world.size > 1:  # torchrun's ranks have no parent to ask them
        for _ in range(int(more[1])):
            found = measure(int(more[0]), 1, True)
            if world.is_first:
                say(**found)
    else:
        say(ready=True)
        for command in commands():
            ranks = () if command.get("full") else RANKS
            say(**measure(command["epochs"], command.get("maps", 1), command.get("stacked", True), ranks))
    if shared:
        shared.close()
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
