"""The harness itself: values come back in order of rank, errors and deaths are named."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from programs import RanksFailed, run_ranks

if TYPE_CHECKING:
    from shoal.parallel.comm.world import World


def _sum_of_ranks(world: World, factor: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor(float(world.rank * factor))
    dist.all_reduce(total)
    return world.rank, total


def _one_fails(world: World) -> None:
    if world.rank == 1:
        raise ValueError("on purpose")


def _one_dies(world: World) -> None:
    if world.rank == 0:
        os._exit(7)


def test_values_come_back_in_order() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, torch.tensor(10.0)), (1, torch.tensor(10.0))]


def test_failures_are_named() -> None:
    with pytest.raises(RanksFailed, match="on purpose") as failed:
        run_ranks(_one_fails, 2)
    assert list(failed.value.causes) == [1]
    with pytest.raises(RanksFailed, match="exit code 7"):
        run_ranks(_one_dies, 2)
