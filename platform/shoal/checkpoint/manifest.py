"""The files of one sharded checkpoint other than the tensors (index and manifest), and publishing it.

Called by `checkpointer`; does not communicate. Disk errors are returned as a reason, which all ranks must receive.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shoal import atomic_file
from shoal.checkpoint import directory
from shoal.checkpoint.directory import FileChecksum
from shoal.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
INDEX = "index.json"
BEST = "best.json"


class SaveJob(NamedTuple):
    """One save, after the step `since`, if known. `values`, `extras` and `per_rank` are encoded.

    attempt: the folder of its files in the store; "" without a store
    pinned:  steps that retention leaves, since they are being uploaded
    """

    step: int
    draft: Path
    target: Path
    plan: str
    best: bool
    keep: int
    since: int | None
    values: dict[str, Any]
    extras: Any
    per_rank: Any
    attempt: str = ""
    pinned: Collection[int] = ()


class ShardResult(NamedTuple):
    """One rank's result. `reason` is its error, if any."""

    file: str
    sum: FileChecksum
    values: dict[str, Any]
    per_rank: Any
    reason: str


class NewerFormat(str):
    """The problem of a checkpoint that is not damaged: a newer Shoal wrote it, and no older one may take its place."""


def write_shard(job: SaveJob, name: str, pieces: Iterator[bytes | memoryview]) -> ShardResult:
    """Write and sync one rank's file."""
    try:
        atomic_file.make_folder(job.draft)
        written = directory.write_file(job.draft / name, pieces)
    except (OSError, RuntimeError) as error:  # RuntimeError: the copy from the GPU failed
        return ShardResult(name, FileChecksum(0, ""), {}, None, f"{name}: {error}")
    return ShardResult(name, written, job.values, job.per_rank, "")


def commit(job: SaveJob, index: Mapping[str, Any], shards: Sequence[ShardResult]) -> str:
    """Make a checkpoint of the shards, on the first rank. Returns the error, if any."""
    reason = "; ".join(one.reason for one in shards if one.reason)
    try:
        if not reason:
            _commit(job, index, shards)
    except (OSError, CheckpointError) as error:
        reason = str(error)
    if reason:
        shutil.rmtree(job.draft, ignore_errors=True)
    return reason


def _commit(job: SaveJob, index: Mapping[str, Any], shards: Sequence[ShardResult]) -> None:
    for rank, one in enumerate(shards):
        if not job.attempt and not (job.draft / one.file).exists():
            raise CheckpointError(f"rank 0 does not see the shard of rank {rank}: the folder must be shared by all")
    values: dict[str, Any] = {}
    for rank, one in enumerate(shards):
        for name, value in one.values.items():
            if values.setdefault(name, value) != value:
                raise CheckpointError(f"{name} is {value!r:.80} on rank {rank}, but {values[name]!r:.80} before it")
    content = {"tensors": index, "values": values, "extras": job.extras, "per_rank": [one.per_rank for one in shards]}
    files = {one.file: one.sum for one in shards}
    files[INDEX] = directory.write_file(job.draft / INDEX, [json.dumps(content).encode()])
    manifest = build_manifest(job.step, files, len(shards), job.plan, job.attempt)
    directory.write_file(job.draft / MANIFEST, [manifest])
    if job.best:  # within the draft: a disk without space for the note rejects the whole checkpoint
        atomic_file.write_synced(job.draft / BEST, format_best(job.step, json.loads(manifest)["sha256"]))
    directory.publish(job.draft, job.target)
    place = job.target.parent
    if job.best:
        atomic_file.move_synced(job.target / BEST, place / BEST)
    best = read_best_step(place)
    pinned = {*job.pinned, *([] if best is None else [best])}
    directory.delete_old_checkpoints(place, job.step, job.keep, pinned, job.since)


def build_manifest(
    step: int, files: Mapping[str, FileChecksum], world_size: int = 1, plan: str = "", folder: str = ""
) -> bytes:
    """The content of a manifest. `folder` has the files in a store."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        "world_size": world_size,
        "plan": plan,
        "files": {name: one._asdict() for name, one in files.items()},
    }
    if folder:
        manifest["folder"] = folder
    return json.dumps(manifest | {"sha256": _checksum(manifest)}, indent=1).encode()


def commit_shard(job: SaveJob, name: str, *, is_leader: bool) -> None:
    """On a rank that does not see the first one's folder: move its shard, and clean up where `is_leader`.

    A disk error is reported by the upload, which misses the shard.
    """
    with suppress(OSError):
        atomic_file.make_folder(job.target)
        atomic_file.move_synced(job.draft / name, job.target / name)
    with suppress(OSError):  # of a rank that is not done
        job.draft.rmdir()
    if is_leader and job.target.exists():
        directory.delete_old_checkpoints(job.target.parent, job.step, job.keep, job.pinned, job.since, job.draft)


def read_best_step(folder: Path) -> int | None:
    """The step last marked as the best one, if its checkpoint still exists.

    After a rollback another timeline may reach the same step: the manifest identifies the checkpoint. One that cannot
    be read is still the best one: loading it reports the problem.
    """
    try:
        noted = parse_best((folder / BEST).read_bytes())
    except OSError:
        return None
    if noted is None:
        return None
    path = directory.checkpoint_path(folder, noted.step)
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return noted.step if path.exists() else None
    return noted.step if noted.is_of(manifest) else None


class BestMark(NamedTuple):
    """The content of `best.json`."""

    step: int
    sha256: str

    def is_of(self, manifest: Mapping[str, Any]) -> bool:
        """Whether it marks the checkpoint with this manifest."""
        return self.sha256 == _checksum(manifest)


def parse_best(payload: bytes) -> BestMark | None:
    """None for what is no mark."""
    try:
        noted = json.loads(payload)
        return BestMark(int(noted["step"]), str(noted["sha256"]))
    except (ValueError, KeyError, TypeError):
        return None


def format_best(step: int, sha256: str) -> bytes:
    """The content of `best.json`, given the manifest's checksum of itself."""
    return json.dumps({"step": step, "sha256": sha256}).encode()


def read_manifest(path: Path) -> dict[str, Any] | str:
    """The manifest's content, or its problem."""
    if not path.exists():
        return "there is no such checkpoint"
    try:
        payload = (path / MANIFEST).read_bytes()
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    return parse_manifest(payload, path)


def parse_manifest(payload: bytes, path: Path) -> dict[str, Any] | str:
    """The content of the manifest of the checkpoint at `path`, or its problem."""
    try:
        manifest = json.loads(payload)
    except ValueError as error:
        return f"{MANIFEST} is not JSON ({error})"
    if isinstance(manifest, dict) and atomic_file.is_newer_format(number := manifest.get("format"), FORMAT):
        return NewerFormat(atomic_file.describe_newer_format(path / MANIFEST, number, FORMAT))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"{MANIFEST} is not one of format {FORMAT}"
    if manifest.pop("sha256", "") != _checksum(manifest):
        return f"{MANIFEST} does not match its own checksum"
    if directory.checkpoint_path(path.parent, manifest["step"]) != path:
        return f"{MANIFEST} is of step {manifest['step']}"
    return manifest


def find_damages(path: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The problems of these files, if any."""
    reasons = (directory.find_damage(path / name, FileChecksum(**expected)) for name, expected in files.items())
    return [reason for reason in reasons if reason]


def read_index(path: Path) -> dict[str, Any] | str:
    """The index of a verified checkpoint, or its problem."""
    try:
        index: dict[str, Any] = json.loads((path / INDEX).read_bytes())
    except (OSError, ValueError) as error:
        return f"{INDEX} cannot be read ({error})"
    return index


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
