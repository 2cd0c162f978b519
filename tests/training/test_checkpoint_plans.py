"""A checkpoint of one plan and number of ranks, with the optimizer's state, opens in another, bit for bit.

Also without any rank holding all of it. That a run goes on from there with the losses of one process is tested in
`test_trainer_ranks`, other layouts in `test_checkpoint_ranks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from programs import run_ranks
from shoal.checkpoint import Checkpointer
from shoal.checkpoint.json_state import flatten
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
from shoal.weights.tensor_files import write_tensors

FSDP, TENSOR, DDP = {"shard": True}, {"data": 1, "tensor": 2}, {}
WIDTH = 10  # which does not divide by four


class Regression:
    """A learnable: numbers in, their mean square."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


def build(
    world: World, plan: dict[str, Any], width: int, seed: int, depth: int = 1
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    spec = ParallelSpec.parse(plan)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth)]
    network = nn.Sequential(*layers, nn.BatchNorm1d(width))
    degrees = spec.resolve_dims(world.size)
    model = parallelize(network, Regression(), spec, degrees, world, torch.randn(8, width), seed)
    return model, torch.optim.AdamW([each for _, each in model.named_parameters()], 0.01)


def state_of(model: ParallelModel, optimizer: torch.optim.Optimizer, *, to_fill: bool = False) -> dict[str, Any]:
    return {"model": model.model_state(), "optimizer": model.optimizer_state(optimizer, to_fill=to_fill)}


def gather(state: dict[str, Any]) -> dict[str, list[float]]:
    """Every number, whole. Collective."""
    tensors = {name: leaf.value for name, leaf in flatten(state).items()}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).double().flatten().tolist()
        for name, each in tensors.items()
    }


def save(world: World, folder: Path, step: int, plan: dict[str, Any], seed: int) -> dict[str, list[float]]:
    """What a rank has saved after two steps, whole."""
    model, optimizer = build(world, plan, WIDTH, seed)
    for number in range(2):
        model.train_step(torch.randn(4, WIDTH), number)
        optimizer.step()
    with Checkpointer(folder, keep=9) as checkpointer:
        checkpointer.save(step, state_of(model, optimizer), plan=str(plan))
    return gather(state_of(model, optimizer))


def load(world: World, folder: Path, step: int, plan: dict[str, Any]) -> dict[str, list[float]]:
    """What a rank has loaded, whole."""
    model, optimizer = build(world, plan, WIDTH, seed=99)
    state = state_of(model, optimizer, to_fill=True)
    with Checkpointer(folder, keep=9) as checkpointer:
        checkpointer.load(checkpointer.find(step), state)
    model.load_model_state(state["model"])
    model.load_optimizer_state(optimizer, state["optimizer"])
    return gather(state_of(model, optimizer))


def load_each(world: World, folder: Path) -> dict[str, dict[str, list[float]]]:
    found = {}
    for name, plan in (("fsdp", FSDP), ("ddp", DDP), ("tensor", TENSOR)):
        found[f"of four as {name}"] = load(world, folder, 1, plan)
    found["ddp"] = save(world, folder, 2, DDP, seed=2)
    found["tensor"] = save(world, folder, 3, TENSOR, seed=3)
    found["ddp as fsdp"], found["tensor as fsdp"] = load(world, folder, 2, FSDP), load(world, folder, 3, FSDP)
    return found


def test_every_number_is_the_same_under_another_plan_and_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(save, 4, tmp_path, 1, FSDP, 1)[0]
    assert len(saved) > 20
    for found in run_ranks(load_each, 2, tmp_path):
        for name in ("fsdp", "ddp", "tensor"):
            assert found[f"of four as {name}"] == saved, name
        assert found["ddp as fsdp"] == found["ddp"] != saved
        assert found["tensor as fsdp"] == found["tensor"] != saved


def read_peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def measure(world: World, folder: Path, width: int, depth: int) -> dict[str, float]:
    """How far memory grew while a rank saved and loaded it, and wrote the network, in parts of the full state."""
    model, optimizer = build(world, FSDP, width, 1, depth)
    state = state_of(model, optimizer, to_fill=True)
    full_bytes = sum(leaf.value.nbytes for leaf in flatten(state).values())
    grown = {}
    with Checkpointer(folder) as checkpointer:
        for what in ("save", "load", "write"):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
            before = read_peak_bytes()
            if what == "save":
                checkpointer.save(1, state)
                checkpointer.wait()
            elif what == "write":
                tensors = model.iter_full_weights()
                if world.is_first:
                    write_tensors(folder / "model.safetensors", model.describe_full_weights(), tensors)
                assert not list(tensors)
            else:
                checkpointer.load(checkpointer.find(1), state)
            grown[what] = (read_peak_bytes() - before) / full_bytes
    return grown


def test_no_rank_holds_all_of_it(tmp_path: Path) -> None:
    """A quarter of the state is what each copies to save, and maps to load. The network at the end is a third of it:
    each gathers a sixteenth of that at a time, for which torch needs it a few times."""
    for grown in run_ranks(measure, 4, tmp_path, 750, 8):
        assert max(grown["save"], grown["load"]) < 0.6, grown
        assert grown["write"] < 0.25, grown
