"""A folder of checkpoints: their names, drafts that appear atomically, checksums, and retention.

    FOLDER/step-000000123/        a checkpoint; renamed to this name when all of it was on the disk
    FOLDER/.draft-000000124-ab    one in progress, or left by a process that died
    FOLDER/.draft-step-000000123-replaced    one that is being replaced by another of its step

Other entries of the folder, such as copies under other names, are ignored and left alone.

Called by both kinds of checkpoint, `files` and `checkpointer`; knows nothing of their contents.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.atomic_file import create_private, hash_file, sync_folder

BLOCK_BYTES = 4 << 20
_STEP = re.compile(r"step-(\d{9,})")


class FileChecksum(NamedTuple):
    """A manifest's entry of a file."""

    size_bytes: int
    sha256: str


def checkpoint_path(folder: Path, step: int) -> Path:
    """The path of the checkpoint of that step."""
    return folder / f"step-{step:09d}"


def parse_step(name: str) -> int:
    """The step in the name of a checkpoint; -1 for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else -1


def draft_path(folder: Path, step: int, token: str) -> Path:
    """The path of its draft."""
    return folder / f".draft-{step:09d}-{token}"


def list_newest_first(folder: Path) -> list[Path]:
    """All checkpoints, damaged ones too. One whose replacement was interrupted gets its name back."""
    for aside in folder.glob(".draft-step-*-replaced"):
        target = folder / aside.name.removeprefix(".draft-").removesuffix("-replaced")
        if not target.exists():
            with suppress(OSError):  # a read-only folder
                aside.rename(target)
    paths = {step: path for path in folder.glob("step-*") if (step := parse_step(path.name)) >= 0}
    return [path for _, path in sorted(paths.items(), reverse=True)]


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileChecksum:
    """Write a new file and sync it to the disk. Raises OSError."""
    digest, size_bytes = hashlib.sha256(), 0
    with create_private(path).open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
            size_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(size_bytes, digest.hexdigest())


def find_damage(path: Path, expected: FileChecksum) -> str:
    """The problem of a file; "" if there is none."""
    try:
        size_bytes, sha256 = path.stat().st_size, hash_file(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    if size_bytes != expected.size_bytes:
        return f"{path.name} has {size_bytes} bytes instead of {expected.size_bytes}"
    return "" if sha256 == expected.sha256 else f"{path.name} does not match its checksum"


def publish(draft: Path, target: Path) -> None:
    """Rename a finished draft; an existing checkpoint of the same step is replaced. Raises OSError."""
    sync_folder(draft)
    aside = target.with_name(f".draft-{target.name}-replaced")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    draft.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def choose_removed(
    steps: Sequence[int], newest: int, keep: int, pinned: Collection[int], since: int | None
) -> list[int]:
    """The steps that retention removes, given all, newest first: it retains `newest` and those before it, `keep` in
    all, and `pinned`.

    Later steps belong to an abandoned timeline: they were damaged, or the run would have resumed from them. So do those
    between `newest` and `since`, the step from which this timeline resumed, if known.
    """
    index = steps.index(newest)
    after = steps.index(since) if since in steps[index + 1 :] else index + 1
    abandoned, earlier = [*steps[:index], *steps[index + 1 : after]], steps[after:]
    return [*abandoned, *(step for step in earlier[keep - 1 :] if step not in pinned)]


def delete_old_checkpoints(
    folder: Path,
    newest: int,
    keep: int,
    pinned: Collection[int] = (),
    since: int | None = None,
    draft: Path | None = None,
) -> None:
    """Remove what `choose_removed` says, and all drafts but `draft`."""
    steps = [parse_step(path.name) for path in list_newest_first(folder)]
    removed = choose_removed(steps, newest, keep, pinned, since)
    drafts = [path for path in folder.glob(".draft-*") if path != draft]
    for path in [*(checkpoint_path(folder, step) for step in removed), *drafts]:
        shutil.rmtree(path, ignore_errors=True)
