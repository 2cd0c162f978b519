"""Scores for thin things: intersection over union by class, skeleton recall, and total length.

Called by Tasks at evaluations, and over full pictures at the end. The share of right pixels is not among them: 97% of
a picture is background.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from shoal.libs.segmentation.photographs import IGNORED
from shoal.libs.segmentation.thinning import measure_length, thin, thin_classes


class SegmentationScore:
    """Counts over pictures or parts of them, and the scores of all together; merged over ranks like torchmetrics' own.

    `compute` has "iou" (the mean over the classes), "iou_NAME", "recall_NAME" of each class's skeleton, and
    "skeleton_recall" over all. A class that occurs neither in targets nor in predictions counts as 1.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._counts = torch.zeros(5, len(self.names), dtype=torch.float64)

    def update(self, predicted: Tensor, classes: Tensor, skeleton: Tensor) -> None:
        """Count classes as predicted and as they are, integers [..., H, W], with the skeleton of the latter, bool."""
        is_known = classes != IGNORED
        for number in range(len(self.names)):
            claimed, real = (predicted == number + 1) & is_known, classes == number + 1
            line = real & skeleton
            values = ((claimed & real).sum(), (claimed | real).sum(), (claimed & line).sum(), line.sum(), real.sum())
            self._counts[:, number] += torch.stack(values).double().cpu()

    def merge_state(self, incoming_state: Self) -> None:
        """Count what another one has counted."""
        self._counts += incoming_state._counts

    def compute(self) -> dict[str, float]:
        """The scores, by name."""
        both, either, on_line, line, _ = self._counts
        iou = torch.where(either > 0, both / either.clamp(min=1), torch.ones_like(either))
        recall = torch.where(line > 0, on_line / line.clamp(min=1), torch.ones_like(line))
        keys = [name.replace(" ", "_") for name in self.names]
        return {
            "iou": float(iou.mean()),
            **{f"iou_{key}": float(value) for key, value in zip(keys, iou, strict=True)},
            "skeleton_recall": float(on_line.sum() / line.sum().clamp(min=1)),
            **{f"recall_{key}": float(value) for key, value in zip(keys, recall, strict=True)},
        }


def measure_lengths(classes: np.ndarray, num_classes: int) -> list[float]:
    """The length in pixels of each class but the background, along its skeleton; of classes uint8 [H, W]."""
    return [measure_length(thin(classes == label)) for label in range(1, num_classes)]


def score_pictures(pairs: Iterable[tuple[np.ndarray, np.ndarray]], names: Sequence[str]) -> dict[str, float]:
    """The scores over full pictures, given as (predicted, real) classes uint8 [H, W].

    In addition to SegmentationScore: "length_r2", the squared correlation of predicted and real total lengths over the
    pictures (NaN for fewer than three, or equal lengths), and "length_ratio", predicted / real over all of them.
    """
    score, lengths = SegmentationScore(names), []
    for predicted, real in pairs:
        skeleton = thin_classes(real, len(names) + 1)
        score.update(*(torch.from_numpy(each) for each in (predicted, real, skeleton)))
        lengths.append([sum(measure_lengths(each, len(names) + 1)) for each in (predicted, real)])
    table = np.array(lengths)  # [pictures, 2]
    is_correlated = len(table) >= 3 and table.std(0).all()
    return score.compute() | {
        "length_r2": float(np.corrcoef(table.T)[0, 1] ** 2) if is_correlated else float("nan"),
        "length_ratio": float(table[:, 0].sum() / max(table[:, 1].sum(), 1.0)),
    }
