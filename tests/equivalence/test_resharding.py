"""A checkpoint of one plan is read by any other, and every plan writes the full network tensor by tensor."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import EPS, build, global_batch, make, share, trained

from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.weights import tensor_files
from shoal.weights.tensor_files import list_files, open_tensors, write_tensors

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
