"""Ten small models of transformers, of as many families."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from programs import PRELOADED, TRANSFORMERS

VOCABULARY, LENGTH = 64, 8
PRELOADED += TRANSFORMERS
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _make(kind: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, f"AutoModelFor{kind}").from_config(getattr(transformers, config)(**sizes))
    return made


CONFIGS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _make("CausalLM", "LlamaConfig", **SIZES, **TOKENS),
    "qwen": lambda: _make("CausalLM", "Qwen3Config", **SIZES, **TOKENS, head_dim=8, num_key_value_heads=1),
    "mixtral": lambda: _make(
        "CausalLM", "MixtralConfig", **SIZES, **TOKENS, num_local_experts=4, num_key_value_heads=1
    ),
    "gpt2": lambda: _make("CausalLM", "GPT2Config", n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, **TOKENS),
    "bert": lambda: _make("MaskedLM", "BertConfig", **SIZES, **TOKENS, attention_probs_dropout_prob=0.0),
    "vit": lambda: _make("ImageClassification", "ViTConfig", **SIZES, image_size=8, patch_size=4, num_channels=1),
    "t5": lambda: _make("Seq2SeqLM", "T5Config", d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **TOKENS),
    "mamba": lambda: _make("CausalLM", "MambaConfig", hidden_size=16, num_hidden_layers=2, **TOKENS),
    "distilbert": lambda: _make("MaskedLM", "DistilBertConfig", dim=16, n_layers=2, n_heads=2, hidden_dim=32, **TOKENS),
    "gemma": lambda: _make("CausalLM", "Gemma2Config", **SIZES, **TOKENS, head_dim=8, num_key_value_heads=1),
}

# Decoders of ten families that bring a tensor-parallel plan of their own.
WITH_PLAN = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Mixtral", "Olmo2", "Phi3", "Glm"]


def make_planned(family: str) -> nn.Module:
    """A decoder of one of these families, with twice as many heads as there are of keys and values."""
    sizes = SIZES | TOKENS | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    if family == "Phi3":
        del sizes["head_dim"]
    return _make("CausalLM", f"{family}Config", **sizes, attention_dropout=0.0)


def make_batch(name: str, num_samples: int, seed: int) -> tuple[Tensor, ...]:
    """Pictures [B, 1, 8, 8] and classes [B] for `vit`; otherwise tokens [B, 8], which are the labels, too."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return torch.rand(num_samples, 1, 8, 8, generator=generator), torch.randint(
            2, (num_samples,), generator=generator
        )
    tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=generator)
    return (tokens, torch.ones_like(tokens), tokens, tokens) if name == "t5" else (tokens, tokens)
