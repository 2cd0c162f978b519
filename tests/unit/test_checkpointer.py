"""The Checkpointer in one process: what comes back, what is kept, what damage and full disks do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import Checkpointer, Found


def state_of(number: float, width: int = 5) -> dict[str, Any]:
    return {
        "model": {
            "layer.weight": torch.full((3, width), number),
            "layer.mask": torch.tensor([True, False, True]),
            "layer.half": torch.full((2, 2), number, dtype=torch.bfloat16),
            "count": torch.tensor(int(number)),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(number), "exp_avg": torch.full((3, width), -number).T}},
            "param_groups": [{"lr": number / 7, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
        },
        "best": float("inf"),
    }


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "checkpoints", keep=2) as opened:
        yield opened


def newest(checkpointer: Checkpointer) -> Found:
    found = checkpointer.latest()
    assert found is not None
    return found


def names(checkpointer: Checkpointer) -> list[str]:
    checkpointer.wait()
    return sorted(path.name for path in checkpointer.folder.iterdir())


def test_everything_comes_back_exactly(checkpointer: Checkpointer) -> None:
    assert checkpointer.latest() is None
    extras = {"position": 12, "history": [1.5, float("nan")], "order": torch.arange(4), "table": {3: (b"x", None)}}
    per_rank = {"torch": torch.get_rng_state(), "python": random.getstate()}
    checkpointer.save(7, state_of(7), extras, per_rank=per_rank, plan="fsdp")
    found = newest(checkpointer)
    assert (found.step, found.plan, found.world_size, found.damaged) == (7, "fsdp", 1, [])
    state = state_of(0)
    weight = state["model"]["layer.weight"]
    got = checkpointer.load(found, state)
    assert_equal(state, state_of(7))
    assert state["model"]["layer.weight"] is weight  # in place
    assert (got.step, got.extras["position"], got.extras["table"]) == (7, 12, {3: (b"x", None)})
    assert str(got.extras["history"]) == "[1.5, nan]"
    assert_equal(got.extras["order"], torch.arange(4))
    assert got.own == got.per_rank[0]
    assert_equal(got.per_rank[0]["torch"], per_rank["torch"])
    random.setstate(got.per_rank[0]["python"])
