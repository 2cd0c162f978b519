"""Four ranks save and load together: into other layouts, with one that fails, and with one that dies."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from programs import RanksFailed, run_ranks
from shoal.checkpoint import Checkpointer
from shoal.checkpoint.directory import list_newest_first
from shoal.checkpoint.json_state import flatten
from shoal.errors import CheckpointError, ConfigError, RankLost, SpecMismatch
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
from shoal.weights.tensor_files import write_tensors
from training.test_pipeline_cuts import Squares

SIZE = 4
TIMEOUT_S = 60.0
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def whole() -> dict[str, torch.Tensor]:
    """What every layout below is a layout of; ten rows do not divide by four, and three leave a rank without any."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"wide": (10, 6), "short": (3, 4), "square": (8, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def state_in(layout: str, zero: bool = False) -> dict[str, Any]:
    tensors = {name: torch.zeros_like(one) if zero else one for name, one in whole().items()}
    if layout != "plain":
        mesh = init_device_mesh("cpu", (SIZE,))
        tensors = {name: distribute_tensor(one, mesh, [PLACEMENTS[layout]]) for name, one in tensors.items()}
    return {"model": tensors, "optimizer": {"step": torch.tensor(0.0 if zero else 5.0), "lr": 0.0 if zero else 0.1}}


def assert_whole(state: dict[str, Any]) -> None:
    for name, expected in whole().items():
        got = state["model"][name]
        assert torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, expected), name
    assert (state["optimizer"]["step"].item(), state["optimizer"]["lr"]) == (5.0, 0.1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(torch.tanh(self.up(inputs)))
        return outputs.clone()  # FSDP2 warns of an output that is a view, and a row-wise layer's is one


def layout_of(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network()
    if kind != "single":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        if "tensor" in kind:
            parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "fsdp" in kind:
            fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def whole_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of it, gathered and copied."""
    tensors = {name: leaf.value for name, leaf in flatten(state).items() if isinstance(leaf.value, torch.Tensor)}
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in tensors.items()}


def into_every_layout(rank: int, folder: Path) -> None:
    with Checkpointer(folder / "layouts", keep=4) as checkpointer:
        for step, saved in enumerate(("rows", "columns", "whole", "plain"), 1):
            checkpointer.save(step, state_in(saved), {"position": step}, per_rank={"rank": rank}, plan=saved)
            for loaded in ("rows", "columns", "whole", "plain"):
                state = state_in(loaded, zero=True)
                found = checkpointer.find(step)
                got = checkpointer.load(found, state)
                assert_whole(state)
                assert (found.plan, found.world_size, got.extras, got.own) == (
                    saved, SIZE, {"position": step}, {"rank": rank},
                )  # fmt: skip
        shards = [path.stat().st_size for path in sorted(checkpointer.find(4).path.glob("shard-*"))]
        assert len(shards) == SIZE
        assert max(shards) < sum(shards) / 2  # what all have, each writes a part of


def fsdp_and_tensor_parallel_training(rank: int, folder: Path) -> None:
    with Checkpointer(folder / "training") as checkpointer:
        for step, (saved, loaded) in enumerate([("fsdp tensor", "tensor"), ("tensor", "fsdp"), ("fsdp", "single")], 1):
            model, optimizer = layout_of(saved)
            train(model, optimizer)
            checkpointer.save(step, training_state(model, optimizer))
            expected = whole_of(training_state(model, optimizer))
            train(model, optimizer)  # while it is written
            other, other_optimizer = layout_of(loaded)
            state = training_state(other, other_optimizer)
            checkpointer.load(checkpointer.find(step), state)
            set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            got = whole_of(training_state(other, other_optimizer))
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(tensor, got[name]), name


def what_one_process_saved(rank: int, folder: Path) -> None:
    with Checkpointer(folder / "alone") as checkpointer:
        found = checkpointer.latest()
        assert found is not None
        state = state_in("rows", zero=True)
        got = checkpointer.load(found, state)
        assert_whole(state)
        assert (got.own, got.per_rank) == (None, [{"rank": 0}])


def stages_with_parts_of_their_own(rank: int, folder: Path) -> None:
    with Checkpointer(folder / "stages") as checkpointer:
        checkpointer.save(1, {"model": {f"stage{rank}": torch.full((2,), float(rank))}, "lr": 0.1})
        found = checkpointer.find(1)
        other = (rank + 1) % SIZE
        state = {"model": {f"stage{other}": torch.zeros(2)}}
        checkpointer.load(found, state)
        assert state["model"][f"stage{other}"].tolist() == [other, other]
        with pytest.raises(SpecMismatch, match=r"model\.stage3"):  # nobody takes it: said to all
            checkpointer.load(found, {"model": {f"stage{min(rank, 2)}": torch.zeros(2)}})
        with pytest.raises(SpecMismatch, match=r"model\.other"):  # one rank's mistake
            checkpointer.load(found, {"model": {f"stage{rank}" if rank else "other": torch.zeros(2)}})


def ranks_that_disagree(rank: int, folder: Path) -> None:
    with Checkpointer(folder / "disagreement") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(2)})
        with pytest.raises(CheckpointError, match="different steps at the same time: 2 and 5"):
            checkpointer.save(2 + rank, {"x": torch.ones(2)})
        with pytest.raises(CheckpointError, match=r"x is torch.float32 \[2\] on rank 0, but torch.float32 \[3\]"):
            checkpointer.save(2, {"x": torch.ones(2 + rank // 3)})
        refused = (ConfigError, "does not hold a object") if rank == 2 else (CheckpointError, "another rank's state")
        with pytest.raises(refused[0], match=refused[1]):
            checkpointer.save(2, {"x": object() if rank == 2 else 1})
        with pytest.raises((ConfigError, CheckpointError), match="complex128"):  # said to all by the one
            checkpointer.save(2, {"x": torch.ones(2, dtype=torch.complex128 if rank == 1 else torch.float32)})
        checkpointer.save(2, {"x": torch.ones(2), "lr": 0.1 * (rank + 1)})
        with pytest.raises(CheckpointError, match=r"lr is 0.2 on rank 1, but 0.1"):
            checkpointer.wait()
        assert latest_step(checkpointer) == 1


def a_full_disk_on_one_rank(rank: int, folder: Path) -> None:
    with Checkpointer(folder / "full") as checkpointer, pytest.MonkeyPatch.context() as patch:
        checkpointer.save(1, state_in("rows"))
        checkpointer.wait()
        if rank == 2:
            patch.setattr("shoal.checkpoint.checkpointer.shard_name", lambda rank, size: "/dev/full")
        checkpointer.save(2, state_in("columns"))
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left on device"):
            checkpointer.wait()
        patch.undo()
        assert latest_step(checkpointer) == 1
        dist.barrier()
        assert [path.name for path in checkpointer.folder.iterdir()] == ["step-000000001"]


def a_flipped_bit_in_one_shard(rank: int, folder: Path) -> None:
    with Checkpointer(folder / "flipped") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_in("rows"))
        checkpointer.wait()
        if rank == 0:
            path = list_newest_first(checkpointer.folder)[0] / "shard-00001-of-00004.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        dist.barrier()
        found = checkpointer.latest()
        assert found.step == 1
        expected = "step-000000002: shard-00001-of-00004.safetensors does not match its checksum"
        assert found.damaged == [expected]


def a_rank_that_hangs(rank: int, folder: Path) -> None:
    checkpointer = Checkpointer(folder / "hangs", timeout_s=1.0)
    if rank != 3:  # the last one never comes
        with pytest.raises(RankLost, match="another rank died or hangs"):
            checkpointer.save(1, state_in("plain"))
    dist.barrier()


def a_rank_that_dies(rank: int, folder: Path) -> None:
    checkpointer = Checkpointer(folder / "dies", timeout_s=TIMEOUT_S)
    checkpointer.save(1, state_in("plain"))
    checkpointer.wait()
    if rank == 3:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.checkpoint.manifest.write_shard", lambda *words: os._exit(0))
            checkpointer.save(2, state_in("plain"))
            checkpointer.wait()
    checkpointer.save(2, state_in("plain"))
    with pytest.raises(RankLost):
        checkpointer.wait()
    assert [path.name for path in list_newest_first(checkpointer.folder)] == ["step-000000001"]
    checkpointer.close()


def latest_step(checkpointer: Checkpointer) -> int | None:
    found = checkpointer.latest()
    return found and found.step


SCENES = [
    into_every_layout,
    fsdp_and_tensor_parallel_training,
    what_one_process_saved,
    stages_with_parts_of_their_own,
    ranks_that_disagree,
    a_full_disk_on_one_rank,
    a_flipped_bit_in_one_shard,
    a_rank_that_hangs,
    a_rank_that_dies,  # the last: nothing works together any more
]


def play_all(world: World, folder: Path) -> None:
    """The program of a rank: each scene leaves a mark when it is done."""
    warnings.simplefilter("error")
    for scene in SCENES:
        scene(world.rank, folder)
        (folder / f"{scene.__name__}-{world.rank}").touch()
    os._exit(0)  # a rank is dead: the group cannot be left in order


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder after all scenes, and how each rank ended."""
    folder = tmp_path_factory.mktemp("ranks")
    with Checkpointer(folder / "alone") as checkpointer:
        checkpointer.save(1, state_in("plain"), per_rank={"rank": 0})
    with pytest.raises(RanksFailed) as ended:
        run_ranks(play_all, SIZE, folder)
    return folder, str(ended.value)


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_four_ranks(played: tuple[Path, str], scene: str) -> None:
    for rank in range(SIZE - (scene == a_rank_that_dies.__name__)):  # the last one died
        assert (played[0] / f"{scene}-{rank}").exists(), played[1]


def test_one_process_loads_what_four_ranks_saved(played: tuple[Path, str]) -> None:
    with Checkpointer(played[0] / "layouts") as checkpointer:
        for found in (checkpointer.find(3), checkpointer.find(4)):
            state = state_in("plain", zero=True)
            got = checkpointer.load(found, state)
            assert_whole(state)
            assert (got.own, got.per_rank) == (None, [{"rank": rank} for rank in range(SIZE)])


# -- no rank holds a sharded network whole


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
