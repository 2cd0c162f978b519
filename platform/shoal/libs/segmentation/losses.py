"""Losses for thin things: cross-entropy, soft Dice and the recall of skeletons.

Called by Tasks. Each is the mean over the samples of a batch, so that a batch may be split; within a sample, over the
pixels or classes that it has. Pixels of the class IGNORED count nowhere.
Legend: B samples, C classes with the background as 0, H and W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shoal.libs.segmentation.photographs import IGNORED


def compute_loss(logits: Tensor, classes: Tensor, skeleton: Tensor, dice: float = 1.0, recall: float = 1.0) -> Tensor:
    """The scalar loss: cross-entropy + `dice` * (1 - soft Dice) + `recall` * (1 - skeleton recall).

    logits: float [B, C, H, W]; classes: integers [B, H, W]; skeleton: bool [B, H, W], one pixel wide
    """
    log_probabilities = logits.float().log_softmax(1)
    loss = cross_entropy(log_probabilities, classes)
    if dice or recall:
        probabilities = log_probabilities.exp()
        if dice:
            loss = loss + dice * (1 - soft_dice(probabilities, classes))
        if recall:
            loss = loss + recall * (1 - soft_skeleton_recall(probabilities, classes, skeleton))
    return loss


def cross_entropy(log_probabilities: Tensor, classes: Tensor) -> Tensor:
    """The mean over the pixels of each sample, of log-probabilities [B, C, H, W]; then over the samples."""
    losses = functional.nll_loss(log_probabilities, classes.long(), reduction="none", ignore_index=IGNORED)
    counts = (classes != IGNORED).flatten(1).sum(1).clamp(min=1)
    return (losses.flatten(1).sum(1) / counts).mean()


def soft_dice(probabilities: Tensor, classes: Tensor) -> Tensor:
    """2 |P ∩ T| / (|P| + |T|) (arXiv:1606.04797), the mean over the classes in each sample, without the background.

    A sample without any counts as 1: what is falsely found there is left to the cross-entropy.
    """
    is_known = classes != IGNORED
    target = _one_hot(classes, probabilities)
    predicted = probabilities[:, 1:] * is_known.unsqueeze(1)
    overlap = (predicted * target).sum((2, 3))
    size = target.sum((2, 3))
    return _mean_where(2 * overlap / (predicted.sum((2, 3)) + size).clamp(min=1e-6), size > 0)


def soft_skeleton_recall(probabilities: Tensor, classes: Tensor, skeleton: Tensor) -> Tensor:
    """The share of the targets' skeletons, three pixels wide, that is found (arXiv:2404.03010, section 3.2).

    A root of one pixel's width so counts as much as a thick one of the same length. Mean over the classes and samples
    as in `soft_dice`.
    """
    tube = functional.max_pool2d(skeleton.float().unsqueeze(1), 3, 1, 1)
    target = _one_hot(classes, probabilities) * tube
    length = target.sum((2, 3))
    return _mean_where((probabilities[:, 1:] * target).sum((2, 3)) / length.clamp(min=1), length > 0)


def _one_hot(classes: Tensor, like: Tensor) -> Tensor:
    """[B, C - 1, H, W]: 1 where a pixel is of the class, without the background."""
    labels = torch.arange(1, like.shape[1], device=classes.device, dtype=classes.dtype)
    return (classes.unsqueeze(1) == labels[:, None, None]).to(like.dtype)


def _mean_where(values: Tensor, exists: Tensor) -> Tensor:
    """The mean over the existing values [B, C - 1] of each sample, 1 if there are none; then over the samples."""
    counts = exists.sum(1)
    means = (values * exists).sum(1) / counts.clamp(min=1)
    return torch.where(counts > 0, means, torch.ones_like(means)).mean()
