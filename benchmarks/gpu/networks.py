"""Networks of the sections `ddp`, `fsdp` and `input`, and batches for them. On a CPU tiny ones of the same kinds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from shoal.models.decoder import Decoder
from shoal.models.lenet import LeNet

NAMES = ("lenet", "resnet", "decoder")
TITLES = {"lenet": "LeNet", "resnet": "residual network on 32 x 32", "decoder": "decoder of 29 M"}
NUM_CLASSES = 10


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, normalised, added to what came in (arXiv:1512.03385)."""

    def __init__(self, num_inputs: int, num_channels: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_channels, 3, stride, 1, bias=False)
        self.norm1 = norm(num_channels)
        self.conv2 = nn.Conv2d(num_channels, num_channels, 3, 1, 1, bias=False)
        self.norm2 = norm(num_channels)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or num_inputs != num_channels:
            self.skip = nn.Conv2d(num_inputs, num_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def make_resnet(width: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Eight blocks in four stages, as ResNet-18 has them, with a first layer for images of 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    before = width
    for stage in range(4):
        channels = width << stage
        layers += [
            ResidualBlock(before, channels, 2 if stage else 1, norm),
            ResidualBlock(channels, channels, 1, norm),
        ]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, NUM_CLASSES))


def make_network(name: str, *, is_tiny: bool, has_batch_norm: bool = False) -> nn.Module:
    """Always of the same weights. Without batch norm the residual network has group norm, equal in every plan."""
    torch.manual_seed(0)
    if name == "lenet":
        return LeNet()
    if name == "resnet":
        return make_resnet(4 if is_tiny else 64, nn.BatchNorm2d if has_batch_norm else _make_group_norm)
    if is_tiny:
        return Decoder(64, 16, 32, 2, 2)
    return Decoder(num_tokens=4096, context=256, width=512, depth=8, heads=8)


def _make_group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def choose_batch_size(name: str, *, is_tiny: bool) -> int:
    """Samples of a step."""
    return 4 if is_tiny else {"lenet": 128, "resnet": 128, "decoder": 16}[name]


def make_dataset(name: str, *, is_tiny: bool) -> tuple[Tensor, Tensor]:
    """Images and their classes, or tokens and the next ones: sixteen batches."""
    generator = torch.Generator().manual_seed(1)
    num_samples = 16 * choose_batch_size(name, is_tiny=is_tiny)
    if name == "decoder":
        tokens = torch.randint(64, (num_samples, 17 if is_tiny else 257), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (1, 28, 28) if name == "lenet" else (3, 32, 32)
    images = torch.randn(num_samples, *shape, generator=generator)
    return images, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, of images or of tokens."""
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
