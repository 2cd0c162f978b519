"""Models of Hugging Face as Tasks: `shoal.hf.causal_lm("FOLDER", data="texts.jsonl")`.

A model is a folder with `config.json` and safetensors, a GGUF file, a snapshot of the hub's cache, or a version of the
registry. Nothing asks the hub: where a model is not on this host, the error says how to bring it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shoal.plugins.library import Library

# Read by the hub's library when it is imported. HF_HUB_OFFLINE=0 lets it use the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:
    from shoal.libs.hf.tasks import CausalLM, ImageClassification, SequenceClassification, TokenClassification

LIBRARY = Library(
    "hf",
    verbs={
        "models push": ("shoal.libs.hf.commands:push", "Write a version as a folder of Hugging Face."),
        "models pull": ("shoal.libs.hf.commands:pull", "Register a folder of Hugging Face."),
    },
    names={"hf": "shoal.libs.hf"},
    extensions={
        "shoal.weight_folders": {"adapter_config.json": "shoal.libs.hf.adapters:open_adapters"},
        "shoal.token_policies": {"transformers": "shoal.libs.hf.tasks:TokenPolicy"},
    },
)

__all__ = ["causal_lm", "image_classification", "sequence_classification", "token_classification"]


def causal_lm(model: str, **args: Any) -> CausalLM:
    """A Task that trains a language model; `args` of `shoal.libs.hf.tasks.CausalLM`.

    shoal.fit(shoal.hf.causal_lm("./SmolLM2", data="texts.jsonl", lora={"rank": 8}), stop={"epochs": 1})
    """
    from shoal.libs.hf.tasks import CausalLM

    return CausalLM(model=model, **args)


def sequence_classification(model: str, **args: Any) -> SequenceClassification:
    """A Task that classifies texts; `args` of `shoal.libs.hf.tasks.SequenceClassification`."""
    from shoal.libs.hf.tasks import SequenceClassification

    return SequenceClassification(model=model, **args)


def token_classification(model: str, **args: Any) -> TokenClassification:
    """A Task that classifies words of texts; `args` of `shoal.libs.hf.tasks.TokenClassification`."""
    from shoal.libs.hf.tasks import TokenClassification

    return TokenClassification(model=model, **args)


def image_classification(model: str, **args: Any) -> ImageClassification:
    """A Task that classifies pictures; `args` of `shoal.libs.hf.tasks.ImageClassification`."""
    from shoal.libs.hf.tasks import ImageClassification

    return ImageClassification(model=model, **args)
