"""Weights with which a network begins a run, instead of fresh ones: a registered model's, or a file's.

Called where a network is built: by the Trainer's parts, by the check of a run, and by populations. Never reads a run's
checkpoints: those continue a run, and win over these.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, SpecMismatch, WeightsError
from shoal.registry import Registry
from shoal.weights import WeightFile
from shoal.weights.tensor_file import read_tensors
from shoal.weights.tensor_files import INDEX_SUFFIX, list_files, open_tensors, open_weight_file

SUFFIXES = (".pt", ".pth", ".safetensors", INDEX_SUFFIX)


def load_initial_weights(network: nn.Module, init: str) -> None:
    """Fill the network with the weights of `init`: NAME@VERSION, NAME@ALIAS, NAME, the path of a state dict, or the
    folder of a distributed checkpoint.

    "" leaves the network as it is. Raises SpecMismatch for other names or shapes of tensors, ConfigError for a file
    without a state dict, RegistryError for an unknown model, WeightsError for damaged weights.
    """
    if not init:
        return
    state = read_state_dict(init)
    own = network.state_dict()
    if missing := sorted(own.keys() ^ state.keys()):
        shown = ", ".join(missing[:3])
        raise SpecMismatch("init", init, f"has other tensors than the network: {shown}", "use the same Task and args")
    for name, tensor in own.items():  # `load_state_dict` would hold those of all files at once
        given = state[name]
        if given.shape != tensor.shape:
            problem = f"{name} is {list(given.shape)}, and {list(tensor.shape)} in the network"
            raise SpecMismatch("init", init, problem, "use the same Task and args")
        tensor.copy_(given)


def read_state_dict(init: str) -> Mapping[str, Tensor]:
    """The tensors of `init`, by name; of several files, each is read when it is asked for. Raises as
    `load_initial_weights`."""
    if (Path(init) / ".metadata").is_file():
        from shoal.weights.dcp_folder import open_dcp  # DCP takes a second to load

        return open_dcp(Path(init))
    if not init.endswith(SUFFIXES):
        found = Registry().get(init)
        if found.manifest.model.format != "module":
            problem = f"{found.ref} is a program of the format {found.manifest.model.format}, which has no state dict"
            raise ConfigError("init", init, problem, "name a model that a run has registered")
        file = found.weight_file()
        return open_weight_file(file) if file.has_index else read_tensors(file)
    path = Path(init)
    if not path.is_file():
        raise ConfigError("init", init, "is no file", f"paths are looked up from {Path.cwd()}")
    if init.endswith(INDEX_SUFFIX):
        return open_tensors(list_files(path))
    if path.suffix == ".safetensors":
        return read_tensors(WeightFile(0, path, "", 0.0, is_verified=True))  # its hash is not known
    try:
        loaded: object = torch.load(path, "cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(loaded, Mapping) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise ConfigError("init", init, "holds no state dict", "save it by torch.save(model.state_dict(), path)")
    return loaded
