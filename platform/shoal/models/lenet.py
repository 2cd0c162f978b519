"""LeNet-5 (http://yann.lecun.com/exdb/publis/pdf/lecun-98.pdf, figure 2) with today's ReLU and max-pooling.

Called by the recipe jobs/lenet.py and by benchmarks. A plain sequence of named layers, so that it can be cut anywhere.
`normalise` and `probabilities` are what endpoints do before and after it: see the recipe, and
serve_apps/image_classifier.yaml.
Legend: B images, C channels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from torch import nn

MEAN, STD = 73.0, 90.0  # of Fashion-MNIST's training images, whose pixels are 0 to 255


class LeNet(nn.Sequential):
    """Images float [B, 1, 28, 28] to logits [B, num_classes]; `narrow` divides every layer's width, for ablation.

    Pooling comes before the ReLU: max-pooling and ReLU commute, and a quarter of the elements is left to rectify.
    """

    def __init__(self, num_classes: int = 10, narrow: int = 1, dropout: float = 0.0) -> None:
        first, second, third, fourth = (width // narrow for width in (6, 16, 120, 84))
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(1, first, 5, padding=2),  # [B, C, 28, 28]
            "pool1": nn.MaxPool2d(2),
            "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(first, second, 5),  # [B, C, 10, 10]
            "pool2": nn.MaxPool2d(2),
            "relu2": nn.ReLU(),
            "flatten": nn.Flatten(),
            "linear1": nn.Linear(second * 5 * 5, third),
            "relu3": nn.ReLU(),
            "linear2": nn.Linear(third, fourth),
            "relu4": nn.ReLU(),
            "dropout": nn.Dropout(dropout),
            "output": nn.Linear(fourth, num_classes),
        }
        super().__init__(OrderedDict(layers))


def normalise(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Pixels of 0 to 255 as what the recipe trains on."""
    return {name: (images - np.float32(MEAN)) / np.float32(STD) for name, images in arrays.items()}


def probabilities(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits [B, classes] as probabilities, which add up to one for each image."""
    answers = {}
    for name, logits in arrays.items():
        powers = np.exp(logits - logits.max(1, keepdims=True))
        answers[name] = powers / powers.sum(1, keepdims=True)
    return answers
