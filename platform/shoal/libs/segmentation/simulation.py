"""Simulated root systems and photographs of them: what a network learns from before it sees a user's pictures.

A plant is grown once: a stem upwards, a main root downwards, secondary roots from it that bend towards gravity, some
with a third order. Each photograph shows it from a slightly different position, on a texture, with shadow, uneven
light, fibres that are no roots, blur and noise. Everything follows from the seed.
Legend: H and W pixels; lengths of a plant are shares of the picture's height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.errors import needs_extra
from shoal.libs.segmentation.photographs import Photograph
from shoal.yaml_text import parse_yaml

with needs_extra("data"):
    from PIL import Image, ImageDraw, ImageFilter

CLASSES = ("stem", "main root", "secondary root")
STEM = 1
MAIN = 2
SECONDARY = 3
DOWN = np.pi / 2  # the angle of gravity: y grows downwards
STEP = 0.01  # of a root that grows
OVERSAMPLING = 3

Random = np.random.Generator
Size = tuple[int, int]  # of a picture: height and width
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Style:
    """The ranges from which a plant and its photographs are drawn: those of `styles.yaml`.

    textures: of the background: "soil", "pebbles", "cloth"
    contrast: by how much roots are lighter than the background, of 255
    fibres:   the number of lines that are no roots
    """

    textures: tuple[str, ...]
    num_secondary: tuple[int, int]
    secondary_length: Range
    main_radius: Range
    secondary_radius: Range
    wander: Range
    contrast: Range
    background: Range
    fibres: tuple[int, int]
    shadow: Range
    blur: Range
    noise: Range


_STYLES = parse_yaml(Path(__file__).with_name("styles.yaml").read_text())
STYLES = {name: Style(**ranges) for name, ranges in _STYLES.items()}


@dataclass(frozen=True, slots=True)
class Organ:
    """A line with a width. points: [N, 2], right and down; radii: [N]."""

    label: int
    points: np.ndarray
    radii: np.ndarray


def simulate(num_plants: int, per_plant: int, style: Style, size: Size = (256, 192), seed: int = 0) -> list[Photograph]:
    """`per_plant` photographs of each plant, uint8 of size (H, W), named pN_M."""
    photographs = []
    for plant in range(num_plants):
        organs = grow(np.random.default_rng([seed, plant]), style)
        for number in range(per_plant):
            picture, classes = photograph(organs, np.random.default_rng([seed, plant, number + 1]), style, size)
            photographs.append(Photograph(f"p{plant:03}_{number}", f"p{plant:03}", picture, classes))
    return photographs


def grow(random: Random, style: Style) -> list[Organ]:
    """The organs of a plant whose collar is at (0, 0): the last are drawn over the first."""
    wander = random.uniform(*style.wander)
    main_radius, fine_radius = random.uniform(*style.main_radius), random.uniform(*style.secondary_radius)
    main = _grow_line(random, np.zeros(2), DOWN, random.uniform(0.5, 0.68), wander, 0.15)
    stem = _grow_line(random, np.zeros(2), -DOWN, random.uniform(0.15, 0.28), wander / 2, 0.0)
    roots: list[Organ] = []
    for _ in range(random.integers(style.num_secondary[0], style.num_secondary[1] + 1)):
        share = random.uniform(0.04, 0.85)
        side = random.choice((-1, 1))
        angle = DOWN + side * random.uniform(0.7, 1.4)
        length = random.uniform(*style.secondary_length) * (1.1 - share)
        line = _grow_line(random, main[int(share * (len(main) - 1))], angle, length, wander, 0.04)
        roots.append(Organ(SECONDARY, line, np.linspace(1, 0.6, len(line)) * fine_radius * random.uniform(0.7, 1.2)))
        if random.random() < 0.3 and len(line) > 8:
            start = line[random.integers(3, len(line) - 3)]
            third = _grow_line(random, start, angle - side * 0.8, length / 3, wander, 0.02)
            roots.append(Organ(SECONDARY, third, np.full(len(third), 0.6 * fine_radius)))
    taper = np.linspace(1, 0.35, len(main)) * main_radius
    return [*roots, Organ(MAIN, main, taper), Organ(STEM, stem, np.full(len(stem), 1.15 * main_radius))]


def _grow_line(
    random: Random, start: np.ndarray, angle: float, length: float, wander: float, gravity: float
) -> np.ndarray:
    """Points [N, 2] at equal distances: the direction is a random walk that gravity draws downwards."""
    count = max(int(length / STEP), 2)
    angles = np.empty(count)
    for number, change in enumerate(random.normal(0, wander, count)):
        angle += change + gravity * np.sin(DOWN - angle)
        angles[number] = angle
    steps = STEP * np.stack([np.cos(angles), np.sin(angles)], 1)
    points: np.ndarray = np.concatenate([start[None], start + np.cumsum(steps, 0)])
    return points


def photograph(organs: Sequence[Organ], random: Random, style: Style, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """A photograph uint8 [3, H, W] and its classes uint8 [H, W]."""
    height, width = size
    angle, scale = random.normal(0, 0.08), random.uniform(0.9, 1.08)
    turn = scale * np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    collar = np.array([width / height * random.uniform(0.4, 0.6), random.uniform(0.22, 0.3)])
    moved = [Organ(each.label, each.points @ turn + collar, each.radii * scale) for each in organs]
    covers = {label: _draw([each for each in moved if each.label == label], size) for label in (SECONDARY, MAIN, STEM)}
    classes = np.zeros(size, np.uint8)
    level = random.uniform(*style.background)
    contrast = random.uniform(*style.contrast)
    picture = _draw_background(random, style, size, level)
    total = 1 - np.prod([1 - cover for cover in covers.values()], axis=0)
    strength = random.uniform(*style.shadow)
    shifted = np.roll(total, (random.integers(1, 5), random.integers(-4, 5)), (0, 1))
    shade = Image.fromarray((shifted * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(random.uniform(1, 3)))
    picture *= 1 - strength * (np.asarray(shade, np.float32) / 255)[..., None]
    tint = random.uniform(0.85, 1.0, 3) * [1.0, 0.97, 0.85]
    colours = {
        SECONDARY: (level + contrast) * tint * random.uniform(0.9, 1.05),
        MAIN: (level + contrast) * tint,
        STEM: (level + contrast) * np.array([0.8, 1.0, 0.6]) * random.uniform(0.85, 1.05),
    }
    for label, cover in covers.items():
        mottled = 1 + 0.12 * _draw_noise(random, size, (8, 3))
        picture += cover[..., None] * (colours[label] * mottled[..., None] - picture)
        classes[cover >= 0.5] = label
    return _expose(picture, random, style), classes


def _expose(picture: np.ndarray, random: Random, style: Style) -> np.ndarray:
    """Uneven light, the lens and the sensor: float [H, W, 3] to uint8 [3, H, W]."""
    size = picture.shape[:2]
    light = 1 + 0.2 * _draw_noise(random, size, (2,)) + random.normal(0, 0.05)
    seen = Image.fromarray((picture * light[..., None]).clip(0, 255).astype(np.uint8))
    blurred = np.asarray(seen.filter(ImageFilter.GaussianBlur(random.uniform(*style.blur))), np.float32)
    noisy = blurred + random.normal(0, random.uniform(*style.noise), blurred.shape)
    return np.ascontiguousarray(noisy.clip(0, 255).round().astype(np.uint8).transpose(2, 0, 1))


def _draw(organs: Sequence[Organ], size: Size) -> np.ndarray:
    """The share of each pixel that the organs cover: [H, W] of 0 to 1."""
    height, width = size
    canvas = Image.new("L", (width * OVERSAMPLING, height * OVERSAMPLING))
    pen = ImageDraw.Draw(canvas)
    scale = height * OVERSAMPLING
    for organ in organs:
        points = organ.points * scale
        radii = np.maximum(organ.radii * scale, 0.75 * OVERSAMPLING)  # thinner ones would be lost in the mask
        for start, end, radius in zip(points[:-1], points[1:], radii, strict=False):
            pen.line([*start.tolist(), *end.tolist()], fill=255, width=max(round(2 * radius), 1))
            right, down = end
            pen.ellipse([right - radius, down - radius, right + radius, down + radius], fill=255)
    return np.asarray(canvas.resize((width, height), Image.Resampling.BOX), np.float32) / 255


def _draw_background(random: Random, style: Style, size: Size, level: float) -> np.ndarray:
    """The texture in colour, with fibres on it: float [H, W, 3]."""
    texture = _TEXTURES[random.choice(style.textures)](random, size)
    tint = random.uniform(0.8, 1.1, 3) * [1.05, 0.95, 0.85]
    picture = (level * (1 + texture))[..., None] * tint
    for _ in range(random.integers(style.fibres[0], style.fibres[1] + 1)):
        start = random.uniform(0, [size[1] / size[0], 1])
        line = _grow_line(random, start, random.uniform(0, 2 * np.pi), random.uniform(0.04, 0.2), 0.15, 0.0)
        cover = _draw([Organ(0, line, np.full(len(line), random.uniform(0.001, 0.004)))], size)[..., None]
        picture += cover * random.choice((-1, 1)) * random.uniform(15, 45)
    return picture.astype(np.float32)


def _draw_noise(random: Random, size: Size, grids: Sequence[int]) -> np.ndarray:
    """Smooth noise [H, W] with a standard deviation of about 0.5: grids of random numbers, enlarged."""
    height, width = size
    total = np.zeros(size, np.float32)
    for grid in grids:
        values = random.normal(0, 0.5, (grid + 2, grid + 2)).astype(np.float32)
        total += np.asarray(Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)) / len(grids)
    return total


def _draw_soil(random: Random, size: Size) -> np.ndarray:
    strength = random.uniform(0.1, 0.5)
    return strength * (_draw_noise(random, size, (4, 12, 40)) + 0.6 * _draw_noise(random, size, (90,)))


def _draw_pebbles(random: Random, size: Size) -> np.ndarray:
    """Cells around random points, each with its own grey, darker at their borders."""
    height, width = size
    down, right = np.ogrid[:height, :width]
    nearest = np.full(size, np.inf)
    second = np.full(size, np.inf)
    greys = np.zeros(size)
    for row, column in random.uniform(0, [height, width], (140, 2)):  # one cell at a time: all at once fill the memory
        distances = np.hypot(down - row, right - column)
        is_nearest = distances < nearest
        second = np.where(is_nearest, nearest, np.minimum(second, distances))
        nearest = np.where(is_nearest, distances, nearest)
        greys[is_nearest] = random.normal(0, 0.13)
    gap = np.exp(-((second - nearest) / 3))
    texture: np.ndarray = greys - 0.35 * gap + 0.1 * _draw_noise(random, size, (60,))
    return texture


def _draw_cloth(random: Random, size: Size) -> np.ndarray:
    """A weave of threads, a few pixels wide and slightly bent."""
    down, right = np.mgrid[: size[0], : size[1]].astype(np.float32)
    bend = 6 * _draw_noise(random, size, (3,))
    period = random.uniform(4, 7)
    weave = np.sin(2 * np.pi * (right + bend) / period) * np.sin(2 * np.pi * (down + bend) / period)
    texture: np.ndarray = 0.14 * weave + 0.15 * _draw_noise(random, size, (5, 20))
    return texture


_TEXTURES = {"soil": _draw_soil, "pebbles": _draw_pebbles, "cloth": _draw_cloth}
