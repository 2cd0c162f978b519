"""Adapters as folders of peft: `adapter_config.json` and `adapter_model.safetensors`, and nothing of their base.

Called by `models push` and `pull`, by `finetune`, and by the core where `init=` names such a folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.errors import ConfigError, SpecMismatch
from shoal.extend.registry import ModelVersion
from shoal.extend.train import read_state_dict
from shoal.libs.hf.network import PEFT_FIELDS, LoraSpec, RenamedTensors, make_lora_config
from shoal.libs.hf.source import read_json
from shoal.weights.tensor_files import open_tensors

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_OWN = re.compile(r"\.(lora_[AB])\.default\.")
_THEIRS = re.compile(r"\.(lora_[AB])\.")
# Which say nothing of what the network computes, or are found from the base and the tensors.
_NEUTRAL = (
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "task_type",
    "modules_to_save",
    "exclude_modules",
    "fan_in_fan_out",
    "runtime_config",
)
TASK_TYPES = {  # of peft, by the end of the network's class
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}


def is_adapter_folder(path: str | Path) -> bool:
    """Whether it is a folder that peft has written."""
    return bool(str(path)) and (Path(path) / CONFIG).is_file()


def read_adapter_config(folder: Path) -> tuple[LoraSpec, dict[str, Any]]:
    """The adapters of a folder, and all that its file says.

    Raises ConfigError, which names the field that would make the network compute something else.
    """
    from peft import LoraConfig

    values = read_json("adapter", folder / CONFIG)
    if values.get("peft_type") != "LORA":
        raise ConfigError("peft_type", values.get("peft_type"), "is not LORA", "give adapters of LoRA")
    plain = json.loads(json.dumps(LoraConfig().to_dict(), default=str))
    for name, value in values.items():
        if value and value not in (plain.get(name), "gaussian") and name not in (*PEFT_FIELDS, *_NEUTRAL):
            problem = f"of {folder / CONFIG} is not supported here"
            raise ConfigError(name, value, problem, "merge them with peft's merge_and_unload, and pull the model")
    given = {own: values[theirs] for theirs, own in PEFT_FIELDS.items() if values.get(theirs) is not None}
    return LoraSpec.parse(given), values


def open_adapters(folder: Path, network: nn.Module) -> Mapping[str, Tensor]:
    """The tensors of a folder by the names of a network with adapters, which must scale them as the folder says.

    Raises ConfigError for a network without adapters, SpecMismatch for other adapters. Of shoal.weight_folders.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import get_pattern_key

    lora, _ = read_adapter_config(folder)
    if not (folder / FILE).is_file():
        raise ConfigError("init", str(folder), f"has no {FILE}", "save the adapters as safetensors")
    tensors = open_tensors([folder / FILE])
    names = {_THEIRS.sub(r".\1.default.", name.removeprefix(_PREFIX)): name for name in tensors}
    layers = {path: each for path, each in network.named_modules() if isinstance(each, LoraLayer)}
    remedy = f"shoal run finetune takes them from init={folder}; else give lora the values of its {CONFIG}"
    if not layers:
        raise ConfigError("init", str(folder), "holds adapters, and the network has none", remedy)
    found = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    if different := sorted(found ^ layers.keys()):
        raise SpecMismatch("init", str(folder), f"adapts other layers than the network: {different[0]}", remedy)
    for path, layer in layers.items():
        rank = lora.rank_pattern.get(get_pattern_key(lora.rank_pattern, path), lora.rank)
        alpha = lora.alpha_pattern.get(get_pattern_key(lora.alpha_pattern, path), lora.alpha)
        scale = alpha / (math.sqrt(rank) if lora.rslora else rank)
        if not math.isclose(layer.scaling["default"], scale):
            shown = f"scales {path} by {scale:g}, and the network by {layer.scaling['default']:g}"
            raise SpecMismatch("init", str(folder), shown, remedy)
    return RenamedTensors(tensors, names)


def write_adapters(version: ModelVersion, network: nn.Module, lora: LoraSpec, source: str, folder: Path) -> None:
    """Write a version of adapters as peft's `save_pretrained`.

    network: with adapters, on the meta device
    source:  what the base was registered from
    """
    state = read_state_dict(version.ref)
    adapted = {name.partition(".lora_")[0] for name in state if ".lora_" in name}
    ends = {path.rpartition(".")[2] for path in adapted}
    matching = {path for path, _ in network.named_modules() if path.rpartition(".")[2] in ends}
    heads = sorted({name.rpartition(".")[0] for name in state if ".lora_" not in name})
    kinds = [each for suffix, each in TASK_TYPES.items() if type(network).__name__.endswith(suffix)]
    settings = make_lora_config(
        lora,
        network,
        target_modules=sorted(ends if matching == adapted else adapted),
        modules_to_save=heads or None,
        task_type=kinds[0] if kinds else None,
        base_model_name_or_path=source,
        inference_mode=True,
    )
    settings.save_pretrained(str(folder))
    renamed = {_PREFIX + _OWN.sub(r".\1.", name): state[name].contiguous() for name in state}
    save_file(renamed, folder / FILE, {"format": "pt"})
