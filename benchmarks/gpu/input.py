"""A training step fed by our Loader, beside torch's DataLoader with pinned memory: same images, model and optimizer.

Both have as many worker processes, which crop images that are in memory. The busy share is the time of the step alone,
on a batch that is on the device, over that with input.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.networks import compute_loss, make_resnet
from benchmarks.gpu.turns import Setting, Turn, describe_ratios, take_turns
from benchmarks.result import Row, compare
from shoal.data import Loader, LoaderSpec

SIDE, MARGIN = 64, 8
PREFETCH = 2


class Crops(Dataset[tuple[Tensor, int]]):
    """Random crops of images of bytes, mirrored by chance, and their classes."""

    def __init__(self, num_images: int) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (num_images, 3, SIDE + MARGIN, SIDE + MARGIN)
        self._images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        self._classes = torch.randint(0, 10, (num_images,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left, mirrors = (int(torch.randint(high, ())) for high in (MARGIN, MARGIN, 2))
        image = self._images[index, :, top : top + SIDE, left : left + SIDE]
        return image.flip(-1) if mirrors else image.clone(), self._classes[index]


class Step:
    """A step of training on a batch of bytes."""

    def __init__(self, device: torch.device, width: int) -> None:
        self._device = device
        self._model = make_resnet(width, nn.BatchNorm2d).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01, 0.9, fused=True)

    def take(self, batch: Any) -> None:
        images, classes = batch
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = compute_loss(self._model(images.float() / 255), classes)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def repeat(batches: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from batches


def move(batches: Any, device: torch.device) -> Iterator[Any]:
    """As torch's tutorial has it: from pinned memory, when it is needed."""
    for images, classes in repeat(batches):
        yield images.to(device, non_blocking=True), classes.to(device, non_blocking=True)


def measure(setting: Setting) -> Iterator[Row]:
    size, width = setting.choose(256, 4), setting.choose(64, 4)
    data, device = Crops(setting.choose(2560, 32)), setting.device
    most = max(1, min(6, len(os.sched_getaffinity(0)) // 2 - 1))
    counts = (0, 1) if setting.is_tiny else (0, most)
    for index, workers in enumerate(counts):
        step = Step(device, width)
        spec = LoaderSpec(workers=workers, prefetch=PREFETCH)
        extra: dict[str, Any] = {"prefetch_factor": PREFETCH, "persistent_workers": True} if workers else {}
        peer = DataLoader(
            data, size, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda", drop_last=True, **extra
        )
        with Loader(data, batch_size=size, spec=spec, device=device) as loader:
            feeds = {"ours": repeat(loader), "peer": move(peer, device)}
            sides: dict[str, Turn] = {name: partial(_step_once, step, feed) for name, feed in feeds.items()}
            sides["alone"] = partial(step.take, next(feeds["peer"]))
            part = setting.until(1 / (len(counts) - index))
            found = take_turns(sides, part, setting.choose(40 if workers else 8, 2))
            feeds["peer"].close()
        found_by = {name: [1e3 * size / ms for ms in taken] for name, taken in found.items()}
        shares = {
            name: sum(found["alone"]) / sum(found[name]) for name in ("ours", "peer")
        }  # of the device's time that steps take
        note = f"busy share {shares['ours']:.0%}, of the peer {shares['peer']:.0%}; "
        note += describe_ratios(found_by["ours"], found_by["peer"])
        name = f"training from crops in memory, {workers} workers, one GPU"
        yield compare(
            name, "images/s", "higher", found_by["ours"], found_by["peer"], "torch's DataLoader", 1.0, "ratio", note
        )


def _step_once(step: Step, feed: Iterator[Any]) -> None:
    step.take(next(feed))
