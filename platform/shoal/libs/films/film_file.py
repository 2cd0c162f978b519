"""Writes films: WebP animations by Pillow, mp4 where PyAV is installed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shoal.atomic_file import replace_synced
from shoal.errors import ConfigError, needs_extra
from shoal.libs.films.drawing import PAPER, Frame, draw_frames
from shoal.libs.films.episode import MAX_FRAMES, WIDTH, FilmedEpisode

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
