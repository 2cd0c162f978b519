"""Weights with which a network begins a run, instead of fresh ones: a registered model's, a file's, or a folder's.

Called where a network is built: by the Trainer's parts, by the check of a run, and by populations. Never reads a run's
checkpoints: those continue a run, and win over these.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, SpecMismatch, WeightsError
from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions
from shoal.registry import Registry
from shoal.weights import WeightFile
from shoal.weights.tensor_files import (
    INDEX_SUFFIX,
    TensorFiles,
    list_files,
    open_tensors,
    open_weight_file,
    read_tensors,
)

SUFFIXES = (".pt", ".pth", ".safetensors", INDEX_SUFFIX)
SINGLE = "model.safetensors"  # of a folder; of several files, with INDEX_SUFFIX, the index


def find_initial_weights(network: nn.Module, init: str | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights of `init` for this network, by name; those of several files are read when they are asked for.

    init: NAME@VERSION, NAME@ALIAS, NAME, the path of a state dict, of a folder of safetensors (with a slash in it), or
          of a folder of a distributed checkpoint, or one that a library knows, as peft's; "" for none. Or tensors by
          name: those that it leaves out stay fresh

    A tensor that several names share may have one of them. The network may be without memory. Raises SpecMismatch for
    other names or shapes of tensors, ConfigError for a file without a state dict, RegistryError for an unknown model,
    WeightsError for damaged weights.
    """
    if init == "":
        return {}
    own = network.state_dict(keep_vars=True)
    open_folder_of = _find_folder_format(init) if isinstance(init, str) else None
    if open_folder_of is not None:
        state = open_folder_of(Path(str(init)), network)
        source = str(init)
        is_partial = True
    elif isinstance(init, str):
        state = read_state_dict(init)
        source = init
        is_partial = False
    else:
        state = init
        source = "initial_weights"
        is_partial = True
    present = {id(own[name]) for name in own.keys() & state.keys()}
    missing = [name for name in own if name not in state and id(own[name]) not in present]
    if others := sorted([*([] if is_partial else missing), *(state.keys() - own.keys())]):
        shown = ", ".join(others[:3])
        raise SpecMismatch("init", source, f"has other tensors than the network: {shown}", "use the same Task and args")
    read_shape = getattr(state, "get_shape", lambda name: state[name].shape)  # of files, without reading them
    for name in state:
        shape = read_shape(name)
        if shape != own[name].shape:
            problem = f"{name} is {list(shape)}, and {list(own[name].shape)} in the network"
            raise SpecMismatch("init", source, problem, "use the same Task and args")
    return state


def _find_folder_format(init: str) -> Callable[[Path, nn.Module], Mapping[str, Tensor]] | None:
    """What opens a folder in which a library knows a file; it may leave tensors of the network out."""
    for marker, reference in collect_extensions("shoal.weight_folders").items():
        if (Path(init) / marker).is_file():
            opened: Callable[[Path, nn.Module], Mapping[str, Tensor]] = load_reference(reference)
            return opened
    return None


def load_initial_weights(network: nn.Module, init: str | Mapping[str, Tensor]) -> None:
    """Fill the network with the weights of `init`, tensor by tensor, in its own datatypes.

    Of a network that is built without memory, as under `parallel=fsdp`, they are read when it gets its memory. Raises
    as `find_initial_weights`.
    """
    weights = find_initial_weights(network, init)
    if not weights:
        return
    from shoal.parallel.deferred.build import copy_when_filled  # DTensor takes a second to load

    own = network.state_dict()
    for name in weights:
        copy_when_filled(own[name], weights, name)


def read_state_dict(init: str) -> Mapping[str, Tensor]:
    """The tensors of `init`, by name. Raises as `find_initial_weights`."""
    path = Path(init)
    if (path / ".metadata").is_file():
        from shoal.weights.dcp_folder import open_dcp  # DCP takes a second to load

        return open_dcp(path)
    if not init.endswith(SUFFIXES) and "/" not in init:
        version = Registry().get(init)
        if version.manifest.model.format != "module":
            problem = (
                f"{version.ref} is a program of the format {version.manifest.model.format}, which has no state dict"
            )
            raise ConfigError("init", init, problem, "name a model that a run has registered")
        file = version.weight_file()
        return open_weight_file(file) if file.has_index else read_tensors(file)
    if path.is_dir():
        return open_folder(path)
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


def open_folder(folder: Path) -> TensorFiles:
    """The tensors of a folder of safetensors: of one file, or of several with an index. Raises ConfigError for a folder
    without them, WeightsError for damaged ones."""
    for file in (folder / SINGLE, folder / (SINGLE + INDEX_SUFFIX)):
        if file.is_file():
            return open_tensors(list_files(file))
    problem = f"has neither {SINGLE} nor {SINGLE}{INDEX_SUFFIX}"
    raise ConfigError("init", str(folder), problem, "save the model as safetensors: save_pretrained does")
