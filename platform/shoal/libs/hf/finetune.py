"""`shoal run finetune`, and `task=finetune` of any training: overrides of a fine-tuning, and the spec that they change.

Called by `jobs/finetune.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.config import format_override, last_override
from shoal.errors import ConfigError
from shoal.extend.registry import Registry
from shoal.extend.train import TrainSpec, make_task, spec_from_overrides
from shoal.libs.hf.adapters import is_adapter_folder, read_adapter_config
from shoal.libs.hf.kinds import KINDS
from shoal.libs.hf.network import LoraSpec
from shoal.libs.hf.source import make_absolute, make_model_name

_ARGS = (
    "model",
    "data",
    "validation",
    "dtype",
    "labels",
    "lora",
    "merge",
    "max_length",
    "truncate",
    "packing",
    "config",
    "base",
)
_PATHS = ("model", "data", "validation", "init")


def translate(overrides: Iterable[str]) -> list[str]:
    """Overrides of a TrainSpec: `model=X` is `args.model=X`, and `kind=causal_lm` the Task. Raises ConfigError."""
    translated = []
    for each in overrides:
        name, _, value = each.partition("=")
        if name == "kind":
            if value not in KINDS:
                raise ConfigError("kind", value, "is unknown", f"give one of {', '.join(KINDS)}")
            translated.append(f"task={KINDS[value]}")
        else:
            each = f"{name}={make_absolute(value)}" if name in _PATHS else each
            translated.append(f"args.{each}" if name.partition(".")[0] in _ARGS else each)
    return _take_adapters(translated)


def choose_spec(overrides: Iterable[str]) -> TrainSpec:
    """Of the words beside `task=finetune`. Raises ConfigError."""
    return make_spec(translate(overrides))


def make_spec(overrides: list[str]) -> TrainSpec:
    """Make one epoch of AdamW with warm-up and cosine, or what the record of a resumed run says. Raises ConfigError."""
    if last_override(overrides, "resume"):
        return spec_from_overrides(overrides)
    model = last_override(overrides, "args.model")
    if not model:
        raise ConfigError("model", model, "is not given", "as in shoal run finetune model=./SmolLM2 data=texts.jsonl")
    task = last_override(overrides, "task") or KINDS["causal_lm"]
    given = {"task": task, "name": make_model_name(model)}
    args = TrainSpec.parse(given).override([each for each in overrides if each.startswith("args.")]).args
    spec = TrainSpec.parse({**given, **make_task(task, args).defaults}).override(overrides)
    if spec.args.get("lora") is not None:  # the record has what was used, also of what was not given
        spec = spec.update({"args": {**spec.args, "lora": LoraSpec.parse(spec.args["lora"]).model_dump()}})
    return spec


def _take_adapters(overrides: list[str]) -> list[str]:
    """Where `init` or `model` is a folder of adapters, or `init` a version of some: begin with these, on their base.

    Raises ConfigError, RegistryError.
    """
    model, init = last_override(overrides, "args.model") or "", last_override(overrides, "init") or ""
    folder = next((each for each in (model, init) if is_adapter_folder(each)), "")
    if folder:
        if init not in ("", folder):
            problem = f"and model = {model!r} are both what the adapters begin with"
            raise ConfigError("init", init, problem, "give one of them, and the base as model")
        spec, about = read_adapter_config(Path(folder))
        lora: Any = spec.model_dump()
        base = make_absolute(about.get("base_model_name_or_path") or "") if model in ("", folder) else model
        if not base:
            raise ConfigError("init", folder, "are adapters that name no base", f"give it: model=./BASE init={folder}")
        kept = [each for each in overrides if not each.startswith(("init=", "args.model="))]
        overrides = [*kept, f"args.model={base}", f"init={folder}"]
    elif init and not Path(init).exists():
        lora = Registry().get(init).manifest.model.kwargs.get("args", {}).get("lora")
    else:
        return overrides
    return overrides if lora is None else [format_override("args.lora", lora), *overrides]
