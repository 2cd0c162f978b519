"""A distributed checkpoint of torchtitan's layout begins a run, and a registered version becomes one."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from programs import run_ranks
from shoal.errors import ConfigError, WeightsError
from shoal.parallel import World
from shoal.registry import ModelFactory, Registry, Signature
from shoal.train.initial_weights import load_initial_weights, read_state_dict
from shoal.weights.dcp_folder import DcpTensors, open_dcp, write_dcp
from shoal.weights.tensor_files import make_weight_file, write_tensors
from typed import said

KINDS = ("flat", "nested")


class Network(nn.Module):
    """As torchtitan's names go; nine rows do not divide by two, and `optimizer_gate` is a name like another's part."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(9, 6)
        self.layers = nn.ModuleDict({str(number): nn.Linear(6, 6) for number in range(2)})
        self.output = nn.Linear(6, 10, bias=False, dtype=torch.bfloat16)
        self.optimizer_gate = nn.Parameter(torch.ones(3))
        self.register_buffer("freqs", torch.linspace(0, 1, 5))


def make_network() -> Network:
    torch.manual_seed(5)
    return Network()


class TrainState:
    """Of torchtitan: numbers, and bytes of lists."""

    def state_dict(self) -> dict[str, Any]:
        losses = io.BytesIO()
        torch.save([1.0, 2.0], losses)
        return {"step": torch.tensor(7, dtype=torch.int32), "global_avg_losses": losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def save_as_torchtitan(world: World, folder: Path) -> None:
    """The model's tensors at the top, as it saves today, or below `model`, as before; sharded over all ranks."""
    model = fully_shard(make_network(), mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    others = {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "lr_scheduler": {"last_epoch": 7},
        "train_state": TrainState(),
        "dataloader": {"dp_rank_0": pickle.dumps({"position": 3}), "world_size": world.size},
    }
    weights = get_model_state_dict(model)
    for kind, state in zip(KINDS, ({**weights, **others}, {"model": weights, **others}), strict=True):
        dcp.save(state, checkpoint_id=folder / kind / "step-7")


def load_by_torch(world: World, folder: Path) -> bool:
    """Whether a sharded model has this checkpoint's weights after torch has loaded it."""
    model = fully_shard(Network(), mesh=init_device_mesh("cpu", (world.size,)))
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    expected = make_network().state_dict()
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
    return all(torch.equal(whole[name], each) for name, each in expected.items())


def test_what_torchtitan_saves_begins_a_run(tmp_path: Path) -> None:
    run_ranks(save_as_torchtitan, 2, tmp_path)
    for kind in KINDS:
        folder = tmp_path / kind / "step-7"
        network, expected = Network(), make_network().state_dict()
        network.optimizer_gate.data.zero_()
        load_initial_weights(network, str(folder))
        assert all(torch.equal(each, expected[name]) for name, each in network.state_dict().items())
        tensors = read_state_dict(str(folder))
        assert isinstance(tensors, DcpTensors)
        assert tensors.keys() == expected.keys()
        (folder / "__1_0.distcp").write_bytes(b"")
        with pytest.raises(WeightsError, match=r"'tok_embeddings\.weight' of the checkpoint .* cannot be read"):
            _ = tensors["tok_embeddings.weight"]
        with pytest.raises(ConfigError, match="has other tensors than the network: bias, freqs"):
            load_initial_weights(nn.Linear(2, 2), str(folder))


def test_a_registered_version_becomes_what_torch_loads(tmp_path: Path) -> None:
    state = make_network().state_dict()
    types = {name: (each.dtype, each.shape) for name, each in state.items()}
    file = make_weight_file(1, write_tensors(tmp_path / "model.safetensors", types, state.items()))
    factory, nothing = ModelFactory(factory=f"{__name__}:Network"), Signature(inputs=[], outputs=[])
    Registry().register("small", file, model=factory, signature=nothing)
    folder = tmp_path / "step-0"
    printed = said("models export small --dcp", str(folder))
    assert f"has the {len(state)} tensors of small@1. Begin a run with them: init={folder}" in printed
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "step-0"]
    assert run_ranks(load_by_torch, 2, folder) == [True, True]
    again = open_dcp(folder)
    assert {name: each.tolist() for name, each in again.items()} == {
        name: each.tolist() for name, each in state.items()
    }
    with pytest.raises(ConfigError, match=r"exists\. name another folder"):
        said("models export small --dcp", str(folder))


def test_tensors_are_written_one_by_one(tmp_path: Path) -> None:
    state, held = make_network().state_dict(), []

    class Counted(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            held.append((name, len(list((tmp_path / "step").glob("*.distcp")))))
            return super().__getitem__(name).clone()

    write_dcp(tmp_path / "step", {name: (each.dtype, each.shape) for name, each in state.items()}, Counted(state))
    assert sorted(name for name, _ in held) == sorted(state)
    assert [files for _, files in held] == list(range(1, len(state) + 1))  # each when its own file has been begun


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def test_a_description_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content, says in [
        (pickle.dumps(Evil()), "posix.mkdir is not of a checkpoint's description, and is not loaded"),
        (pickle.dumps({"a": 1}), "describes no distributed checkpoint"),
        (b"", "cannot be read as a distributed checkpoint's"),
        (b"nonsense", "cannot be read as a distributed checkpoint's"),
    ]:
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(WeightsError, match=says):
            open_dcp(tmp_path)
    assert not (tmp_path / "evil").exists()
