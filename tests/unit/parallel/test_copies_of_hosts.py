"""`parallel=hybrid`: one sharded copy of the model in each host."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.errors import PlanError
from shoal.parallel import ParallelSpec, World


@pytest.mark.parametrize(
    ("plan", "workers", "ranks_per_host", "copies"),
    [
        ("hybrid", 8, 4, 2),
        ("hybrid", 8, 8, 1),
        ("hybrid", 8, 1, 8),
        ("hybrid", 8, None, 1),
        ({"shard": True, "replicate": "hosts", "tensor": 2}, 16, 8, 2),
        ({"shard": True, "replicate": "hosts", "pipeline": 2}, 16, 4, 2),  # a stage has two hosts
        ({"shard": True, "replicate": "hosts", "pipeline": 4}, 16, 8, 1),  # a host has two stages
        ({"shard": True, "replicate": 4}, 8, 4, 4),
    ],
)
def test_copies(plan: Any, workers: int, ranks_per_host: int | None, copies: int) -> None:
    degrees = ParallelSpec.model_validate(plan).resolve_dims(workers, ranks_per_host)
    assert degrees.replicate == copies
    if ranks_per_host and isinstance(plan, str):
        shards = degrees.data // copies
        hosts = [{rank // ranks_per_host for rank in range(first, first + shards)} for first in range(0, 8, shards)]
        assert all(len(each) == 1 for each in hosts)


def test_copies_that_hosts_would_share_are_refused() -> None:
    spec = ParallelSpec.parse({"shard": True, "replicate": "hosts", "tensor": 2})
    with pytest.raises(PlanError, match=r"6 data ranks of 2 each do not fill hosts of 8. give the number of copies"):
        spec.resolve_dims(12, 8)
    with pytest.raises(PlanError, match="do not fill hosts of 3"):
        spec.resolve_dims(6, 3)


@dataclass(frozen=True)
class Placed(World):
    """A world whose ranks have these places in their hosts."""

    places: tuple[int, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        return list(self.places)


def _place(*places: int) -> World:
    return Placed(0, len(places), torch.device("cpu"), places=places)


def test_ranks_of_a_host_are_counted() -> None:
    assert _place(0).count_ranks_per_host() == 1
    assert _place(0, 1, 2, 3).count_ranks_per_host() == 4
    assert _place(0, 1, 0, 1).count_ranks_per_host() == 2
    for uneven in ((0, 1, 0), (0, 0, 1, 1), (0, 1, 2, 0)):
        with pytest.raises(PlanError, match="hosts differ in their ranks"):
            _place(*uneven).count_ranks_per_host()
