"""Every plan gives one process's gradients, losses, evaluation and weights, on the same global batches."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import BATCH, LENGTH, VOCABULARY, Factory, assert_equal, build, global_batch, make, trained
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from learnable import Classifier
from programs import run_ranks
from shoal.errors import PlanError
from shoal.parallel import ParallelSpec, World
from shoal.parallel.pipeline.schedules import SCHEDULE_CLASSES

# fp32 sums are taken in another order: a few units in the last place, amplified by three steps of Adam.
FP32 = {"rtol": 2e-4, "atol": 2e-5}
# bf16 has eight bits: an input that another order of sums rounds to its neighbour moves what follows by 2**-8.
BF16 = {"rtol": 5e-2, "atol": 2e-2}
# Weights of eight bits in each of some layers: measured 0.013 of a gradient's norm, of autocast's 0.15.
BF16_PARAMS = 2**-5


class Between(nn.Module):
    """What stands between some of the layers learns too; a rank that held a part of them would see a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.slopes = nn.Sequential(nn.Linear(8 * LENGTH, 16), nn.PReLU(), nn.Linear(16, 8))
        self.split = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.split(self.slopes(self.embedding(tokens).flatten(1)).relu())
        return output


class InPlace(nn.Module):
    """What the layers give is changed in place: an embedding's, and those of layers split by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens).mul_(2.0)
        hidden = self.layers(embedded)
        hidden += embedded
        output: Tensor = self.head(hidden).mul_(0.5)
        return output.mean(1)


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
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
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


def plain() -> nn.Module:
    return Layers(normalises=False)


class AsImages(nn.Module):
    """Tokens [B, LENGTH] as images of one channel, float [B, 1, LENGTH, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        images: Tensor = self.embedding(tokens).unsqueeze(1)
        return images


def images() -> nn.Module:
    """Convolutions either way, batch normalisation, pooling, dropout of channels, two linear layers."""
    return nn.Sequential(
        AsImages(),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * LENGTH * 12, 16),
        nn.ReLU(),
        nn.Linear(16, VOCABULARY),
    )


def normed() -> nn.Module:
    """Batch normalisations, whose eps lets two samples have more than a sign."""
    norms = nn.BatchNorm1d(8 * LENGTH, eps=1.0), nn.BatchNorm1d(VOCABULARY, eps=1.0)
    embedding = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten())
    return nn.Sequential(embedding, norms[0], nn.Tanh(), nn.Linear(8 * LENGTH, VOCABULARY), norms[1])


class Named(Classifier):
    """Of a dict, with the stage that the user wants."""

    cuts: list[str] | None = ["blocks.2"]  # noqa: RUF012

    def pack(self, batch: tuple[Tensor, ...]) -> Any:
        return dict(zip(("tokens", "targets"), batch, strict=True))

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch["tokens"],)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, (batch["targets"],))

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return super().metrics(outputs, (batch["targets"],))


class Flat(Classifier):
    """The cuts of images with stages that hand on views; and a metric with a dimension."""

    cuts: list[str] | None = ["4", "8", "9"]  # noqa: RUF012

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {name: value.reshape(1) for name, value in super().metrics(outputs, batch).items()}


class Third(Classifier):
    cuts: list[str] | None = ["3"]  # noqa: RUF012


@dataclass(frozen=True)
class Case:
    model: str | Factory
    plan: dict[str, Any] = field(default_factory=dict)
    learnable: Callable[[], Any] = Classifier
    num_samples: int = BATCH

    def train(self, world: World) -> dict[str, Any]:
        spec = ParallelSpec.parse(self.plan)
        return trained(self.model, spec, world, learnable=self.learnable(), num_samples=self.num_samples)

    def train_alone(self) -> dict[str, Any]:
        """In one process, over the same micro-batches."""
        parts = self.plan.get("accumulate", 1) * self.plan.get("micro_batches", 1)
        return _train_alone(self.model, parts, self.plan.get("precision") == "bf16", self.learnable, self.num_samples)

    def __str__(self) -> str:
        name = self.model if isinstance(self.model, str) else self.model.__name__
        return " ".join([name, *(f"{key}={value}" for key, value in self.plan.items())])


@functools.cache
def _train_alone(
    model: str | Factory, accumulate: int, is_bf16: bool, learnable: Callable[[], Any], num_samples: int
) -> dict[str, Any]:
    spec = ParallelSpec(accumulate=accumulate, precision="bf16" if is_bf16 else "fp32")
    return trained(model, spec, World.single("cpu"), learnable=learnable(), num_samples=num_samples)


SHARD: dict[str, Any] = {"shard": True}
TENSOR: dict[str, Any] = {"data": 1, "tensor": 2}
STAGES: dict[str, Any] = {"pipeline": 2, "micro_batches": 4}
SAVING = ({"activation_checkpointing": "block"}, {"activation_checkpointing": "selective"})
PARAMS = {**SHARD, "precision": "bf16_params"}
TWO = [
    *(Case("mixture", plan | more) for plan in ({}, SHARD, TENSOR) for more in ({}, {"accumulate": 2})),
    *(Case("transformer", plan) for plan in ({}, SHARD, TENSOR)),
    *(Case("transformer", {**plan, "precision": "bf16"}) for plan in ({}, SHARD, TENSOR)),
    Case(Between, TENSOR),
    Case(InPlace, TENSOR),
    Case(InPlace, {**TENSOR, "accumulate": 2}),
    # -- stages
    *(Case("decoder", {**STAGES, "schedule": schedule}) for schedule in SCHEDULE_CLASSES),
    Case("decoder", {**STAGES, "schedule": "1f1b", "accumulate": 2}),
    Case("decoder", {**STAGES, "schedule": "gpipe"}, Named),
    Case("transformer", {**STAGES, "schedule": "1f1b"}),
    Case("transformer", {**STAGES, "schedule": "1f1b", "precision": "bf16"}),
    Case("mixture", {**STAGES, "schedule": "interleaved_zero_bubble"}),
    Case(images, {**STAGES, "schedule": "1f1b"}),
    Case(images, {**STAGES, "schedule": "zbv"}, Flat),
    # -- less memory
    *(Case(Layers, plan | saving) for plan in ({}, SHARD) for saving in SAVING),
    *(Case(plain, TENSOR | saving) for saving in SAVING),
    *(Case("transformer", {**SHARD, "reshard_after_forward": frees, "accumulate": 2}) for frees in (True, False)),
    Case("transformer", PARAMS),
    Case(plain, PARAMS),
    Case(plain, {**PARAMS, "accumulate": 2, **SAVING[0]}),
    Case(plain, {**PARAMS, "reshard_after_forward": False, **SAVING[1]}),
    # -- images whose channels are last
    *(Case(images, {**plan, "channels_last": True}) for plan in ({}, {"accumulate": 2}, SHARD, TENSOR)),
    Case(images, {"pipeline": 2, "micro_batches": 1, "schedule": "gpipe", "channels_last": True}),
]  # fmt: skip
FOUR = [
    Case("mixture", {**SHARD, "replicate": 2}),
    *(Case(model, {**plan, "tensor": 2}) for model in ("mixture", "transformer") for plan in ({}, SHARD)),
    # -- stages
    Case(images, {**STAGES, "schedule": "interleaved_1f1b", "data": 2}, Flat),
    Case("decoder", {**STAGES, **SHARD, "schedule": "interleaved_1f1b", "data": 2, "accumulate": 2}),
    Case("mixture", {**STAGES, **SHARD, "schedule": "gpipe", "data": 2}),
    Case("transformer", {**STAGES, "schedule": "1f1b", "tensor": 2}),
    Case("mixture", {**STAGES, "schedule": "interleaved_zero_bubble", "tensor": 2}),
    # -- less memory
    Case(plain, {**PARAMS, "tensor": 2}),
    Case(plain, {**SHARD, "tensor": 2, **SAVING[1]}),
    Case(Layers, {**SHARD, "replicate": 2, "reshard_after_forward": False, **SAVING[0]}),
    Case(plain, {**PARAMS, "replicate": 2}),
    # -- shares of one sample: batch normalisation has the statistics of all data ranks
    *(Case(normed, {"data": 4, **plan}, num_samples=4) for plan in ({}, SHARD)),
    Case(normed, {"data": 2, "pipeline": 2, "micro_batches": 2}, Third, num_samples=4),
]
EIGHT = [
    Case("transformer", {**STAGES, **SHARD, "schedule": "1f1b", "data": 2, "tensor": 2, "accumulate": 2}),
    Case("decoder", {**STAGES, **SHARD, "schedule": "1f1b", "data": 4, "replicate": 2}),
]


def _train_all(world: World, cases: list[Case]) -> list[dict[str, Any]]:
    return [case.train(world) for case in cases]


Ranks = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two_ranks() -> Ranks:
    """What each rank has of each case."""
    return run_ranks(_train_all, 2, TWO)


@pytest.fixture(scope="module")
def four_ranks() -> Ranks:
    return run_ranks(_train_all, 4, FOUR)


@pytest.fixture(scope="module")
def eight_ranks() -> Ranks:
    return run_ranks(_train_all, 8, EIGHT)


@pytest.mark.parametrize("index", range(len(TWO)), ids=map(str, TWO))
def test_two_ranks_train_as_one_process(two_ranks: Ranks, index: int) -> None:
    _compare(TWO[index], [each[index] for each in two_ranks])


@pytest.mark.parametrize("index", range(len(FOUR)), ids=map(str, FOUR))
def test_four_ranks_train_as_one_process(four_ranks: Ranks, index: int) -> None:
    _compare(FOUR[index], [each[index] for each in four_ranks])


@pytest.mark.soak
@pytest.mark.parametrize("index", range(len(EIGHT)), ids=map(str, EIGHT))
def test_eight_ranks_train_as_one_process(eight_ranks: Ranks, index: int) -> None:
    _compare(EIGHT[index], [each[index] for each in eight_ranks])


def _compare(case: Case, ranks: list[dict[str, Any]]) -> None:
    expected = case.train_alone()
    for name in ("gradients", "parameters"):
        assert {each for rank in ranks for each in rank[name]} == expected[name].keys()
    assert ranks[0]["weights"].keys() == expected["weights"].keys()
    copies: dict[str, Tensor] = {}
    for rank in ranks:
        if case.plan.get("precision") == "bf16_params":
            _assert_near(rank, expected)
        else:
            assert_equal(rank, expected, **(BF16 if "precision" in case.plan else FP32))
        for name, value in rank["parameters"].items():
            assert torch.equal(copies.setdefault(name, value), value), f"two ranks differ in {name}"


def _assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, norm and evaluation, and each gradient by its norm, which are all in fp32."""
    for name in ("losses", "norm"):
        torch.testing.assert_close(found[name], expected[name], rtol=BF16_PARAMS, atol=0.0)
    torch.testing.assert_close(found["evaluation"], expected["evaluation"], rtol=BF16_PARAMS, atol=1 / 7)  # a sample
    for name, gradient in expected["gradients"].items():
        assert found["gradients"][name].dtype == torch.float32
        assert float((found["gradients"][name] - gradient).norm()) <= BF16_PARAMS * float(gradient.norm()), name
    assert all(each.dtype == torch.float32 for each in found["weights"].values())


@pytest.mark.parametrize("saving", SAVING, ids=["block", "selective"])
def test_recomputing_changes_no_bit(saving: dict[str, Any]) -> None:
    case = Case(Layers, {"accumulate": 2, **saving})
    assert_equal(case.train(World.single("cpu")), case.train_alone(), rtol=0, atol=0)


def test_a_copy_of_a_model_recomputes_with_its_own_weights() -> None:
    parallel = build(Layers, ParallelSpec(activation_checkpointing="block"), World.single("cpu"))
    copied = copy.deepcopy(parallel.modules[0])
    for parameter in copied.layers.parameters():
        nn.init.zeros_(parameter)
    copied(global_batch(0)[0]).sum().backward()
    assert all(each.grad is not None for each in copied.layers[0].qkv.parameters())
    assert all(each.grad is None for each in parallel.modules[0].parameters())
    assert list(parallel.model_state()) == list(make(Layers).state_dict())


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_convolutions_give_lies_channels_last_also_where_their_images_have_one_channel(
    channels_last: bool,
) -> None:
    parallel = build(images, ParallelSpec(channels_last=channels_last), World.single("cpu"))
    [model] = parallel.modules
    seen: list[bool] = []
    for layer in model.children():
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d, nn.ConvTranspose2d)):
            layer.register_forward_hook(lambda module, given, out: seen.append(out.stride(1) == 1))
    parallel.train_step(global_batch(0), 0)
    assert seen == [channels_last] * 3
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_a_single_image_stays_as_it_is() -> None:
    layer, spec = nn.Sequential(nn.Conv2d(1, 2, 3)), ParallelSpec(channels_last=True)
    parallel = build(lambda: nn.Sequential(AsImages(), layer, nn.Flatten()), spec, World.single("cpu"))
    image = torch.randn(1, 5, 5)
    torch.testing.assert_close(parallel.modules[0][1](image), layer(image[None])[0])


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(PlanError, match=r"parallel.channels_last = True: Linear has no convolution of two dimensions"):
        build(lambda: nn.Linear(1, 1), ParallelSpec(channels_last=True), World.single("cpu"))
