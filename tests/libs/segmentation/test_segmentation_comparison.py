"""What a comparison of found and true classes shows."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from shoal.libs.segmentation.comparison import encode_comparison


@pytest.mark.parametrize(("width", "rows"), [(300, 1), (40, 3)])
def test_a_comparison_shows_what_was_found_what_is_true_and_a_legend(width: int, rows: int) -> None:
    picture = np.full((3, 40, width), 100, np.uint8)
    found, truth = np.zeros((2, 40, width), np.uint8)
    found[10:20], truth[20:30], truth[30:] = 1, 2, 255
    names, colours = ("stem", "main root", "secondary root"), ("#000000", "#ff0000", "#00ff00", "#0000ff")
    with Image.open(io.BytesIO(encode_comparison(picture, found, truth, names, colours))) as opened:
        shown = np.asarray(opened)
    line = (shown.shape[0] - 40) // (1 + rows)
    assert shown.shape[0] == 40 + line * (1 + rows)
    left, right = shown[line : line + 40, :width], shown[line : line + 40, width + line // 2 : 2 * width + line // 2]
    grey, red, green = [100, 100, 100], [193, 40, 40], [40, 193, 40]
    assert [left[row, 0].tolist() for row in (0, 15, 25, 35)] == [grey, red, grey, grey]
    assert [right[row, 0].tolist() for row in (0, 15, 25, 35)] == [grey, grey, green, grey]
    legend = shown[line + 40 :].reshape(-1, 3)
    for colour in ([255, 0, 0], [0, 255, 0], [0, 0, 255]):
        assert (legend == colour).all(1).any()
    assert ((legend < 64).all(1)).any()  # the names
