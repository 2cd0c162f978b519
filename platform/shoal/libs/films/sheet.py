"""Draws samples with label and answer, and a confusion matrix, as one picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from shoal.extend.runs import INK, MUTED, RULE

PAPER, RIGHT, WRONG = "#ffffff", "#146c2e", "#b3261e"
SHEET_WIDTH, TILE, GAP, LINE, CELLS = 900, 100, 8, 14, 360
MAX_COUNTED = 12  # classes of a matrix whose cells have their count written in


def draw_sheet(
    parts: Mapping[str, Sequence[Any]], confusion: np.ndarray | None, names: Sequence[str], title: str
) -> bytes:
    """A WebP. parts: rows of predictions by their heading; confusion: [K, K] of labels (down) and answers (across)"""
    font, height = ImageFont.load_default(11), LINE
    blocks = []
    for heading, samples in parts.items():
        shown = [each for each in samples if each.picture is not None]
        if shown:
            block = _draw_tiles(f"{heading}, {title}", shown, font)
            blocks.append(block)
            height += block.height + LINE
    if confusion is not None:
        blocks.append(_draw_matrix(confusion, names, font))
        height += blocks[-1].height
    sheet, top = Image.new("RGB", (SHEET_WIDTH, height), PAPER), GAP
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height + LINE
    written = io.BytesIO()
    sheet.save(written, "WEBP", lossless=True, quality=20, method=0)
    return written.getvalue()


def _draw_tiles(heading: str, samples: Sequence[Any], font: Any) -> Image.Image:
    ratio = samples[0].picture.shape[1] / samples[0].picture.shape[0]
    width, height = (TILE, round(TILE / ratio)) if ratio < 2 else (round(TILE * ratio), TILE)
    width = min(width, SHEET_WIDTH - 2 * GAP)
    across = max(1, (SHEET_WIDTH - GAP) // (width + GAP))
    rows = -(-len(samples) // across)
    tall = height + 2 * LINE + GAP
    block = Image.new("RGB", (SHEET_WIDTH, LINE + GAP + rows * tall), PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((GAP, 0), heading, INK, font)
    for index, each in enumerate(samples):
        left, top = GAP + index % across * (width + GAP), LINE + GAP + index // across * tall
        method = Image.Resampling.NEAREST if each.picture.shape[0] < height else Image.Resampling.BOX
        block.paste(Image.fromarray(each.picture).resize((width, height), method), (left, top))
        draw.rectangle((left, top, left + width - 1, top + height - 1), outline=RULE)
        colour = INK if each.right is None else RIGHT if each.right else WRONG
        mark = "" if each.right is None else "= " if each.right else "not "
        draw.text((left, top + height), _shorten(each.label, width, font), MUTED, font)
        draw.text((left, top + height + LINE - 2), _shorten(mark + each.answer, width, font), colour, font)
    return block


def _draw_matrix(confusion: np.ndarray, names: Sequence[str], font: Any) -> Image.Image:
    num = len(confusion)
    size = max(8, CELLS // num)
    margin = min(140, GAP + max(round(font.getlength(names[i] if i < len(names) else str(i))) for i in range(num)))
    block = Image.new("RGB", (SHEET_WIDTH, 2 * LINE + GAP + num * size), PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((GAP, 0), "Labels (down) and answers (across)", INK, font)
    shares = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    for row in range(num):
        top = 2 * LINE + row * size
        if size >= 10:
            name = names[row] if row < len(names) else str(row)
            draw.text((GAP, top + size // 2), _shorten(name, margin, font), MUTED, font, anchor="lm")
            draw.text((GAP + margin + row * size + size // 2, LINE), str(row), MUTED, font, anchor="mt")
        for column in range(num):
            left, share = GAP + margin + column * size, float(shares[row, column])
            ends = (20, 108, 46) if row == column else (179, 38, 30)
            colour = tuple(round(255 - share**0.5 * (255 - each)) for each in ends)
            draw.rectangle((left, top, left + size - 1, top + size - 1), colour, RULE)
            if num <= MAX_COUNTED and confusion[row, column]:
                ink = PAPER if share > 0.4 else INK
                draw.text((left + size // 2, top + size // 2), str(confusion[row, column]), ink, font, anchor="mm")
    return block


def _shorten(text: str, width: int, font: Any) -> str:
    while text and font.getlength(text) > width:
        text = text[:-1]
    return text
