"""The language model of a run of agents: its folder, its network without weights, its tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.errors import needs_extra
from shoal.extend.registry import ModelFactory, ModelVersion, Signature
from shoal.extend.train import build, make_task
from shoal.weights import WeightSnapshot, decode_tensors

CAUSAL_LM = "shoal.libs.hf.tasks:CausalLM"


@dataclass(frozen=True)
class PretrainedModel:
    """module: a causal network of transformers with fresh weights; stop_tokens: those that end an answer"""

    module: torch.nn.Module
    tokenizer: Any
    stop_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary, as the network has it."""
        return int(self.module.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer."""
        return int(self.module.config.get_text_config().max_position_embeddings)  # type: ignore[operator, union-attr]


def open_pretrained(pretrained: str) -> PretrainedModel:
    """The model of a folder or a version, in float32. Raises ConfigError, RegistryError."""
    with needs_extra("language"):
        import transformers

        from shoal.libs.hf.source import load_tokenizer, make_config, read_config, read_json
        from shoal.libs.hf.transfer import find_model_folder
    folder = find_model_folder(pretrained)
    config = make_config(read_config(folder))
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder)
    generation = Path(folder, "generation_config.json")
    given = read_json("model", generation).get("eos_token_id") if generation.is_file() else None
    stops: set[int] = set()
    for each in (given, config.eos_token_id, tokenizer.eos_token_id):
        stops.update([each] if isinstance(each, int) else each or ())
    return PretrainedModel(module, tokenizer, tuple(sorted(stops)))


def register(pretrained: str, name: str, snapshot: WeightSnapshot) -> ModelVersion:
    """Register weights as a version of `name`, with its tokenizer. Raises ConfigError."""
    from safetensors.torch import save_file

    from shoal.libs.hf.source import COMPANIONS, open_draft
    from shoal.libs.hf.transfer import find_model_folder, pull

    folder = find_model_folder(pretrained)
    with open_draft() as draft:
        for each in folder.iterdir():
            if each.name in (*COMPANIONS, "config.json", "generation_config.json"):
                shutil.copyfile(each, draft / each.name)
        arrays = decode_tensors(snapshot.payload)
        save_file({key: torch.from_numpy(each.copy()) for key, each in arrays.items()}, draft / "model.safetensors")
        return pull(str(draft), name, kind="causal_lm")


def describe_served(pretrained: str) -> tuple[ModelFactory, Signature]:
    """The model as an endpoint serves it, which follows the run's weights."""
    from shoal.libs.hf.transfer import find_model_folder

    task = make_task(CAUSAL_LM, {"model": str(find_model_folder(pretrained))})
    signature = task.signature()
    assert signature is not None
    travelling = task.registration()
    args = dict(travelling.args or {}) if travelling is not None else {}
    return ModelFactory(factory=f"{build.__module__}:build", kwargs={"task": CAUSAL_LM, "args": args}), signature
