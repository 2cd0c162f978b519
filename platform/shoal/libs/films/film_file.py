"""Draws episodes and writes films of them: WebP animations by Pillow, mp4 where PyAV is installed.

A film has the episode's pictures, or a chart of what was observed; beneath, the value, the rewards and the choices.
Each picture of a film is a still background, drawn once for an episode, and what moves. Legend: N steps, K choices.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from shoal.atomic_file import replace_synced
from shoal.errors import ConfigError, needs_extra
from shoal.extend.runs import COLOURS, INK, MUTED, RULE, format_number
from shoal.libs.films.episode import (
    CHART_S,
    FRAMES_PER_S,
    LAST_S,
    MAX_FRAMES,
    STEPS_PER_S,
    WIDTH,
    FilmedEpisode,
    Shot,
    fit_picture,
)

PAPER = "#ffffff"
MARGIN = 6
LINE_HEIGHT = 14
CURVE_HEIGHT = 36
BAR_HEIGHT = 34
CHART_HEIGHT = 180
MAX_LINES = 8  # of a chart; of more numbers the chart is a map of colours
MAX_ROWS = 60  # of that map
MIN_SPAN = 0.1  # of values: what is nearly the same is drawn so
VALUE, REWARD = COLOURS[:2]
_FONT_SIZE = 11
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont
Frame = tuple[Image.Image, float]  # and the seconds that it is shown


def draw_frames(episode: FilmedEpisode) -> Iterator[Frame]:
    """The pictures of a film, RGB, all of one size, with the seconds that each is shown."""
    font = ImageFont.load_default(_FONT_SIZE)
    shots = episode.shots or list(_draw_observations(episode, font))
    panel = _Panel(episode, font)
    height = max(each.picture.height for each in shots)
    for number, (step, shown, seconds) in enumerate(shots):
        picture = Image.new("RGB", (WIDTH, height + panel.height), PAPER)
        picture.paste(shown, ((WIDTH - shown.width) // 2, 0))
        panel.draw(picture, step, height, is_last=number == len(shots) - 1)
        yield picture, seconds


def _draw_observations(episode: FilmedEpisode, font: Font) -> Iterator[Shot]:
    """The observations themselves where they are pictures, or else a chart of them with a mark at the step."""
    last, pictures = episode.num_steps - 1, find_pictures(episode.observations)
    steps = [*range(0, last, max(1, -(-last // (episode.max_frames - 1)))), last]
    seconds = max(1 / FRAMES_PER_S, min(1 / STEPS_PER_S, CHART_S / len(steps)))
    rows = episode.observations.reshape(len(episode.observations), -1)[: episode.num_steps]
    chart = draw_chart(rows.astype(np.float64) if pictures is None else rows[:, :0])
    for step in steps:
        if pictures is not None:
            shown = fit_picture(Image.fromarray(pictures[step]))
        else:
            shown, x = chart.copy(), _find_x(step, max(1, last))
            draw = ImageDraw.Draw(shown)
            draw.line([(x, MARGIN), (x, CHART_HEIGHT - MARGIN)], INK)
            for index, number in enumerate(rows[step] if rows.shape[1] <= MAX_LINES else ()):
                top = MARGIN + index * (CHART_HEIGHT - 2 * MARGIN) / rows.shape[1]
                draw.text((MARGIN, top), format_number(float(number)), INK, font, stroke_width=2, stroke_fill=PAPER)
        yield Shot(step, shown, LAST_S if step == last else seconds)


class _Panel:
    """The lower part."""

    def __init__(self, episode: FilmedEpisode, font: Font) -> None:
        self._episode, self._font = episode, font
        self._returns = episode.rewards.cumsum()
        self._num_steps = max(1, episode.num_steps - 1)
        self._bars, self._has_probabilities = _find_bars(episode)
        self.height = 2 * LINE_HEIGHT + CURVE_HEIGHT + BAR_HEIGHT * (self._bars is not None) + 2 * MARGIN
        still = Image.new("RGB", (WIDTH, self.height), PAPER)
        draw, top = ImageDraw.Draw(still), MARGIN + 2 * LINE_HEIGHT
        draw.text((MARGIN, 2), self._episode.title, INK, self._font)
        draw.line([(MARGIN, top + CURVE_HEIGHT), (WIDTH - MARGIN, top + CURVE_HEIGHT)], RULE)
        rewards = self._episode.rewards
        if np.ptp(rewards) or self._episode.values is None:
            _draw_line(draw, rewards, top, REWARD)
        if self._episode.values is not None:
            _draw_line(draw, self._episode.values, top, VALUE, width=2, least=MIN_SPAN)
        self._still = still

    def draw(self, picture: Image.Image, step: int, top: int, *, is_last: bool) -> None:
        episode = self._episode
        picture.paste(self._still, (0, top))
        draw = ImageDraw.Draw(picture)
        outcome = f"{episode.outcome} after " if is_last and episode.outcome else ""
        steps = f"{outcome}{step + 1} steps" if outcome else f"step {step + 1}"
        draw.text((WIDTH - MARGIN, top + 2), steps, MUTED, self._font, anchor="ra")
        y = top + 2 + LINE_HEIGHT
        draw.text((MARGIN, y), f"reward {format_number(episode.rewards[step])}", REWARD, self._font)
        middle = f"return {format_number(self._returns[step])}"
        draw.text((WIDTH // 2, y), middle, INK, self._font, anchor="ma")
        if episode.values is not None:
            value = f"value {format_number(episode.values[step])}"
            draw.text((WIDTH - MARGIN, y), value, VALUE, self._font, anchor="ra")
        x, above = _find_x(step, self._num_steps), top + MARGIN + 2 * LINE_HEIGHT
        draw.line([(x, above), (x, above + CURVE_HEIGHT)], INK)
        if self._bars is not None:
            self._draw_bars(draw, step, above + CURVE_HEIGHT + 3)

    def _draw_bars(self, draw: ImageDraw.ImageDraw, step: int, top: int) -> None:
        """Of choices a column each, as high as it is probable; of numbers one each, between least and most."""
        assert self._bars is not None
        bars, chosen = self._bars[step], _find_chosen(self._episode, step, self._has_probabilities)
        width, bottom = (WIDTH - 2 * MARGIN) / len(bars), top + BAR_HEIGHT - 4
        height = BAR_HEIGHT - LINE_HEIGHT - 6
        for index, share in enumerate(bars.tolist()):
            left, right = MARGIN + index * width, MARGIN + (index + 1) * width - (2 if width > 4 else 0)
            colour = VALUE if index in chosen else RULE
            draw.rectangle([left, bottom - 1 - share * height, right, bottom], colour)
            if width >= 30:
                text = f"{index}: {share:.0%}" if self._has_probabilities else str(index)
                if self._episode.actions.dtype.kind == "f":
                    text += f": {format_number(float(self._episode.actions[step].flat[index]))}"
                draw.text((left + 2, top), text, INK if index in chosen else MUTED, self._font)


def find_pictures(observations: np.ndarray) -> np.ndarray | None:
    """uint8 [N, H, W, 3] of observations that are pictures or boards: [N, H, W], or with planes before or behind."""
    if observations.ndim not in (3, 4) or min(observations.shape[1:3]) < 1 or observations.size == 0:
        return None
    planes = observations[..., None] if observations.ndim == 3 else observations
    if planes.shape[1] < planes.shape[-1]:
        planes = np.moveaxis(planes, 1, -1)
    if min(planes.shape[1:3]) < 3:
        return None
    count = planes.shape[-1]
    planes = planes.astype(np.float64) if count in (2, 3) else planes[..., -1:].astype(np.float64)  # of many the newest
    low, high = planes.min(), planes.max()
    scaled = ((planes - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    if count == 2:
        scaled = np.concatenate([scaled, np.zeros_like(scaled[..., :1])], -1)
    return np.ascontiguousarray(np.broadcast_to(scaled, (*scaled.shape[:3], 3)))


def draw_chart(rows: np.ndarray) -> Image.Image:
    """Numbers [N, F] over time: a line each, or of many a map of colours; each between its least and its most."""
    chart = Image.new("RGB", (WIDTH, CHART_HEIGHT), PAPER)
    rows = np.nan_to_num(rows)
    if rows.shape[1] <= MAX_LINES:
        draw, height = ImageDraw.Draw(chart), (CHART_HEIGHT - 2 * MARGIN) / max(1, rows.shape[1])
        for index, column in enumerate(rows.T):
            top = MARGIN + index * height
            draw.line([(MARGIN, top + height), (WIDTH - MARGIN, top + height)], RULE)
            _draw_line(draw, column, top + 2, COLOURS[index % len(COLOURS)], height - 4)
        return chart
    rows = rows[:, np.linspace(0, rows.shape[1] - 1, min(MAX_ROWS, rows.shape[1])).astype(int)]
    low, span = rows.min(0), np.ptp(rows, 0)
    shares = (rows - low) / np.where(span > 0, span, 1)
    ends = np.array([[255, 255, 255], [37, 99, 235]])
    colours = (ends[0] + shares.T[..., None] * (ends[1] - ends[0])).astype(np.uint8)
    inner = Image.fromarray(np.ascontiguousarray(colours))
    size = (WIDTH - 2 * MARGIN, CHART_HEIGHT - 2 * MARGIN)
    chart.paste(inner.resize(size, Image.Resampling.NEAREST), (MARGIN, MARGIN))
    return chart


def _find_x(step: int, last: int) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN - 1) * min(step, last) / last


def _draw_line(
    draw: ImageDraw.ImageDraw,
    column: np.ndarray,
    top: float,
    colour: str,
    height: float = CURVE_HEIGHT,
    width: int = 1,
    least: float = 0.0,
) -> None:
    """From the least to the most number, which are at least `least` of the largest apart."""
    low, high = float(np.min(column)), float(np.max(column))
    span = max(high - low, least * max(abs(low), abs(high))) or 1.0
    last = max(1, len(column) - 1)
    steps = np.unique(np.linspace(0, len(column) - 1, min(len(column), 2 * WIDTH)).astype(int)).tolist()
    points = [(_find_x(step, last), top + height - 2 - (height - 4) * (column[step] - low) / span) for step in steps]
    draw.line(points if len(points) > 1 else points * 2, colour, width)


def _find_bars(episode: FilmedEpisode) -> tuple[np.ndarray | None, bool]:
    """Shares [N, K] of what is drawn as columns, and whether they are probabilities."""
    if episode.probabilities is not None:
        return episode.probabilities, True
    rows = episode.scores if episode.scores is not None else episode.actions.reshape(episode.num_steps, -1)
    rows = np.nan_to_num(rows.astype(np.float64))
    if episode.scores is None and episode.actions.ndim == 1 and episode.actions.dtype.kind in "iub":
        count = int(rows.max(initial=0)) + 1  # a choice of which no probability is known
        return (np.eye(count)[rows[:, 0].astype(int)] if count <= WIDTH // 2 else None), False
    low, span = rows.min(), float(np.ptp(rows)) or 1.0
    return ((rows - low) / span if rows.shape[1] <= WIDTH // 2 else None), False


def _find_chosen(episode: FilmedEpisode, step: int, has_probabilities: bool) -> set[int]:
    action = episode.actions[step]
    if action.ndim == 0 and action.dtype.kind in "iub":
        return {int(action)}
    return set() if has_probabilities else set(range(action.size))


SUFFIXES = (".webp", ".mp4")
# With loss, libwebp leaves pixels as they were that have changed by little since the picture before, so that what moves
# leaves traces, and what fades does not. Flat drawings are as small without.
QUALITY = 60
MAX_BYTES = 1_000_000  # of MAX_FRAMES pictures; above it, a film with loss
MP4_FRAMES_PER_S = 25


def require_format(path: Path) -> None:
    """Raise ConfigError for a name that no film can have, and MissingExtra where mp4 cannot be written here."""
    if path.suffix not in SUFFIXES:
        raise ConfigError("record", str(path), "is no film", "name it film.webp or film.mp4")
    if not path.absolute().parent.is_dir():
        raise ConfigError("record", str(path), f"there is no folder {path.absolute().parent}", "create it first")
    if path.suffix == ".mp4":
        with needs_extra("films"):
            import av  # noqa: F401


def write_film(path: Path, episodes: Sequence[FilmedEpisode]) -> int:
    """Draw the episodes one after the other into one film; returns the number of its pictures. Raises ConfigError."""
    require_format(path)
    pictures = _match_sizes([draw_frames(each) for each in episodes])
    write = _write_mp4 if path.suffix == ".mp4" else _write_webp
    return write(path, pictures)


def draw_film(path: Path, *, title: str, outcome: str = "", **arrays: np.ndarray | None) -> int:
    """`write_film` of one episode given as arrays: `observations`, `actions`, `rewards`, and, if known, `values`,
    `probabilities` or `scores`: see `FilmedEpisode`."""
    return write_film(path, [FilmedEpisode(title, outcome=outcome, **arrays)])  # type: ignore[arg-type]


def thin_out(written: list[Path], most: int) -> list[Path]:
    """Those that stay: of more than `most` every second one is deleted, with what has its name; neither the first nor
    the last."""
    if len(written) <= most:
        return written
    dropped = written[1:-1:2]
    for path in dropped:
        for each in path.parent.glob(f"{path.stem}.*"):
            each.unlink(missing_ok=True)
    return [each for each in written if each not in dropped]


def _match_sizes(films: Sequence[Iterator[Frame]]) -> Iterator[Frame]:
    """All as high as the first: an episode without choices has a lower panel."""
    size: tuple[int, int] | None = None
    for picture, seconds in chain.from_iterable(films):
        size = size or picture.size
        if picture.size != size:
            matched = Image.new("RGB", size, PAPER)
            matched.paste(picture, (0, 0))
            picture = matched
        yield picture, seconds


def _write_webp(path: Path, pictures: Iterator[Frame]) -> int:
    durations: list[int] = []

    def note(each: Frame) -> Image.Image:
        durations.append(max(20, round(1000 * each[1])))
        return each[0]

    first, *others = map(note, pictures)
    for options in ({"lossless": True, "quality": 20}, {"quality": QUALITY}):
        buffer = io.BytesIO()
        first.save(buffer, "WEBP", save_all=True, append_images=others, duration=durations, loop=0, method=0, **options)
        if buffer.tell() <= MAX_BYTES * max(1.0, len(durations) / MAX_FRAMES):
            break
    replace_synced(path, buffer.getvalue())
    return len(durations)


def _write_mp4(path: Path, pictures: Iterator[Frame]) -> int:
    import av

    count = 0
    shown_s = 0.0
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=MP4_FRAMES_PER_S)
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "23", "preset": "veryfast"}
        for picture, seconds in pictures:
            if not count:
                stream.width, stream.height = WIDTH, picture.height - picture.height % 2
            cropped = picture.crop((0, 0, WIDTH, stream.height))
            shown_s += seconds
            while count < shown_s * MP4_FRAMES_PER_S:
                container.mux(stream.encode(av.VideoFrame.from_image(cropped)))
                count += 1
        container.mux(stream.encode())
    replace_synced(path, buffer.getvalue())
    return count
