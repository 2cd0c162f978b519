"""Full resumable state of one process in one file.

    FOLDER/step-000000123/state.pt        torch.save, read back with weights_only
    FOLDER/step-000000123/manifest.json   step, time, size and SHA-256 of state.pt

Called by the RL learner. Never unpickles arbitrary objects; knows nothing of what it saves.
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
from torch.serialization import get_unsafe_globals_in_checkpoint

from shoal.atomic_file import describe_newer_format, is_newer_format, make_folder
from shoal.checkpoint.directory import (
    checkpoint_path,
    delete_old_checkpoints,
    draft_path,
    list_newest_first,
    publish,
    write_file,
)
from shoal.errors import CheckpointError, ConfigError

FORMAT = 1  # of the manifest


class Loaded(NamedTuple):
    """`damaged` names the newer checkpoints that were skipped, each with the reason."""

    step: int
    state: dict[str, Any]
    damaged: list[str]


def save(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write `state` (tensors, numbers, strings, lists, dicts) as step `step`; retain the newest `keep` checkpoints.

    Atomic: a crash at any moment leaves the earlier checkpoints unchanged. Raises CheckpointError on a disk error, and
    ConfigError for values that could not be loaded again.
    """
    target, draft = checkpoint_path(folder, step), draft_path(folder, step, str(os.getpid()))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    if foreign := get_unsafe_globals_in_checkpoint(buffer):
        remedy = "give tensors, and Python's own numbers, strings, lists and dicts"
        raise ConfigError("state", foreign[0], "would have to be run to be read again", remedy)
    try:
        shutil.rmtree(draft, ignore_errors=True)
        make_folder(draft)
        written = write_file(draft / "state.pt", [buffer.getbuffer()])
        manifest = {"format": FORMAT, "step": step, "time": time.time(), **written._asdict()}
        write_file(draft / "manifest.json", [json.dumps(manifest).encode()])
        publish(draft, target)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"step {step} could not be saved in {folder}: {error}") from error
    delete_old_checkpoints(folder, step, keep)
    return target


def load_latest(folder: Path) -> Loaded | None:
    """The newest intact checkpoint; None if there is none at all.

    Raises CheckpointError when there are checkpoints, but none can be read, or a newer Shoal wrote one.
    """
    damaged: list[str] = []
    for path in list_newest_first(folder):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            payload = (path / "state.pt").read_bytes()
        except (OSError, ValueError) as error:
            damaged.append(f"{path.name}: {error}")
            continue
        if isinstance(manifest, dict) and is_newer_format(found := manifest.get("format"), FORMAT):
            raise CheckpointError(describe_newer_format(path / "manifest.json", found, FORMAT))
        step = manifest.get("step") if isinstance(manifest, dict) else None
        if type(step) is not int or checkpoint_path(folder, step) != path:  # no checksum covers the manifest itself
            damaged.append(f"{path.name}: manifest.json does not name this step")
            continue
        if hashlib.sha256(payload).hexdigest() != manifest.get("sha256"):
            damaged.append(f"{path.name}: state.pt does not match its checksum")
            continue
        return Loaded(step, torch.load(io.BytesIO(payload), "cpu", weights_only=True), damaged)
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} can be read: {'; '.join(damaged)}")
    return None
