"""Images channels last in memory: the same gradients, losses and weights as without, under every plan; and it is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LENGTH, VOCABULARY, assert_equal, build, global_batch, trained
from torch import Tensor, nn

from programs import run_ranks
from shoal.errors import PlanError
from shoal.parallel import ParallelSpec, World

FP32 = {"rtol": 2e-4, "atol": 2e-5}  # sums in another order
PLANS: list[dict[str, Any]] = [
    {},
    {"accumulate": 2},
    {"shard": True},
    {"data": 1, "tensor": 2},
]


class AsImages(nn.Module):
    """Tokens [B, LENGTH] as images of one channel, float [B, 1, LENGTH, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        images: Tensor = self.embedding(tokens).unsqueeze(1)
        return images


def network() -> nn.Module:
    """Convolutions either way, batch normalisation, pooling, dropout of channels, two linear layers."""
    return nn.Sequential(
        AsImages(),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * LENGTH * 12, 16),
        nn.ReLU(),
        nn.Linear(16, VOCABULARY),
    )


STAGES: dict[str, Any] = {"data": 1, "pipeline": 2, "micro_batches": 1, "schedule": "gpipe"}


def _trained(world: World) -> list[dict[str, Any]]:
    return [trained(network, ParallelSpec.parse({**plan, "channels_last": True}), world) for plan in [*PLANS, STAGES]]


def test_under_every_plan_it_is_as_without() -> None:
    expected = {
        accumulate: trained(network, ParallelSpec(accumulate=accumulate), World.single("cpu")) for accumulate in (1, 2)
    }
    ranks = run_ranks(_trained, 2)
    for found in ranks:
        for plan, one in zip(PLANS, found[:-1], strict=True):
            assert_equal(one, expected[plan.get("accumulate", 1)], **FP32)
    first, last = (found[-1] for found in ranks)  # each has the gradients of its own stage
    joined = {
        **last,
        "gradients": {**first["gradients"], **last["gradients"]},
        "weights": {**first["weights"], **last["weights"]},
    }
    assert_equal(joined, expected[1], **FP32)


def test_what_convolutions_give_lies_channels_last_also_where_their_images_have_one_channel() -> None:
    for channels_last in (False, True):
        assert _as_they_lie(channels_last) == [channels_last] * 3


def _as_they_lie(channels_last: bool) -> list[bool]:
    """Of each convolution and the pooling: whether what it gives lies channels last. Parameters never do."""
    parallel = build(network, ParallelSpec(channels_last=channels_last), World.single("cpu"))
    [model] = parallel.modules
    seen: list[bool] = []
    for layer in model.children():
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d, nn.ConvTranspose2d)):
            layer.register_forward_hook(lambda module, given, out: seen.append(out.stride(1) == 1))
    parallel.train_step(global_batch(0), 0)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    return seen


def test_a_single_image_stays_as_it_is() -> None:
    layer = nn.Sequential(nn.Conv2d(1, 2, 3))
    parallel = build(
        lambda: nn.Sequential(AsImages(), layer, nn.Flatten()), ParallelSpec(channels_last=True), World.single("cpu")
    )
    image = torch.randn(1, 5, 5)
    torch.testing.assert_close(parallel.modules[0][1](image), layer(image[None])[0])


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(PlanError, match=r"parallel.channels_last = True: Linear has no convolution of two dimensions"):
        build(lambda: nn.Linear(1, 1), ParallelSpec(channels_last=True), World.single("cpu"))
