"""A picture for people: a photograph with the classes that a network found, the same with the true ones, and a legend.

Called by Tasks at the end of a run; the report shows the file. Legend: H and W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.errors import needs_extra
from shoal.extend.runs import to_png
from shoal.libs.segmentation.photographs import IGNORED, PALETTE

OPACITY = 0.6
DOTS_PER_INCH = 100
MIN_WIDTH_PX = 200  # of a panel, for its share of the legend


def encode_comparison(
    picture: np.ndarray, found: np.ndarray, truth: np.ndarray, names: Sequence[str], colours: Sequence[str] = PALETTE
) -> bytes:
    """A PNG of the photograph uint8 [3, H, W] with `found` over it, and right of that with `truth`, uint8 [H, W] each.

    names:   of classes 1 and on
    colours: of class 0 and on
    """
    with needs_extra("report"):
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

    height, width = found.shape
    scale = max(1.0, MIN_WIDTH_PX / width) / DOTS_PER_INCH
    figure = Figure((2.1 * scale * width, scale * height + 1), layout="constrained")
    table = np.array([to_rgb(each) for each in colours])
    for axes, title, classes in zip(figure.subplots(1, 2), ("found", "true"), (found, truth), strict=True):
        is_class = (classes > 0) & (classes != IGNORED)
        shown = picture.transpose(1, 2, 0) / 255
        shown[is_class] = (1 - OPACITY) * shown[is_class] + OPACITY * table[classes[is_class]]
        axes.imshow(shown, interpolation="none")
        axes.set_title(title)
        axes.axis("off")
    entries = [Patch(color=colour, label=name) for colour, name in zip(colours[1:], names, strict=False)]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries))
    return to_png(figure, DOTS_PER_INCH)
