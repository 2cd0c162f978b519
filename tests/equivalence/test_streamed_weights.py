"""Every plan writes the full network tensor by tensor, as the files of the model that was split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import build, make

from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.weights import tensor_files
from shoal.weights.tensor_files import list_files, open_tensors, write_tensors

TWO = [{}, {"shard": True}, {"data": 1, "tensor": 2}, {"pipeline": 2, "micro_batches": 4}]
FOUR = [
    {"pipeline": 2, "micro_batches": 4, "data": 2, "shard": True},
    {"pipeline": 2, "micro_batches": 4, "tensor": 2, "schedule": "zbv"},
    {"shard": True, "tensor": 2},
]


def write_each(world: World, folder: Path, plans: list[dict[str, Any]]) -> list[tuple[list[str], list[str]]]:
    """The names that are described, and those that come, on this rank, for each plan and model."""
    tensor_files.MAX_FILE_BYTES = 2000  # in this process, which ends
    found = []
    for number, plan in enumerate(plans):
        for name in ("mixture", "transformer"):
            model = build(name, ParallelSpec.parse(plan), world)
            types = model.describe_full_weights()
            if world.is_first:
                path = write_tensors(
                    folder / f"{number}-{name}" / "model.safetensors", types, model.iter_full_weights()
                )
                assert path.name == "model.safetensors.index.json"
            found.append((list(types), [] if world.is_first else [each for each, _ in model.iter_full_weights()]))
            model.close()
    return found


@pytest.mark.parametrize("plans", [TWO, pytest.param(FOUR, marks=pytest.mark.soak)], ids=["two ranks", "four ranks"])
def test_the_files_are_those_of_the_model(tmp_path: Path, plans: list[dict[str, Any]]) -> None:
    ranks = run_ranks(write_each, 2 if plans is TWO else 4, tmp_path, plans)
    names = [list(make(name).state_dict()) for _ in plans for name in ("mixture", "transformer")]
    for found in ranks:
        assert found == [(each, []) for each in names]
    for number in range(len(plans)):
        for name in ("mixture", "transformer"):
            files = list_files(tmp_path / f"{number}-{name}" / "model.safetensors.index.json")
            assert len(files) > 1
            written, expected = open_tensors(files), make(name).state_dict()
            assert written.keys() == expected.keys()
            for each, tensor in expected.items():
                assert torch.equal(written[each], tensor), each
