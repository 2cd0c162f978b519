"""Full resumable state on disk: written whole or not at all, checked when it is read, the last good one found.

    FOLDER/step-000000123/state.pt        torch.save, read back with weights_only
    FOLDER/step-000000123/manifest.json   step, time, size and SHA-256 of state.pt

Called by the learner. Never unpickles arbitrary objects; knows nothing of what it saves.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.errors import CheckpointError


class Loaded(NamedTuple):
    """`damaged` names the newer checkpoints that had to be passed over, each with the reason."""

    step: int
    state: dict[str, Any]
    damaged: list[str]


def save(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write `state` (tensors, numbers, strings, lists, dicts) as step `step`; keep the newest `keep` checkpoints.

    Atomic: a crash at any moment leaves the earlier checkpoints as they were. Raises CheckpointError when the disk
    does not take it.
    """
    target = folder / f"step-{step:09d}"
    draft = folder / f".draft-{step:09d}-{os.getpid()}"
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    manifest = {
        "step": step,
        "time": time.time(),
        "size_bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(draft / "state.pt", payload)
        _write(draft / "manifest.json", json.dumps(manifest).encode())
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"step {step} could not be saved in {folder}: {error}") from error
    _tidy(folder, target, keep)
    return target


def _tidy(folder: Path, newest: Path, keep: int) -> None:
    """Keep `newest` and those before it, `keep` in all. Later steps are of a timeline that was given up: they were
    damaged, or the run would have gone on from them. Drafts are of processes that died."""
    earlier = [path for path in _checkpoints(folder) if path.name < newest.name]
    later = [path for path in _checkpoints(folder) if path.name > newest.name]
    for old in [*later, *earlier[keep - 1 :], *folder.glob(".draft-*")]:
        shutil.rmtree(old, ignore_errors=True)


def write_synced(path: Path, payload: bytes) -> None:
    """Replace a small file, whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    _write(draft, payload)
    draft.replace(path)


def load_latest(folder: Path) -> Loaded | None:
    """The newest checkpoint that is whole; None when there is none at all.

    Raises CheckpointError when there are checkpoints, but none that can be read.
    """
    damaged: list[str] = []
    for path in _checkpoints(folder):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            payload = (path / "state.pt").read_bytes()
        except (OSError, ValueError) as error:
            damaged.append(f"{path.name}: {error}")
            continue
        if hashlib.sha256(payload).hexdigest() != manifest.get("sha256"):
            damaged.append(f"{path.name}: state.pt does not match its checksum")
            continue
        return Loaded(manifest["step"], torch.load(io.BytesIO(payload), weights_only=True), damaged)
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} can be read: {'; '.join(damaged)}")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _write(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
