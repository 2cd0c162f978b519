"""Ranks of a sharded plan save, load and write a network without any rank holding all of it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from programs import run_ranks
from shoal.checkpoint import Checkpointer
from shoal.checkpoint.json_state import flatten
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
from shoal.weights.tensor_files import write_tensors
from training.test_pipeline_cuts import Squares

FSDP = {"shard": True}


def build(
    world: World, plan: dict[str, Any], width: int, seed: int, depth: int = 1
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    spec = ParallelSpec.parse(plan)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth)]
    network = nn.Sequential(*layers, nn.BatchNorm1d(width))
    degrees = spec.resolve_dims(world.size)
    model = parallelize(network, Squares(), spec, degrees, world, torch.randn(8, width), seed)
    return model, torch.optim.AdamW([each for _, each in model.named_parameters()], 0.01)


def state_of(model: ParallelModel, optimizer: torch.optim.Optimizer, *, to_fill: bool = False) -> dict[str, Any]:
    return {"model": model.model_state(), "optimizer": model.optimizer_state(optimizer, to_fill=to_fill)}


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
