"""Checkpoints in a store: those of one run, which any host may read.

    step-000000123/ATTEMPT/shard-00002-of-00004.safetensors    uploaded by rank 2; ATTEMPT is another for each save
    step-000000123/ATTEMPT/index.json
    step-000000123/manifest.json     uploaded last, by rank 0: names ATTEMPT and the SHA-256 of each file
    best.json

A checkpoint exists if its manifest does. No object is overwritten while a manifest names it, so that an upload that
ends at any byte leaves the earlier checkpoints complete. Called by `sources` and `uploads`; does not communicate.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.atomic_file import make_folder
from shoal.checkpoint import manifest as record
from shoal.checkpoint.directory import FileChecksum, checkpoint_path, choose_removed, find_damage, parse_step
from shoal.checkpoint.manifest import BEST, MANIFEST
from shoal.errors import CheckpointError
from shoal.home import file_lock, home
from shoal.store import Store, open_shared_store, store_url, update

DOWNLOAD_TIMEOUT_S = 3600.0  # of another process on this host that downloads the same file


def open_run_store(run_id: str) -> Store | None:
    """Where the checkpoints of this run lie in `$SHOAL_STORE`; None if that is not set, or is `$SHOAL_HOME`.

    Raises ConfigError for an invalid one, and CheckpointError for a folder that cannot be created.
    """
    url = store_url()
    if not run_id:
        return None
    try:
        store = open_shared_store(home(), url)
        return None if store is None else store.open_folder(f"runs/{run_id}/checkpoints")
    except OSError as error:
        raise CheckpointError(f"the store {url} cannot be used ({error}): correct SHOAL_STORE") from error


class StoredCheckpoints:
    """The checkpoints below `store`. Every method raises StoreError when it cannot be reached.

    Retention deletes what `list_steps` has shown, and what was uploaded here: a process that was taken for dead may
    come back, and must delete nothing of the one that has resumed the run since.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.url = store, store.url
        self._known: set[str] = set()  # STEP/manifest.json and STEP/ATTEMPT

    def list_steps(self) -> list[int]:
        """The steps that have a manifest, newest first."""
        keys = self._list_keys()
        self._known.update(map(_parent, keys))
        return sorted(self._find_steps(keys), reverse=True)

    def read_manifest(self, step: int) -> dict[str, Any] | str:
        """The manifest's content, or its problem."""
        try:
            payload = self.store.read(f"{_name(step)}/{MANIFEST}")
        except FileNotFoundError:
            return "there is no such checkpoint"
        return record.parse_manifest(payload, Path(_name(step)))

    def read_best_step(self) -> int | None:
        """The step last marked as the best one, if its checkpoint exists."""
        try:
            noted = record.parse_best(self.store.read(BEST))
        except FileNotFoundError:
            return None
        if noted is None:
            return None
        manifest = self.read_manifest(noted.step)
        return noted.step if isinstance(manifest, dict) and noted.is_of(manifest) else None

    def upload(self, step: int, attempt: str, path: Path) -> None:
        """Upload one file of a save. Raises OSError."""
        self._known.add(f"{_name(step)}/{attempt}")
        self.store.write(f"{_name(step)}/{attempt}/{path.name}", path)

    def find_missing(self, step: int, attempt: str, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The files of a save that are not in the store, or not with their size."""
        folder = f"{_name(step)}/{attempt}"
        sizes = {entry.key: entry.size_bytes for entry in self.store.list_entries(folder)}
        return [name for name, one in files.items() if sizes.get(f"{folder}/{name}") != one["size_bytes"]]

    def publish(self, step: int, manifest: bytes, *, best: bool) -> None:
        """Make a checkpoint of files that were uploaded; one of the same step is replaced."""
        self._known.add(f"{_name(step)}/{MANIFEST}")
        update(self.store, f"{_name(step)}/{MANIFEST}", lambda found: None if found == manifest else manifest)
        if best:
            self.store.write(BEST, record.format_best(step, json.loads(manifest)["sha256"]))

    def delete_old(self, newest: int, keep: int, since: int | None) -> None:
        """Retain what `choose_removed` says, and the best one; delete the rest, and files without a manifest."""
        keys = [key for key in self._list_keys() if _parent(key) in self._known]
        complete = sorted(self._find_steps(keys), reverse=True)
        best = self.read_best_step()
        removed = choose_removed(complete, newest, keep, () if best is None else (best,), since)
        self.store.delete([f"{_name(step)}/{MANIFEST}" for step in removed])  # first: then the rest is a leftover
        self.store.delete(self._find_leftovers(keys, set(complete) - set(removed)))

    def _find_leftovers(self, keys: Iterable[str], retained: set[int]) -> list[str]:
        files: dict[int, list[str]] = {}
        for key in keys:
            if (step := parse_step(key.partition("/")[0])) >= 0 and not key.endswith(f"/{MANIFEST}"):
                files.setdefault(step, []).append(key)
        result = []
        for step, listed in files.items():
            attempts = {key.split("/")[1] for key in listed}
            if step in retained and len(attempts) > 1:
                manifest = self.read_manifest(step)
                if isinstance(manifest, str):  # damaged: which of them it names is unknown
                    continue
                attempts.discard(manifest["folder"])
            elif step in retained:
                continue
            result += [key for key in listed if key.split("/")[1] in attempts]
        return result

    def download(self, step: int, manifest: Mapping[str, Any], name: str, path: Path) -> str:
        """Make `path` the file `name` of a checkpoint, unless it is; returns the problem, "" if there is none.

        Of several processes on this host one downloads it.
        """
        expected = FileChecksum(**manifest["files"][name])
        make_folder(path.parent)
        busy = TimeoutError(f"{path} is being downloaded by another process")
        with file_lock(path.with_name(f".{name}.lock"), DOWNLOAD_TIMEOUT_S, busy):
            if not find_damage(path, expected):
                return ""
            draft = path.with_name(f".{name}-{secrets.token_hex(4)}")
            try:
                found = self.store.download(f"{_name(step)}/{manifest['folder']}/{name}", draft)
                if found != expected.sha256 and (problem := find_damage(draft, expected)):
                    return problem.replace(draft.name, f"{name} in {self.url}")
                draft.replace(path)
            except FileNotFoundError:
                return f"{name} is not in {self.url}"
            finally:
                draft.unlink(missing_ok=True)
        return ""

    def clear(self) -> None:
        """Delete all of it."""
        keys = self._list_keys()
        self.store.delete(key for key in keys if key.endswith(f"/{MANIFEST}"))
        self.store.delete(keys)

    def _list_keys(self) -> list[str]:
        return [entry.key for entry in self.store.list_entries()]

    def _find_steps(self, keys: Iterable[str]) -> set[int]:
        names = (key.partition("/") for key in keys)
        return {step for name, _, rest in names if rest == MANIFEST and (step := parse_step(name)) >= 0}


def _parent(key: str) -> str:
    """STEP/ATTEMPT of a file of a save; the key itself of a manifest."""
    return "/".join(key.split("/")[:2])


def _name(step: int) -> str:
    return checkpoint_path(Path(), step).name
