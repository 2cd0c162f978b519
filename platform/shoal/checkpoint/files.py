"""Full resumable state of one process in one file, and the store's copy of it.

    FOLDER/step-000000123/state.pt        torch.save, read back with weights_only
    FOLDER/step-000000123/manifest.json   step, time, size and SHA-256 of state.pt

Called by the RL learner and by streams. Never unpickles arbitrary objects; knows nothing of what it saves.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from shoal.atomic_file import make_folder, require_known_format, write_synced
from shoal.checkpoint.directory import (
    FileChecksum,
    checkpoint_path,
    delete_old_checkpoints,
    draft_path,
    list_newest_first,
    parse_step,
    publish,
    write_file,
)
from shoal.checkpoint.manifest import MANIFEST, build_manifest
from shoal.checkpoint.stored import StoredCheckpoints
from shoal.errors import CheckpointError, ConfigError, StoreError
from shoal.store import Mirror

FORMAT = 1  # of the manifest
STATE = "state.pt"


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
        written = write_file(draft / STATE, [buffer.getbuffer()])
        manifest = {"format": FORMAT, "step": step, "time": time.time(), **written._asdict()}
        write_file(draft / MANIFEST, [json.dumps(manifest).encode()])
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
            manifest = json.loads((path / MANIFEST).read_text())
            payload = (path / STATE).read_bytes()
        except (OSError, ValueError) as error:
            damaged.append(f"{path.name}: {error}")
            continue
        require_known_format(path / MANIFEST, manifest, FORMAT, CheckpointError)
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


class CheckpointMirror:
    """The newest `keep` checkpoints of `folder`, in a store.

    The newest one is uploaded in the background, again until it is there; those that come meanwhile are skipped, but
    for the last one.
    """

    def __init__(self, stored: StoredCheckpoints, folder: Path, keep: int) -> None:
        self._stored = stored
        self._folder = folder
        self._keep = keep
        self._newest: Path | None = None
        self._uploaded: Path | None = None
        self._mirror = Mirror("checkpoint upload", self._upload_newest)

    def fetch_newest(self) -> None:
        """Download the newest checkpoint into the folder, unless that has it, or a later one.

        Raises CheckpointError when it is damaged, or when the folder has none and the store cannot be reached.
        """
        own = next((parse_step(path.name) for path in list_newest_first(self._folder)), -1)
        try:
            step = next(iter(self._stored.list_steps()), -1)
            manifest = self._stored.read_manifest(step) if step > own else ""
            if isinstance(manifest, str):
                problem = manifest
            else:
                path = checkpoint_path(self._folder, step)
                problem = self._stored.download(step, manifest, STATE, path / STATE)
                if not problem:
                    content = {"format": FORMAT, "step": step, "time": manifest["time"], **manifest["files"][STATE]}
                    write_synced(path / MANIFEST, json.dumps(content).encode())
        except StoreError as error:
            if own >= 0:
                return
            problem = str(error)
        if problem:
            raise CheckpointError(f"no checkpoint can be read from {self._stored.url}: {problem}")

    def add(self, path: Path) -> None:
        """Upload this checkpoint, which is the newest."""
        self._newest = path
        self._mirror.wake()

    @property
    def failure(self) -> str:
        """Why the newest one is not in the store; "" if it is, or is on its way."""
        problem = self._mirror.problem
        return f"{self._newest.name} is only in {self._folder}: {problem}" if self._newest and problem else ""

    def finish(self, timeout_s: float) -> str:
        """Wait until the newest one is in the store. Returns why it is not; "" if it is."""
        if self._mirror.flush(timeout_s):
            return ""
        return self.failure or f"the upload to {self._stored.url} has not ended within {timeout_s:g} s"

    def close(self) -> None:
        """Upload nothing more. Idempotent."""
        self._mirror.close(0.0)

    def _upload_newest(self) -> None:
        newest = self._newest
        if newest is None or newest is self._uploaded:
            return
        step, content = parse_step(newest.name), json.loads((newest / MANIFEST).read_bytes())
        files = {STATE: FileChecksum(content["size_bytes"], content["sha256"])}
        attempt = secrets.token_hex(4)
        self._stored.upload(step, attempt, newest / STATE)
        self._stored.publish(step, build_manifest(step, files, folder=attempt), best=False)
        self._uploaded = newest
        self._stored.delete_old(step, self._keep, None)
