"""Causal models of transformers over slots: as without a cache, or refused."""

from typing import Any

import pytest
import torch
from tests.libs.language.tiny_language import compute_logprobs, copy_state, list_tokens

from shoal.errors import ConfigError
from shoal.libs.language.engine import SlotEngine, TextRequest

SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # learnt positions
    "gemma3_text": {**GROUPED, "sliding_window": 6},  # some layers see six tokens
    "deepseek_v3": {  # keys and values of different sizes
        **{"n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
        **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"n_group": 1, "topk_group": 1},
    },
}


def build(kind: str, **fields: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_without_a_cache(kind: str) -> None:
    model, other = build(kind, **KINDS[kind]), build(kind, **KINDS[kind])
    for parameter in other.parameters():
        parameter.data += 0.1
    engine = SlotEngine(model, slots=3, length=48, chunk=8)
    differences = []
    for version, module in enumerate((build(kind, **KINDS[kind]), other)):
        if version:
            engine.set_weights(version, copy_state(other))
        prompts = [tuple(torch.randint(1, 64, (size,)).tolist()) for size in (3, 20, 11, 20)]
        for prompt, events in zip(
            prompts, engine.run([TextRequest(each, max_tokens=12) for each in prompts]), strict=True
        ):
            expected = compute_logprobs(module, [*prompt, *list_tokens(events)])[len(prompt) - 1 : -1]
            assert list_tokens(events) == expected.argmax(-1).tolist()
            assert events[-1].spans == ((version, 12),)
            differences += [abs(each.logprob - float(row.max())) for each, row in zip(events, expected, strict=True)]
    assert max(differences) <= 1e-4
    assert sum(differences) / len(differences) <= 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("gpt_oss", {**GROUPED, "num_local_experts": 4}, "has attention with s_aux"),
        ("mamba", {}, "has an attention that cannot be exchanged"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depend on the length",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlotEngine(build(kind, **fields))
