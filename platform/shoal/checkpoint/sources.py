"""Where one rank reads checkpoints: a folder of this host, and the store of the run if there is one.

Files of a stored checkpoint are read from the folder, into which those are downloaded that it lacks. Called by
`checkpointer`; does not communicate, except for `probe_folder` and `probe_store`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from shoal.atomic_file import make_folder
from shoal.checkpoint import manifest as record
from shoal.checkpoint.coordination import CheckpointGroup
from shoal.checkpoint.directory import checkpoint_path, list_newest_first, parse_step
from shoal.checkpoint.manifest import INDEX, MANIFEST
from shoal.checkpoint.stored import StoredCheckpoints
from shoal.errors import ConfigError, StoreError
from shoal.store import Store

_log = logging.getLogger(__name__)


class Visibility(NamedTuple):
    """Which ranks see the files that this rank writes to the folder.

    ranks:     those, this one among them
    is_shared: all ranks see one folder
    hosts:     of all ranks, by rank
    """

    ranks: frozenset[int]
    is_shared: bool
    hosts: tuple[str, ...]


def probe_folder(folder: Path, ranks: CheckpointGroup, token: str) -> Visibility:
    """Find out by a file of each rank. A folder that cannot be created or written is seen by this rank alone."""
    hosts = tuple(ranks.all_gather(socket.gethostname()))
    if ranks.size == 1:
        return Visibility(frozenset({0}), True, hosts)
    path = folder / f".probe-{token}-{ranks.rank}"
    with contextlib.suppress(OSError):
        make_folder(folder)
        path.touch(mode=0o600)
    ranks.barrier()
    seen = {rank for rank in range(ranks.size) if (folder / f".probe-{token}-{rank}").exists()} | {ranks.rank}
    seen_by_all = ranks.all_gather(seen)
    with contextlib.suppress(OSError):
        path.unlink()
    return Visibility(frozenset(seen), all(len(each) == ranks.size for each in seen_by_all), hosts)


def require_durable(
    folder: Path, store: Store | None, ranks: CheckpointGroup, visibility: Visibility, token: str
) -> None:
    """Raises ConfigError, on every rank, when ranks on several hosts have neither a store nor a shared folder."""
    if visibility.is_shared:
        return
    shared_with_first = ranks.all_gather(0 in visibility.ranks)
    places = [f"{host} ({path})" for host, path in zip(visibility.hosts, ranks.all_gather(str(folder)), strict=True)]
    other = sorted({place for place, is_seen in zip(places, shared_with_first, strict=True) if not is_seen})
    hosts = f"{', '.join(other)} and {places[0]}"
    if store is None:
        problem = f"the hosts {hosts} have no folder in common there, and no checkpoint could be read again"
        remedy = "set SHOAL_STORE to a bucket (s3://BUCKET/PREFIX), or SHOAL_HOME to a folder that all hosts mount"
        raise ConfigError("SHOAL_HOME", str(folder), problem, remedy)
    found = _probe_store(store, ranks, visibility.hosts[ranks.rank], token)
    problems = sorted({problem for problem in ranks.all_gather(found) if problem})
    if ranks.is_first:
        with contextlib.suppress(StoreError):
            store.delete(f"probe-{token}/{rank}" for rank in range(ranks.size))
    if problems:
        remedy = "set SHOAL_STORE to a bucket that all hosts reach, or SHOAL_HOME to a folder that they all mount"
        raise ConfigError("SHOAL_STORE", store.url, f"the hosts {hosts} need it: {'; '.join(problems)}", remedy)


def _probe_store(store: Store, ranks: CheckpointGroup, host: str, token: str) -> str:
    """Write an object, and read that of the first rank; returns the problem, "" if there is none."""
    problem = ""
    try:
        store.write(f"probe-{token}/{ranks.rank}", host.encode())
    except OSError as error:
        problem = f"{host} cannot write there ({error})"
    ranks.barrier()
    try:
        if not problem:
            store.read(f"probe-{token}/0")
    except FileNotFoundError:
        problem = f"{host} does not see there what the first rank has written"
    except OSError as error:
        problem = f"{host} cannot read there ({error})"
    return problem


class CheckpointSources:
    """The checkpoints in `folder`, and those in `stored`."""

    def __init__(self, folder: Path, stored: StoredCheckpoints | None) -> None:
        self._folder, self._stored = folder, stored
        self._manifests: dict[int, dict[str, Any]] = {}  # of the stored ones that were looked at

    def list_steps(self, *, is_shared: bool) -> list[int]:
        """All steps, newest first. Raises StoreError when the store cannot be reached and no host has all files.

        is_shared: whether this folder has all files of its checkpoints
        """
        steps = [parse_step(path.name) for path in list_newest_first(self._folder)]
        if self._stored is None:
            return steps
        own = [step for step in steps if is_shared and (checkpoint_path(self._folder, step) / MANIFEST).exists()]
        try:
            stored = self._stored.list_steps()
        except StoreError as error:
            if not own:
                raise
            _log.warning("checkpoints are read from %s alone: %s", self._folder, error)
            return own
        return sorted({*own, *stored}, reverse=True)

    def read_manifest(self, step: int) -> tuple[dict[str, Any] | str, bool]:
        """The manifest, or its problem; and whether its files are in the store. On the first rank."""
        path = checkpoint_path(self._folder, step)
        own = record.read_manifest(path)
        if self._stored is None:
            return own, False
        try:
            stored = self._stored.read_manifest(step)
        except StoreError as error:
            return (own, False) if isinstance(own, dict) else (str(error), False)
        if isinstance(stored, str):
            return (own, False) if isinstance(own, dict) else (stored, False)
        if own != stored:  # of another attempt at this step
            (path / MANIFEST).unlink(missing_ok=True)
        return stored, True

    def remember(self, step: int, manifest: dict[str, Any], *, is_stored: bool) -> None:
        """What `read_manifest` has found on the first rank."""
        self._manifests.pop(step, None)
        if is_stored:
            self._manifests[step] = manifest

    def find_damages(self, step: int, manifest: dict[str, Any], names: Iterable[str]) -> list[str]:
        """The problems of these files, if any; those of a stored checkpoint are downloaded where they are missing."""
        if step not in self._manifests:
            path = checkpoint_path(self._folder, step)
            return record.find_damages(path, {name: manifest["files"][name] for name in names})
        return self.fetch(step, names)

    def get_share(self, step: int, rank: int, size: int) -> list[str]:
        """The files of a stored checkpoint that this rank has verified; none for one of this host alone."""
        manifest = self._manifests.get(step)
        return [] if manifest is None else divide_files(manifest["files"], rank, size)

    def fetch(self, step: int, names: Iterable[str]) -> list[str]:
        """Download what is missing of a stored checkpoint; returns the problems. Nothing for one of this host alone."""
        manifest = self._manifests.get(step)
        if manifest is None or self._stored is None:
            return []
        path = checkpoint_path(self._folder, step)
        try:
            problems = [self._stored.download(step, manifest, name, path / name) for name in names]
        except OSError as error:
            return [str(error)]
        return [problem for problem in problems if problem]

    def find_missing_uploads(self, step: int, known: Collection[int]) -> list[tuple[dict[str, Any], bool]]:
        """Of this step and the best one here: the manifests of those that are not in the store, and which is the best.

        known: steps that are left out
        """
        best, result = record.read_best_step(self._folder), []
        for each in sorted({step, step if best is None else best} - set(known)):
            manifest, is_stored = self.read_manifest(each)
            if isinstance(manifest, dict) and not is_stored and "folder" in manifest:
                result.append((manifest, each == best))
        return result

    def read_best_step(self) -> int | None:
        """The step marked as the best one, here or in the store: the later of the two. Raises StoreError."""
        own = record.read_best_step(self._folder)
        if self._stored is None:
            return own
        try:
            stored = self._stored.read_best_step()
        except StoreError:
            if own is None:
                raise
            return own
        return max((step for step in (own, stored) if step is not None), default=None)


def divide_files(names: Collection[str], rank: int, size: int) -> list[str]:
    """The files that a rank reads to verify a checkpoint: of as many shards as ranks, its own."""
    shards = sorted(name for name in names if name != INDEX)
    return [*shards[rank::size], *([INDEX] if rank == 0 else [])]
