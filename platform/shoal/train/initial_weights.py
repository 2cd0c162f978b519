"""Weights with which a network begins a run, instead of fresh ones: a registered model's, a file's, or a folder's.

Called where a network is built: by the Trainer's parts, by the check of a run, and by populations. Never reads a run's
checkpoints: those continue a run, and win over these.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.errors import ConfigError, SpecMismatch, WeightsError
from shoal.registry import Registry
from shoal.weights import WeightFile
from shoal.weights.tensor_file import read_tensors

SUFFIXES = (".pt", ".pth", ".safetensors")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a folder of safetensors: of one file, or of several with an index. Each is read when asked for.

    Raises ConfigError for a folder without them, WeightsError for damaged ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._files = self._read_names()

    def _read_names(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        if not (self.folder / INDEX).is_file():
            problem = f"has neither {SINGLE} nor {INDEX}"
            raise ConfigError("init", str(self.folder), problem, "save the model as safetensors: save_pretrained does")
        try:
            return dict(json.loads((self.folder / INDEX).read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{self.folder / INDEX} cannot be read: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(self.folder / file, "pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{self.folder / file} cannot be read: {error}") from error
        return self._opened[file]

    def get_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return tuple(self._open(self._files[name]).get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._open(self._files[name]).get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_initial_weights(network: nn.Module, init: str | Mapping[str, Tensor]) -> None:
    """Fill the network with the weights of `init`, tensor by tensor, in the network's own datatypes.

    init: NAME@VERSION, NAME@ALIAS, NAME, the path of a state dict, or of a folder of safetensors, with a slash in it;
          "" leaves the network as it is. Or tensors by name: those that it leaves out stay fresh

    A tensor that several names share may have one of them. Raises SpecMismatch for other names or shapes of tensors,
    ConfigError for a file without a state dict, RegistryError for an unknown model, WeightsError for damaged weights.
    """
    if not isinstance(init, str):
        fill_network(network, init, network.state_dict().keys() & init.keys(), "initial_weights")
        return
    if not init:
        return
    state = read_state_dict(init)
    own = network.state_dict(keep_vars=True)
    found = {id(own[name]) for name in own.keys() & state.keys()}
    wanted = {name for name, tensor in own.items() if name in state or id(tensor) not in found}
    fill_network(network, state, wanted, init)


def fill_network(network: nn.Module, state: Mapping[str, Tensor], names: Set[str], source: str) -> None:
    """Copy the tensors of these names, which must be all of `state`. Raises SpecMismatch."""
    own = network.state_dict()
    if missing := sorted(names ^ state.keys()):
        shown = ", ".join(missing[:3])
        raise SpecMismatch("init", source, f"has other tensors than the network: {shown}", "use the same Task and args")
    for name in sorted(names):
        tensor = state[name]
        if tensor.shape != own[name].shape:
            problem = f"{name} is {list(tensor.shape)}, and {list(own[name].shape)} in the network"
            raise SpecMismatch("init", source, problem, "use the same Task and args")
        own[name].copy_(tensor)


def read_state_dict(init: str) -> Mapping[str, Tensor]:
    """The tensors of `init`, by name. Those of a folder are read when asked for. Raises as `load_initial_weights`."""
    if not init.endswith(SUFFIXES) and "/" not in init:
        found = Registry().get(init)
        if found.manifest.model.format != "module":
            problem = f"{found.ref} is a program of the format {found.manifest.model.format}, which has no state dict"
            raise ConfigError("init", init, problem, "name a model that a run has registered")
        return read_tensors(found.weight_file())
    path = Path(init)
    if path.is_dir():
        return FolderTensors(path)
    if not path.is_file():
        raise ConfigError("init", init, "is no file", f"paths are looked up from {Path.cwd()}")
    if path.suffix == ".safetensors":
        return read_tensors(WeightFile(0, path, "", 0.0, is_verified=True))  # its hash is not known
    try:
        loaded: object = torch.load(path, "cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(loaded, Mapping) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise ConfigError("init", init, "holds no state dict", "save it by torch.save(model.state_dict(), path)")
    return loaded
