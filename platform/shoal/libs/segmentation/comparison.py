"""A picture for people: a photograph with the classes that a network found, the same with the true ones, and a legend.

Called by Tasks at the end of a run; the report shows the file. Legend: H and W pixels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from shoal.errors import needs_extra
from shoal.libs.segmentation.photographs import IGNORED, PALETTE

with needs_extra("data"):
    from PIL import Image, ImageColor, ImageDraw, ImageFont

OPACITY = 0.6
PAPER, INK = "white", "#111827"
MIN_FONT_PX, FONT_SHARE = 12, 1 / 30  # of a photograph's height


def encode_comparison(
    picture: np.ndarray, found: np.ndarray, truth: np.ndarray, names: Sequence[str], colours: Sequence[str] = PALETTE
) -> bytes:
    """A PNG of the photograph uint8 [3, H, W] with `found` over it, and right of that with `truth`, uint8 [H, W] each.

    names:   of classes 1 and on
    colours: of class 0 and on
    """
    height, width = found.shape
    size_px = max(MIN_FONT_PX, round(FONT_SHARE * height))
    font, line = ImageFont.load_default(size_px), round(1.6 * size_px)
    legend = [(colours[number], name, line + round(font.getlength(name))) for number, name in enumerate(names, start=1)]
    right = width + line // 2  # where the second panel begins
    canvas_width = max([right + width, *(size for *_, size in legend)])
    rows = _wrap([size for *_, size in legend], canvas_width, line)
    canvas = Image.new("RGB", (canvas_width, line + height + line * len(rows)), PAPER)
    draw = ImageDraw.Draw(canvas)
    table = np.array([ImageColor.getrgb(colour)[:3] for colour in colours], np.float32)
    for start, title, classes in ((0, "found", found), (right, "true", truth)):
        draw.text((start, line // 2), title, INK, font, "lm")
        is_class = (classes > 0) & (classes != IGNORED)
        shown = picture.transpose(1, 2, 0).astype(np.float32)
        shown[is_class] = (1 - OPACITY) * shown[is_class] + OPACITY * table[classes[is_class]]
        canvas.paste(Image.fromarray(shown.round().astype(np.uint8)), (start, line))
    entries = iter(legend)
    for number, starts in enumerate(rows):
        middle = line + height + line * number + line // 2
        for start, (colour, name, _) in zip(starts, entries, strict=False):
            draw.rectangle((start, middle - size_px // 2, start + size_px, middle + size_px // 2), colour)
            draw.text((start + line, middle), name, INK, font, "lm")
    written = io.BytesIO()
    canvas.save(written, "PNG", optimize=True)
    return written.getvalue()


def _wrap(sizes: Sequence[int], width: int, gap: int) -> list[list[int]]:
    """Where each entry of a legend begins, row by row."""
    rows: list[list[int]] = []
    end = width
    for size in sizes:
        if not rows or end + size > width:
            rows.append([])
            end = 0
        rows[-1].append(end)
        end += size + gap
    return rows
