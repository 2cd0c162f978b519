"""Skeletons of masks, one pixel wide, and the length of what they follow.

Called by crops, losses' targets and scores. NumPy alone.
"""

from __future__ import annotations

import numpy as np

# The eight neighbours, clockwise from the one above: P2 to P9 of the paper.
_STEPS = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


def thin(mask: np.ndarray) -> np.ndarray:
    """The skeleton of a mask, both bool [H, W]: parallel thinning by Zhang and Suen (CACM 27, 1984, section 2).

    Only the mask's own pixels are visited, so that time goes with the area of the roots and not with the picture's.
    """
    padded = np.pad(mask.astype(bool), 1)
    flat = padded.ravel()
    offsets = np.array([down * padded.shape[1] + right for down, right in _STEPS])
    pixels = np.flatnonzero(flat)
    is_thin = False
    while not is_thin:
        is_thin = True
        for pass_ in (0, 1):
            removed = pixels[_is_removable(flat[pixels[:, None] + offsets], pass_)]
            flat[removed] = False
            pixels = pixels[flat[pixels]]
            is_thin = is_thin and not len(removed)
    return padded[1:-1, 1:-1]


def _is_removable(around: np.ndarray, pass_: int) -> np.ndarray:
    """Which pixels of one pass go, by their neighbours bool [N, 8]: conditions (a) to (d) of the paper."""
    count = around.sum(1)
    rises = (~around & np.roll(around, -1, axis=1)).sum(1)  # from empty to full, clockwise
    above = around[:, 0]
    right = around[:, 2]
    below = around[:, 4]
    left_ = around[:, 6]
    if pass_ == 0:
        is_open = ~(above & right & below) & ~(right & below & left_)
    else:
        is_open = ~(above & right & left_) & ~(above & below & left_)
    removable: np.ndarray = (count >= 2) & (count <= 6) & (rises == 1) & is_open
    return removable


def measure_length(skeleton: np.ndarray) -> float:
    """The length in pixels of the lines of a skeleton, bool [H, W]: 1 between neighbours in a row or column, √2 between
    diagonal ones that no third pixel connects."""
    filled = skeleton.astype(bool)
    straight = (filled[1:] & filled[:-1]).sum() + (filled[:, 1:] & filled[:, :-1]).sum()
    falling = filled[:-1, :-1] & filled[1:, 1:] & ~filled[:-1, 1:] & ~filled[1:, :-1]
    rising = filled[:-1, 1:] & filled[1:, :-1] & ~filled[:-1, :-1] & ~filled[1:, 1:]
    return float(straight + np.sqrt(2) * (falling.sum() + rising.sum()))


def thin_classes(classes: np.ndarray, num_classes: int) -> np.ndarray:
    """The union of the skeletons of each class but the background: bool [H, W], of classes uint8 [H, W]."""
    skeleton = np.zeros(classes.shape, bool)
    for label in range(1, num_classes):
        skeleton |= thin(classes == label)
    return skeleton
