"""Models of Hugging Face in the registry: a folder becomes a version, and a version a folder.

Called by `shoal models push` and `pull`, and where adapters are registered. Asks no hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn

from shoal.atomic_file import draft_folder, make_folder, replace_synced
from shoal.errors import ConfigError
from shoal.extend.parallel import build_skeleton
from shoal.extend.registry import ModelFactory, ModelVersion, Registry
from shoal.extend.train import (
    SINGLE,
    Task,
    build,
    find_initial_weights,
    infer_signature,
    load_initial_weights,
    make_task,
    read_state_dict,
)
from shoal.libs.hf.adapters import TASK_TYPES, is_adapter_folder, read_adapter_config, write_adapters
from shoal.libs.hf.kinds import KINDS, TASKS
from shoal.libs.hf.network import LoraSpec
from shoal.libs.hf.source import (
    COMPANIONS,
    CONFIG,
    find_folder,
    is_version,
    make_cached_folder,
    make_config,
    make_model_name,
    open_draft,
    read_config,
)
from shoal.weights.tensor_files import TensorTypes, make_weight_file, write_tensors

_SUFFIXES = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForImageClassification": "image_classification",
}
_KINDS_OF_ADAPTERS = {task_type: _SUFFIXES[suffix] for suffix, task_type in TASK_TYPES.items()}


class Transferable(Task):
    """What is needed here of a Task on a model of Hugging Face."""

    auto: ClassVar[str]
    lora: LoraSpec | None
    args: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The model's."""
        raise NotImplementedError

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        raise NotImplementedError

    def merge_weights(self, adapters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of the network without adapters, that computes as with them."""
        raise NotImplementedError


def pull(
    model: str, name: str, kind: str = "", dtype: str = "auto", alias: str = "champion", base: str = ""
) -> ModelVersion:
    """Register a folder of Hugging Face as a version of `name`. Raises ConfigError, RegistryError.

    model: also a folder of peft's adapters
    base:  of adapters: a folder or NAME@VERSION, in place of the one that they name
    """
    init, args = "", dict[str, Any](dtype=dtype)
    if is_adapter_folder(model):
        lora, about = read_adapter_config(Path(model))
        init, args = model, {**args, "lora": lora.model_dump()}
        model = base or about.get("base_model_name_or_path") or ""
        kind = kind or _KINDS_OF_ADAPTERS.get(about.get("task_type") or "", "")
    elif base:
        raise ConfigError("--base", base, f"is for adapters, and {model} holds none", "leave it out")
    folder = find_model_folder(model)
    if kind not in ("", *KINDS):
        raise ConfigError("--kind", kind, "is unknown", f"give one of {', '.join(KINDS)}")
    if not kind:  # by the class that the folder was saved from
        names = read_config(folder).get("architectures") or []
        kinds = [each for name in names for suffix, each in _SUFFIXES.items() if name.endswith(suffix)]
        if not kinds:
            remedy = f"give --kind, of {', '.join(KINDS)}"
            raise ConfigError("kind", ", ".join(names), "is no kind that can be served", remedy)
        kind = kinds[0]
    task = _make_task(KINDS[kind], {"model": model if is_version(model) else str(folder), **args})
    return _register(task, name, (alias,), {"source": init or model}, init=init)


def _make_task(reference: str, args: Mapping[str, Any]) -> Transferable:
    task = make_task(reference, args)
    assert isinstance(task, Transferable)
    return task


def register_base(task: Transferable, source: str) -> ModelVersion:
    """The version with the weights of the Task's folder, which adapters refer to: one that is there, or a new one.

    source: the folder, as it was given
    """
    args = {name: task.args[name] for name in ("dtype", "labels") if name in task.args}
    base = type(task)(model=str(task.folder), **args)  # type: ignore[call-arg]
    return _register(base, f"{make_model_name(source)}-base", ("base",), {"source": source}, reuses=True)


def _register(
    task: Transferable,
    name: str,
    aliases: tuple[str, ...],
    lineage: Mapping[str, str],
    *,
    reuses: bool = False,
    init: str = "",
) -> ModelVersion:
    """reuses: take a version with the same weights, of the model or its base; init: in place of the Task's"""
    registry = Registry()
    travelling = task.registration()
    signature = task.signature()
    assert travelling is not None
    reference = {"task": f"{TASKS}:{type(task).__name__}", "args": dict(travelling.args or {})}
    with open_draft() as draft:
        network, types, tensors = _open_weights(task, init)
        if signature is None:
            size = task.config.get("image_size", 224)
            height, width = size if isinstance(size, list | tuple) else (size, size)
            example = torch.zeros(2, task.config.get("num_channels", 3), height, width)
            signature = infer_signature(task, network, (example, None))
        file = make_weight_file(1, write_tensors(draft / SINGLE, types, tensors))
        for own in filter(registry.has, (name.removesuffix("-base"), name) if reuses else ()):
            for each in registry.list(own):
                if each.manifest.sha256 == file.sha256:
                    return each
        return registry.register(
            name,
            file,
            model=ModelFactory(factory=f"{build.__module__}:build", kwargs=reference),
            signature=signature,
            files=travelling.files,
            lineage={**travelling.lineage, **lineage},
            aliases=aliases,
            problem=travelling.problem,
        )


def _open_weights(task: Transferable, init: str) -> tuple[nn.Module, TensorTypes, Iterator[tuple[str, Tensor]]]:
    """The network, what its weights are, and the weights of the Task's folder, read one by one.

    The network has no memory for them, unless its signature is to be found, or the folder lacks the weights of a head.
    """
    if task.lora is None:
        network = build_skeleton(task.model)
    else:  # whose base is in no state dict
        with torch.device("meta"):
            network = task.model()
    state = network.state_dict(keep_vars=True)
    weights = find_initial_weights(network, init or task.initial_weights())
    names, own = {id(state[name]): name for name in weights}, {id(each) for each in state.values()}
    if task.signature() is None or any(id(each) in own and id(each) not in names for each in network.parameters()):
        torch.manual_seed(0)
        network, names = task.model(), {}
        load_initial_weights(network, weights)
        state = network.state_dict(keep_vars=True)

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, own in state.items():
            yield name, weights[names[id(own)]].to(own.dtype) if id(own) in names else own.detach()

    return network, {name: (own.dtype, own.shape) for name, own in state.items()}, read()


def find_task(version: ModelVersion) -> Transferable:
    """The Task that builds a version. Raises ConfigError for a version of another kind of Task."""
    kwargs = version.manifest.model.kwargs
    if kwargs.get("task") not in KINDS.values():
        problem = "is no model of transformers"
        raise ConfigError("model", version.ref, problem, "give one that was pulled, or trained by a Task of shoal.hf")
    return _make_task(kwargs["task"], kwargs["args"])


def write_folder(version: ModelVersion, folder: Path) -> None:
    """Write a version as `save_pretrained` does: config.json, safetensors, and the files of its tokenizer."""
    task = find_task(version)
    with torch.device("meta"):
        network = getattr(transformers, task.auto).from_config(make_config(task.config))
    buffers = [
        (module, name) for module in network.modules() for name, each in module._buffers.items() if each is not None
    ]
    tensors: Mapping[str, Tensor] = read_state_dict(version.ref)
    if task.lora is not None:
        tensors = task.merge_weights(tensors)
    network.load_state_dict(dict(tensors), assign=True)
    network.tie_weights()
    for module, name in buffers:
        if module._buffers[name].is_meta:  # of no state dict, and so of no file
            module._buffers[name] = torch.empty(0)
    network.save_pretrained(folder)
    written = json.loads((folder / CONFIG).read_text())
    written |= {name: task.config[name] for name in ("use_cache",) if name in task.config}  # serving changes it
    replace_synced(folder / CONFIG, json.dumps(written, indent=2).encode())
    for name in version.manifest.files:
        if name in COMPANIONS:
            replace_synced(folder / name, version.fetch_file(name).read_bytes())


def find_model_folder(model: str) -> Path:
    """The folder of a model, with a `config.json`; that of a version of the registry is written once on this host.

    Raises ConfigError, RegistryError.
    """
    if not is_version(model):
        return find_folder(model)
    version = Registry().get(model)
    return make_cached_folder(f"version-{version.manifest.sha256[:32]}", lambda draft: write_folder(version, draft))


def write_adapter_folder(version: ModelVersion, folder: Path) -> None:
    """Write the adapters of a version as peft does. Raises ConfigError for a version without adapters."""
    task = find_task(version)
    if task.lora is None:
        raise ConfigError("--adapter", version.ref, "has no adapters", "leave --adapter out: the model is written")
    with torch.device("meta"):
        network = task.model()
    base = Registry().get(version.manifest.lineage["base"])
    source = str(base.ref if base.manifest.run_id else base.manifest.lineage.get("source", ""))
    write_adapters(version, network, task.lora, source, folder)


def push(version: ModelVersion, folder: Path, hub_name: str = "", *, adapter: bool = False) -> Path:
    """Write a version into a folder, or for `org/name` below it in the layout of the hub's cache.

    adapter: write adapters alone, as peft does; otherwise they are merged into their base

    Returns the folder with config.json. Raises ConfigError for a folder that has files in it.
    """
    write = write_adapter_folder if adapter else write_folder
    if not hub_name:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError("folder", str(folder), "is not empty", "name a new one")
        with draft_folder(folder) as draft:
            write(version, draft)
        return folder
    if hub_name.count("/") != 1:
        raise ConfigError("--hub", hub_name, "is no name of the hub", "write it as org/name")
    top = folder / f"models--{hub_name.replace('/', '--')}"
    digest = hashlib.sha1(f"{version.ref} {version.manifest.sha256}{' adapter' * adapter}".encode()).hexdigest()
    snapshot = top / "snapshots" / digest
    if not snapshot.is_dir():
        with draft_folder(snapshot) as draft:
            write(version, draft)
    make_folder(top / "refs")
    replace_synced(top / "refs" / "main", digest.encode())
    return snapshot
