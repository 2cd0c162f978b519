"""LeNet-5 learns Fashion-MNIST: to 90% test accuracy in a few passes, with a one-cycle learning rate.

    shoal run lenet                                         # a cluster, the job and a live picture
    shoal run lenet parallel=ddp workers=2                  # two workers share each batch
    shoal run lenet parallel=fsdp workers=2                 # ... and the parameters
    shoal run lenet parallel=tensor workers=2               # the linear layers are split
    shoal run lenet parallel=pipeline workers=2             # half of the layers each
    shoal run lenet args.dropout=0.2 optimizer.name=sgd optimizer.learning_rate=0.1
    ray job submit --working-dir . -- python jobs/lenet.py  # the same on a cluster that is up
    python -m shoal.train task=lenet                        # in this process, without Ray

The images are those of Debian's package: `apt-get install dataset-fashion-mnist`. Where it is not installed, images of
the same shapes are generated, and the run says so. They stay bytes until they are on the device. What the network takes
are normalised images: see `inputs`.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.data.formats import Idx
from shoal.libs.population.augmentation import Augmentation, erase, flip, shift
from shoal.models.lenet import MEAN, STD, LeNet, normalise
from shoal.train import Task, TrainSpec

INSTALLED = "/usr/share/datasets/fashion-mnist"


class FashionTask(Task):
    """Which of ten kinds of clothing an image shows.

    folder: where the four files of the dataset are
    narrow: divides the width of every layer
    """

    parts: ClassVar = {"width": {"narrow": 2}, "normalisation": {"normalise": False}, "dropout added": {"dropout": 0.2}}

    classes = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")

    def __init__(
        self, *, folder: str = INSTALLED, narrow: int = 1, dropout: float = 0.0, normalise: bool = True
    ) -> None:
        self.folder, self.narrow, self.dropout, self.normalise = folder, narrow, dropout, normalise

    def model(self) -> nn.Module:
        return LeNet(num_classes=10, narrow=self.narrow, dropout=self.dropout)

    def data(self) -> Data:
        if self.folder == INSTALLED and not Path(INSTALLED).is_dir():
            return Data(*stand_ins())
        train, test = (
            [Path(self.folder, f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")]
            for part in ("train", "t10k")
        )
        return Data(Idx(*train, scale=False), validation=Idx(*test, scale=False))

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Bytes [B, 28, 28] become floats [B, 1, 28, 28] here, where the batch is on the device already."""
        images = batch[0].unsqueeze(1).float()
        return ((images - MEAN) / STD if self.normalise else images,)

    def preprocess(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The same of what an endpoint is asked: pixels of 0 to 255."""
        return normalise(arrays) if self.normalise else arrays

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean()}

    def augmentations(self) -> dict[str, Augmentation]:
        """For populations: see jobs/population.py."""
        return {"shift": shift, "flip": flip, "erase": erase}


class GeneratedStandIn(TensorDataset):
    """Not Fashion-MNIST: noisy mixtures of ten patterns, in the same shapes. The class's name is in the fingerprint."""

    def __init__(self, num_images: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        patterns = np.random.default_rng(0).integers(0, 256, (10, 7, 7)).repeat(4, 1).repeat(4, 2)  # [10, 28, 28]
        labels, others = random.integers(0, 10, (2, num_images))
        images = random.integers(0, 128, (num_images, 28, 28), dtype=np.uint8)
        images += (patterns // 4).astype(np.uint8)[labels] + (patterns // 5).astype(np.uint8)[others]
        super().__init__(torch.from_numpy(images), torch.from_numpy(labels))


@cache
def stand_ins() -> tuple[GeneratedStandIn, GeneratedStandIn]:
    """For training and validation, made once in each process."""
    print(f"no Fashion-MNIST in {INSTALLED}: training on GENERATED images (apt-get install dataset-fashion-mnist)")
    return GeneratedStandIn(60_000, seed=1), GeneratedStandIn(10_000, seed=2)


def spec() -> TrainSpec:
    """The recipe: one cycle over at most five epochs, ended by the target."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "fashion",
            "parallel": {"channels_last": True},
            "batch_size": 256,
            "optimizer": {"name": "adam", "learning_rate": 1e-2},
            "schedule": {"name": "one_cycle", "warmup": 0.25},
            "stop": {"epochs": 5, "target": "accuracy>=0.9"},
            "evaluate": {"every_epochs": 0.5},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
