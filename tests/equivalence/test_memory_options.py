"""Options that save memory give one process's numbers: recomputed activations, weights in bf16, freed shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import LENGTH, VOCABULARY, assert_equal, build, global_batch, make, trained
from torch import Tensor, nn
from torch.nn import functional

from programs import run_ranks
from shoal.parallel import ParallelSpec, World

FP32 = {"rtol": 2e-4, "atol": 2e-5}
BF16 = 2**-5  # eight bits in each of some layers: measured 0.013 of a gradient's norm, of autocast's 0.15
SAVING = ({"activation_checkpointing": "block"}, {"activation_checkpointing": "selective"})


class Layer(nn.Module):
    """A layer with dropout, called twice, whose batch norm counts the batches."""

    def __init__(self, width: int, normalises: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.batch_norm = nn.BatchNorm1d(width) if normalises else nn.Identity()
        self.drop = nn.Dropout(0.3)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = (each.unsqueeze(1) for each in self.qkv(self.drop(self.norm(hidden))).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        mixed = self.batch_norm(self.out(attended).transpose(1, 2)).transpose(1, 2)
        return hidden + scale * self.drop(mixed)


class Layers(nn.Module):
    """A decoder of layers in a list; the embedding and the head are not in it."""

    def __init__(self, normalises: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Layer(16, normalises) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH)[:, None])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.places
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return self.head(hidden[:, -1])


def Plain() -> nn.Module:  # noqa: N802
    return Layers(normalises=False)


@pytest.mark.parametrize("saving", SAVING, ids=["block", "selective"])
def test_recomputing_changes_no_bit(saving: dict[str, Any]) -> None:
    plain = trained(Layers, ParallelSpec(accumulate=2), World.single("cpu"))
    found = trained(Layers, ParallelSpec(accumulate=2, **saving), World.single("cpu"))
    assert_equal(found, plain, rtol=0, atol=0)


def test_a_copy_of_a_model_recomputes_with_its_own_weights() -> None:
    spec = ParallelSpec(activation_checkpointing="block")
    parallel = build(Layers, spec, World.single("cpu"))
    copied = copy.deepcopy(parallel.modules[0])
    for parameter in copied.layers.parameters():
        nn.init.zeros_(parameter)
    copied(global_batch(0)[0]).sum().backward()
    assert all(each.grad is not None for each in copied.layers[0].qkv.parameters())
    assert all(each.grad is None for each in parallel.modules[0].parameters())
    assert list(parallel.model_state()) == list(make(Layers).state_dict())


SHARDED: dict[str, Any] = {"shard": True}
OF_TWO: list[tuple[Any, dict[str, Any]]] = [
    *((Layers, {**plan, **saving}) for plan in ({}, SHARDED) for saving in SAVING),
    *((Plain, {"data": 1, "tensor": 2, **saving}) for saving in SAVING),
    ("transformer", {**SHARDED, "reshard_after_forward": True, "accumulate": 2}),
    ("transformer", {**SHARDED, "reshard_after_forward": False, "accumulate": 2}),
    *((model, {**SHARDED, "precision": "bf16_params"}) for model in ("transformer", Plain)),
    (Plain, {**SHARDED, "precision": "bf16_params", "accumulate": 2, **SAVING[0]}),
    (Plain, {**SHARDED, "precision": "bf16_params", "reshard_after_forward": False, **SAVING[1]}),
]
OF_FOUR: list[tuple[Any, dict[str, Any]]] = [
    (Plain, {**SHARDED, "tensor": 2, "precision": "bf16_params"}),
    (Plain, {**SHARDED, "tensor": 2, **SAVING[1]}),
    (Layers, {**SHARDED, "replicate": 2, "reshard_after_forward": False, **SAVING[0]}),
    (Plain, {**SHARDED, "replicate": 2, "precision": "bf16_params"}),
]


def _all(world: World, cases: list[tuple[Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [trained(model, ParallelSpec.parse(plan), world) for model, plan in cases]


@pytest.mark.parametrize(("cases", "size"), [(OF_TWO, 2), (OF_FOUR, 4)], ids=["two", "four"])
def test_ranks_learn_as_one_process(cases: list[tuple[Any, dict[str, Any]]], size: int) -> None:
    ranks = run_ranks(_all, size, cases)
    for index, (model, plan) in enumerate(cases):
        expected = trained(model, ParallelSpec(accumulate=plan.get("accumulate", 1)), World.single("cpu"))
        for found in (rank[index] for rank in ranks):
            if "precision" in plan:
                _assert_near(found, expected, BF16)
            else:
                assert_equal(found, expected, **FP32)


def _assert_near(found: dict[str, Any], expected: dict[str, Any], share: float) -> None:
    """Losses, norm and evaluation, and each gradient by its norm, which are all in fp32."""
    for name in ("losses", "norm"):
        torch.testing.assert_close(found[name], expected[name], rtol=share, atol=0.0)
    torch.testing.assert_close(found["evaluation"], expected["evaluation"], rtol=share, atol=1 / 16)  # a sample
    for name, gradient in expected["gradients"].items():
        assert found["gradients"][name].dtype == torch.float32
        assert float((found["gradients"][name] - gradient).norm()) <= share * float(gradient.norm()), name
    assert all(each.dtype == torch.float32 for each in found["weights"].values())
