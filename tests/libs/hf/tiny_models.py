"""Tiny models of Hugging Face in folders, with a tokenizer of bytes and data of a few lines."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's library reads it
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """A token for each byte, and two special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<pad>", "<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


def make_model(kind: str = "llama", auto: str = "AutoModelForCausalLM", **more: Any) -> Any:
    """A tiny model with weights that are the same each time."""
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 259} if kind == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **more})
    return getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()


def save_model(folder: Path, kind: str = "llama", auto: str = "AutoModelForCausalLM", **more: Any) -> Any:
    """Save a tiny model with its tokenizer; returns the model."""
    model = make_model(kind, auto, **more)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def write_lines(path: Path, samples: Sequence[object]) -> str:
    """JSON lines; returns the path."""
    path.write_text("".join(f"{json.dumps(each)}\n" for each in samples))
    return str(path)
