"""What a network predicts of the same validation samples, evaluation by evaluation: a sheet for people.

Called by the first rank of a training run with `evaluate.samples`, which sees its own share of the validation data. It
knows four forms of outputs and targets: classes, those of pixels, those of tokens, and numbers. Others give no sheet.
Legend: B samples, K classes, H, W pixels, T tokens.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shoal.atomic_file import make_folder, replace_synced
from shoal.errors import needs_extra
from shoal.extend.runs import COLOURS, INK, MUTED, RULE
from shoal.libs.films.film_file import thin_out

with needs_extra("films"):
    from PIL import Image, ImageDraw, ImageFont


MAX_CLASSES = 40  # of a confusion matrix
MAX_NUMBERS = 8  # of a row that is shown
MAX_LETTERS = 200
MAX_SHEETS = 60  # of a run; then every second one is deleted
_log = logging.getLogger(__name__)
PAPER = "#ffffff"
RIGHT = "#146c2e"
WRONG = "#b3261e"
SHEET_WIDTH = 900
TILE = 100
GAP = 8
LINE = 14
CELLS = 360
MAX_COUNTED = 12  # classes of a matrix whose cells have their count written in


@dataclass
class SamplePrediction:
    """A prediction. right: whether it is the label, where that is a question; picture: uint8 [H, W, 3]"""

    shown: str
    label: str
    answer: str
    loss: float
    right: bool | None = None
    picture: np.ndarray | None = None


@dataclass
class _Batch:
    """As it is understood. losses: [B]; classes: int [B] of labels and of answers, where there is one each"""

    scores: Tensor
    targets: Tensor
    losses: Tensor
    inputs: Tensor | None
    kind: str
    classes: tuple[Tensor, Tensor] | None = None


@dataclass
class SampleSheet:
    """The first `count` samples, the `count` with the largest loss, and the confusion matrix, of each evaluation.

    folder: of the run; names: of the classes, from `Task.classes`
    """

    count: int
    folder: Path
    task: Any
    _fixed: list[SamplePrediction] = field(default_factory=list)
    _worst: list[SamplePrediction] = field(default_factory=list)
    _confusion: np.ndarray | None = None  # [K, K], of labels and answers
    _is_unknown: bool = False

    def observe(self, outputs: Any, batch: Any) -> None:
        """Take a batch of an evaluation, on the CPU."""
        if (read := _read_batch(outputs, batch)) is None:
            if not self._is_unknown:
                self._is_unknown = True
                _log.warning("evaluate.samples: these outputs and targets are of no form that a sheet can show")
            return
        for index in range(min(len(read.losses), self.count - len(self._fixed))):
            self._fixed.append(self._describe(read, index))
        least = self._worst[-1].loss if len(self._worst) == self.count else -1.0
        losses, order = read.losses.topk(min(self.count, len(read.losses)))
        found = [self._describe(read, int(i)) for loss, i in zip(losses.tolist(), order, strict=True) if loss > least]
        self._worst = sorted([*self._worst, *found], key=lambda each: -each.loss)[: self.count]
        if read.classes is not None and (num := read.scores.shape[1]) <= MAX_CLASSES:
            counts = functional.one_hot(read.classes[0], num).T @ functional.one_hot(read.classes[1], num)
            self._confusion = counts.numpy() + (0 if self._confusion is None else self._confusion)

    def write(self, step: int, epoch: float) -> None:
        """The sheet of an evaluation as `samples/eEPOCH-sSTEP.webp` and `.json`; begins the next one."""
        fixed = self._fixed
        worst = self._worst
        confusion = self._confusion
        self._fixed = []
        self._worst = []
        self._confusion = None
        if not fixed:
            return
        folder, names = self.folder / "samples", [str(each) for each in getattr(self.task, "classes", ())]
        make_folder(folder)
        path = folder / f"e{epoch:08.2f}-s{step:09d}.json"
        rows = [[{**asdict(each), "picture": None} for each in part] for part in (fixed, worst)]
        table = None if confusion is None else confusion.tolist()
        sheet = {"epoch": epoch, "step": step, "fixed": rows[0], "worst": rows[1], "confusion": table, "classes": names}
        if confusion is not None or fixed[0].picture is not None:
            parts = {"The same samples": fixed, "The largest errors": worst}
            drawn = draw_sheet(parts, confusion, names, f"epoch {epoch:g}, step {step:,}")
            replace_synced(path.with_suffix(".webp"), drawn)
        replace_synced(path, msgspec.json.encode(sheet))
        thin_out(sorted(folder.glob("e*.json")), MAX_SHEETS)

    def _describe(self, batch: _Batch, index: int) -> SamplePrediction:
        scores, target = batch.scores[index], batch.targets[index]
        row = None if batch.inputs is None else batch.inputs[index].numpy()
        picture, loss = None if row is None else to_picture(row), float(batch.losses[index])
        shown = "" if row is None or picture is not None else self._describe_input(row)
        match batch.kind:
            case "classes":
                best, wanted_class = int(scores.argmax()), int(target)
                answer = f"{self._name(best)}, {float(scores.softmax(0)[best]):.0%}"
                return SamplePrediction(shown, self._name(wanted_class), answer, loss, best == wanted_class, picture)
            case "pixels":
                found = scores.argmax(0)
                is_known = target >= 0
                share = float((found == target)[is_known].float().mean()) if bool(is_known.any()) else 1.0
                overlays = None if picture is None else lay_over(picture, found.numpy(), target.numpy())
                answer, label = f"{share:.1%} of the pixels", f"{len(target.unique())} classes"
                return SamplePrediction("", label, answer, loss, None, overlays)
            case "tokens":
                is_asked, found = target >= 0, scores.argmax(-1)
                wanted, given = (self._decode(each[is_asked]) for each in (target, found))
                return SamplePrediction(shown, wanted, given, loss)
        wanted, given = (_format_numbers(each.numpy().ravel()) for each in (target, scores))
        return SamplePrediction(shown, wanted, given, loss, None, picture)

    def _describe_input(self, row: np.ndarray) -> str:
        if row.ndim == 1 and row.dtype.kind in "iu" and hasattr(self.task, "decode_tokens"):
            return self._decode(torch.from_numpy(row))
        return _format_numbers(row.ravel()) if row.size <= MAX_NUMBERS else ""

    def _name(self, number: int) -> str:
        classes: Sequence[Any] = getattr(self.task, "classes", ())
        return str(classes[number]) if 0 <= number < len(classes) else str(number)

    def _decode(self, tokens: Tensor) -> str:
        """By the Task's `decode_tokens`, where it has one."""
        decode = getattr(self.task, "decode_tokens", None)
        return str(decode(tokens.tolist()) if decode else tokens.tolist())[:MAX_LETTERS]


def _read_batch(outputs: Any, batch: Any) -> _Batch | None:
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", next(iter(outputs.values()), None))
    elif isinstance(outputs, tuple | list):
        outputs = outputs[0] if outputs else None
    found = getattr(outputs, "logits", outputs)
    scores = found if isinstance(found, Tensor) and found.ndim else None
    targets, inputs = _find_targets(batch)
    if scores is None or targets is None or not targets.ndim or not len(targets) or len(scores) != len(targets):
        return None
    inputs = inputs if inputs is not None and inputs.ndim and len(inputs) == len(targets) else None
    scores = scores.detach().float()
    is_counted = not targets.dtype.is_floating_point
    if is_counted and scores.ndim == 3 and targets.ndim == 2 and scores.shape[:2] == targets.shape:
        if isinstance(batch, Mapping) and "labels" in batch:  # as Hugging Face has it: of the tokens themselves
            scores, targets = scores[:, :-1], targets[:, 1:]
        losses = functional.cross_entropy(scores.mT, targets.long(), reduction="none", ignore_index=-100)
        return _Batch(scores, targets, losses.sum(1) / (targets != -100).sum(1).clamp(min=1), inputs, "tokens")
    if is_counted and scores.ndim == targets.ndim + 1 and scores.ndim in (2, 4) and scores.shape[1] > 1:
        targets = targets.long()
        targets = targets.where((targets >= 0) & (targets < scores.shape[1]), -100)
        losses = functional.cross_entropy(scores, targets, reduction="none", ignore_index=-100)
        if scores.ndim == 4:
            return _Batch(scores, targets, losses.flatten(1).mean(1), inputs, "pixels")
        known = targets >= 0
        return _Batch(scores, targets, losses, inputs, "classes", (targets[known], scores.argmax(1)[known]))
    rows, wanted = scores.flatten(1) if scores.ndim > 1 else scores[:, None], targets.float().reshape(len(targets), -1)
    if rows.shape != wanted.shape or rows.shape[1] > MAX_NUMBERS:
        return None
    return _Batch(rows, wanted, (rows - wanted).square().mean(1), inputs, "numbers")


def _find_targets(batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """The targets, and what is shown of the inputs."""
    if isinstance(batch, Mapping):
        name = next((each for each in ("targets", "labels", "target", "label") if each in batch), "")
        inputs = next((each for key, each in batch.items() if key != name and isinstance(each, Tensor)), None)
        return batch.get(name), inputs
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], Tensor):
        return batch[-1], next((each for each in batch[:-1] if isinstance(each, Tensor)), None)
    return None, None


def to_picture(row: np.ndarray) -> np.ndarray | None:
    """uint8 [H, W, 3] of one input that is a picture: [H, W], [C, H, W] or [H, W, C], from its least to its most."""
    if row.ndim == 2:
        row = row[..., None]
    if row.ndim != 3:
        return None
    if row.shape[0] in (1, 3) and row.shape[-1] not in (1, 3):
        row = np.moveaxis(row, 0, -1)
    if row.shape[-1] not in (1, 3) or min(row.shape[:2]) < 8:
        return None
    row = np.nan_to_num(row.astype(np.float32))
    low, high = (0.0, 255.0) if row.max() > 1 and row.min() >= 0 else (float(row.min()), float(row.max()))
    scaled = np.clip((row - low) * (255 / ((high - low) or 1.0)), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(scaled, (*scaled.shape[:2], 3)))


def lay_over(picture: np.ndarray, *found: np.ndarray) -> np.ndarray:
    """The picture, and right of it the picture under each of some maps of classes [H, W], of which 0 is not drawn."""
    palette = np.array([[int(each[i : i + 2], 16) for i in (1, 3, 5)] for each in COLOURS])
    parts = [picture]
    for classes in found:
        part = picture.astype(np.float32)
        if classes.shape != part.shape[:2]:
            resized = Image.fromarray(classes.astype(np.int32)).resize(part.shape[1::-1], Image.Resampling.NEAREST)
            classes = np.asarray(resized)
        part[classes > 0] = 0.4 * part[classes > 0] + 0.6 * palette[(classes[classes > 0] - 1) % len(palette)]
        parts.append(part.astype(np.uint8))
    return np.concatenate(parts, 1)


def _format_numbers(row: np.ndarray) -> str:
    return ", ".join(f"{float(each):.4g}" for each in row[:MAX_NUMBERS])


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
