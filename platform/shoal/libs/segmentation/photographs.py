"""Photographs with masks, read from a folder of the user's: any size, classes as numbers or colours.

    FOLDER/images/NAME.jpg and FOLDER/masks/NAME.png       of the same size, also tif, bmp or webp
    FOLDER/plants.csv                                      optional, with the columns name and plant

Called by Tasks. Owns the border: everything that may be wrong with such a folder is a DataError that names the file.
Legend: H and W pixels.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.errors import ConfigError, DataError, needs_extra

with needs_extra("data"):
    from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

_log = logging.getLogger(__name__)
IGNORED = 255  # the class of pixels that nothing is known of
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
LOSSY = ("JPEG", "WEBP", "MPO")
PALETTE = ("#000000", "#33bb55", "#ee4433", "#ffcc33", "#44aaff", "#cc66ff", "#ff8800", "#00cccc")  # class 0 and on


@dataclass(frozen=True, slots=True)
class Photograph:
    """picture: uint8 [3, H, W]; classes: uint8 [H, W], 0 is background; plant: the plant that it shows."""

    name: str
    plant: str
    picture: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True, slots=True)
class MaskFormat:
    """What a mask's pixels mean.

    classes: the names of classes 1 and on
    colours: of class 0 and on, for masks that are coloured
    region:  left, top, right, bottom as shares of the picture: only that is read; None: everything
    shrink:  by how much both sides are divided. A pixel then has the highest class within it, so that thin roots (the
             last class) are never lost
    """

    classes: tuple[str, ...]
    colours: tuple[str, ...] = PALETTE
    region: tuple[float, float, float, float] | None = None
    shrink: int = 1

    def __post_init__(self) -> None:
        if len(self.colours) <= len(self.classes):
            remedy = "give one for the background, and one for each class"
            raise ConfigError("colours", list(self.colours), f"are fewer than {len(self.classes)} + 1", remedy)
        if self.shrink < 1:
            raise ConfigError("shrink", self.shrink, "divides by less than one", "give 1 for photographs as they are")
        if self.region is not None:
            left, top, right, bottom = self.region
            if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
                remedy = "give left, top, right, bottom as shares of the picture: [0.1, 0, 0.9, 1]"
                raise ConfigError("region", list(self.region), "is no region", remedy)


def read_folder(folder: Path, kind: MaskFormat) -> list[Photograph]:
    """Every photograph of the folder, by name. Raises DataError naming the file."""
    images, masks = _list_pictures(folder / "images"), _list_pictures(folder / "masks")
    plants = _read_plants(folder / "plants.csv", set(images))
    photographs = []
    for name, path in images.items():
        if name not in masks:
            raise DataError("folder", str(path), f"has no mask in {folder / 'masks'}", f"add {name}.png, or remove it")
        picture = decode_picture(path.read_bytes(), str(path))
        classes = _read_mask(masks[name], kind)
        if classes.shape != (size := picture.shape[1:]):
            sizes = [f"{width} x {height}" for height, width in (classes.shape, size)]
            problem = f"is of {sizes[0]} pixels, and {path.name} of {sizes[1]}"
            remedy = "save it in the photograph's size"
            if classes.shape == size[::-1]:
                remedy = "the photograph is turned as its EXIF orientation says: turn the mask the same way"
            raise DataError("mask", str(masks[name]), problem, remedy)
        fitted, shown = _fit(picture, classes, kind)
        if not shown.size:
            problem = f"has {picture.shape[2]} x {picture.shape[1]} pixels, of which shrink = {kind.shrink} leaves none"
            raise DataError("picture", str(path), problem, "shrink less, or give a larger region")
        photographs.append(Photograph(name, plants[name], fitted, shown))
    return photographs


def decode_picture(content: bytes, name: str) -> np.ndarray:
    """The picture as uint8 [3, H, W], turned as its EXIF orientation says. Raises DataError for `name`."""
    with _open("picture", io.BytesIO(content), name) as opened:
        picture: Image.Image = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):  # Pillow's own conversion would make it white
            picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        picture = picture.convert("RGB")
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def encode_mask(classes: np.ndarray, colours: Sequence[str] = PALETTE) -> bytes:
    """Classes uint8 [H, W] as a PNG with a palette: its pixels are the classes, and viewers show the colours."""
    paletted = Image.frombytes("P", classes.shape[::-1], classes.tobytes())
    paletted.putpalette([value for colour in colours for value in _parse_colour(colour)])
    written = io.BytesIO()
    paletted.save(written, "PNG", optimize=True)
    return written.getvalue()


def _list_pictures(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        remedy = "a folder of photographs has images/NAME.jpg and masks/NAME.png"
        raise DataError("folder", str(folder), "is no folder", remedy)
    pictures = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES}
    if not pictures:
        raise DataError("folder", str(folder), "has no pictures", f"they end in {', '.join(SUFFIXES)}")
    return pictures


def _read_plants(path: Path, names: set[str]) -> dict[str, str]:
    """The plant of each photograph: of plants.csv, or its name before the last underscore."""
    if not path.is_file():
        return {name: name.rpartition("_")[0] or name for name in names}
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if not {"name", "plant"} <= set(rows.fieldnames or ()):
            raise DataError("plants", str(path), "has no columns 'name' and 'plant'", "write them as its first line")
        plants = {Path(row["name"]).stem: row["plant"] for row in rows}
    if missing := sorted(names - plants.keys()):
        raise DataError("plants", str(path), f"has no row for {missing[0]}", "add one, or remove the file")
    return plants


def _read_mask(path: Path, kind: MaskFormat) -> np.ndarray:
    """The classes of a mask, uint8 [H, W]. Raises DataError for a value that is no class."""
    with _open("mask", path, str(path)) as opened:
        opened.load()
        has_colours = opened.mode in ("RGB", "RGBA")
        values = np.asarray(ImageOps.exif_transpose(opened.convert("RGB") if has_colours else opened))
    if has_colours and (values == values[..., :1]).all() and values.max() <= len(kind.classes):
        values, has_colours = values[..., 0], False  # numbers, saved in three equal channels
    if values.ndim > 2 and not has_colours:
        raise DataError("mask", str(path), f"is of the mode {opened.mode}", "save it as PNG: grey, palette or RGB")
    if opened.format in LOSSY:
        return _threshold(values, path, kind)
    return _match_colours(values, path, kind) if has_colours else _match_numbers(values, path, kind)


@contextmanager
def _open(kind: str, file: Path | io.BytesIO, name: str) -> Iterator[Image.Image]:
    """A picture, for as long as it is decoded. Raises DataError."""
    try:
        with Image.open(file) as opened:
            yield opened
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "its format is unknown" if isinstance(error, UnidentifiedImageError) else str(error)
        raise DataError(kind, name, f"is no picture, or a damaged one ({reason})", "remove it") from error


def _match_numbers(values: np.ndarray, path: Path, kind: MaskFormat) -> np.ndarray:
    numbers = np.unique(values)
    if len(kind.classes) == 1 and set(numbers.tolist()) <= {0, 255}:
        return (values > 0).astype(np.uint8)
    unknown = [value for value in numbers.tolist() if value > len(kind.classes) and value != IGNORED]
    if unknown:
        problem = f"has the value {unknown[0]} in {(values == unknown[0]).sum():,} pixels"
        known = ", ".join(f"{number} {name}" for number, name in enumerate(("background", *kind.classes)))
        raise DataError("mask", str(path), problem, f"the classes are {known}; {IGNORED} is left out")
    return values.astype(np.uint8)


def _match_colours(values: np.ndarray, path: Path, kind: MaskFormat) -> np.ndarray:
    table = _colour_table(kind)
    classes = np.full(values.shape[:2], IGNORED, np.uint8)
    is_unknown = np.ones(values.shape[:2], bool)
    for label, colour in enumerate(table):
        is_colour = (values == colour).all(-1)
        classes[is_colour] = label
        is_unknown &= ~is_colour
    if is_unknown.any():
        colour = "#" + bytes(values[is_unknown][0].tolist()).hex()
        named = ", ".join(kind.colours[: len(table)])
        remedy = f"the classes' colours are {named}: give others as args.colours"
        raise DataError("mask", str(path), f"has the colour {colour} in {is_unknown.sum():,} pixels", remedy)
    return classes


def _threshold(values: np.ndarray, path: Path, kind: MaskFormat) -> np.ndarray:
    """The nearest class of each pixel of a mask whose compression has changed its values."""
    _log.warning(
        "mask %s: compression has changed its values; each pixel gets the nearest class. Save masks as PNG", path
    )
    grey = np.linspace(0, 255, len(kind.classes) + 1, dtype=np.float32)[:, None]
    levels = _colour_table(kind) if values.ndim == 3 else grey
    pixels = values.astype(np.float32).reshape(*values.shape[:2], -1)
    classes: np.ndarray = np.stack([((pixels - level) ** 2).sum(-1) for level in levels]).argmin(0).astype(np.uint8)
    return classes


def _fit(picture: np.ndarray, classes: np.ndarray, kind: MaskFormat) -> tuple[np.ndarray, np.ndarray]:
    """The region, in the size asked for."""
    if kind.region is not None:
        rows, columns = find_region(kind.region, *classes.shape)
        picture, classes = picture[:, rows, columns], classes[rows, columns]
    if (step := kind.shrink) > 1:
        height, width = (size // step * step for size in classes.shape)
        classes = classes[:height, :width].reshape(height // step, step, width // step, step).max((1, 3))
        picture = shrink_picture(picture, step)
    return np.ascontiguousarray(picture), np.ascontiguousarray(classes)


def shrink_picture(picture: np.ndarray, step: int) -> np.ndarray:
    """Means of step x step pixels: uint8 [3, H, W] to [3, H // step, W // step]."""
    height, width = (size // step for size in picture.shape[1:])
    blocks = picture[:, : height * step, : width * step].reshape(3, height, step, width, step)
    means: np.ndarray = blocks.mean((2, 4)).round().astype(np.uint8)
    return means


def find_region(region: Sequence[float], height: int, width: int) -> tuple[slice, slice]:
    """The rows and columns of a region that is given as shares; at least one of each."""
    left, top, right, bottom = region
    first_row, first_column = min(int(top * height), height - 1), min(int(left * width), width - 1)
    rows = slice(first_row, max(round(bottom * height), first_row + 1))
    return rows, slice(first_column, max(round(right * width), first_column + 1))


def _colour_table(kind: MaskFormat) -> np.ndarray:
    return np.array([_parse_colour(colour) for colour in kind.colours[: len(kind.classes) + 1]], np.float32)


def _parse_colour(colour: str) -> tuple[int, ...]:
    try:
        return ImageColor.getrgb(colour)[:3]
    except ValueError:
        raise ConfigError("colours", colour, "is no colour", "write it as '#33bb55'") from None


def split_by_plant(
    photographs: Sequence[Photograph], share: float, seed: int
) -> tuple[list[Photograph], list[Photograph]]:
    """Training and held-back photographs; no plant is in both. At least one plant is held back.

    Raises DataError for a single plant.
    """
    plants = sorted({each.plant for each in photographs})
    if len(plants) < 2:
        problem = f"all {len(photographs)} photographs are of the plant {plants[0]!r}: none can be held back"
        remedy = "name files PLANT_NUMBER.jpg, or write plants.csv; two plants are the least"
        raise DataError("folder", plants[0], problem, remedy)
    count = min(max(round(share * len(plants)), 1), len(plants) - 1)
    chosen = {plants[index] for index in np.random.default_rng(seed).permutation(len(plants))[:count]}
    train = [each for each in photographs if each.plant not in chosen]
    return train, [each for each in photographs if each.plant in chosen]


def require_classes(photographs: Sequence[Photograph], kind: MaskFormat) -> None:
    """Require that the photographs show every class. Raises DataError naming the one that is missing."""
    present = np.zeros(256, bool)
    for each in photographs:
        present[np.unique(each.classes)] = True
    for label, name in enumerate(kind.classes, 1):
        if not present[label]:
            problem = f"is in none of the {len(photographs)} masks for training: {photographs[0].name} and on"
            raise DataError("class", name, problem, "annotate it, try another args.split, or drop the class")
