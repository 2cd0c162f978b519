"""Models that others wrote, unchanged: GPT-2 and BERT of transformers, Transformer of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import VOCABULARY, assert_equal, trained
from torch import Tensor, nn
from torch.nn import functional

from programs import run_ranks
from shoal.parallel import ParallelSpec, World

FP32 = {"rtol": 5e-4, "atol": 5e-5}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(**sizes, vocab_size=VOCABULARY, num_labels=VOCABULARY, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config)


class Translator(nn.Module):
    """torch's nn.Transformer, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        return self.head(self.transformer(embedded, embedded)[:, -1])


class LastLogits:
    """A learnable for all three."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return functional.cross_entropy(logits[:, -1] if logits.ndim == 3 else logits, batch[1])

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": torch.zeros(())}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


PLANS: list[dict[str, Any]] = [{}, {"shard": True}]
CASES = [(model, plan) for model in (gpt2, bert, Translator) for plan in PLANS]
CASES += [(model, {"data": 1, "tensor": 2}) for model in (bert, Translator)]


def _all(world: World) -> list[dict[str, Any]]:
    return [trained(model, ParallelSpec.parse(plan), world, learnable=LastLogits()) for model, plan in CASES]


@pytest.mark.soak
def test_they_train_under_every_plan() -> None:
    ranks = run_ranks(_all, 2)
    for index, (model, _) in enumerate(CASES):
        expected = trained(model, ParallelSpec(), World.single("cpu"), learnable=LastLogits())
        for found in (rank[index] for rank in ranks):
            assert_equal(found, expected, **FP32)
