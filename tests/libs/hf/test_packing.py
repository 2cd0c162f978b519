"""Packed samples do not see each other, in every family that may pack; other families are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.libs.hf.network import PACKABLE, build_network

SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
OTHERS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
}


def _build(kind: str) -> torch.nn.Module:
    grouped = {} if kind in ("gpt_neox", *OTHERS) else {"num_key_value_heads": 2, "head_dim": 8}
    sizes = {**SIZES, **grouped, **OTHERS.get(kind, {}), "model_type": kind}
    inputs = ("input_ids", "position_ids")
    return build_network("AutoModelForCausalLM", sizes, "float32", inputs).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PACKABLE)
def test_a_sample_does_not_see_the_one_before_in_its_row(kind: str) -> None:
    torch.manual_seed(0)
    network = _build(kind)
    first, other, second = torch.randint(1, 64, (3, 1, 5))
    positions = torch.arange(5).repeat(2)[None]
    with torch.no_grad():
        one, two = (network(torch.cat([each, second], 1), positions)[:, 5:] for each in (first, other))
        alone = network(second, torch.arange(5)[None])
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-6)


def test_other_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not known to keep the samples of a row apart"):
        _build("opt")
