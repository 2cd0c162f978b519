"""The store's copy of checkpoints that are one file, as `files.save` writes them.

Called by the learner, which runs in one process. The newest checkpoint is uploaded in the background; those that come
while another is in flight are skipped, but for the last one.
"""

from __future__ import annotations

import json
import secrets
import threading
from pathlib import Path

from shoal.atomic_file import write_synced
from shoal.checkpoint.directory import FileChecksum, checkpoint_path, list_newest_first, parse_step
from shoal.checkpoint.manifest import MANIFEST, build_manifest
from shoal.checkpoint.stored import StoredCheckpoints
from shoal.errors import CheckpointError, StoreError, summarize_error

STATE = "state.pt"


class CheckpointMirror:
    """The newest `keep` checkpoints of `folder`, in a store.

    failure: why the last upload failed; "" if it did not
    """

    def __init__(self, stored: StoredCheckpoints, folder: Path, keep: int) -> None:
        self._stored = stored
        self._folder = folder
        self._keep = keep
        self._token = secrets.token_hex(4)
        self._next: Path | None = None
        self._lock = threading.Lock()  # guards `_next` and `_thread`
        self._thread: threading.Thread | None = None
        self.failure = ""

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
                    content = {"format": 1, "step": step, "time": manifest["time"], **manifest["files"][STATE]}
                    write_synced(path / MANIFEST, json.dumps(content).encode())
        except StoreError as error:
            if own >= 0:
                return
            problem = str(error)
        if problem:
            raise CheckpointError(f"no checkpoint can be read from {self._stored.url}: {problem}")

    def add(self, path: Path) -> None:
        """Upload this checkpoint, which is the newest."""
        with self._lock:
            self._next = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint upload", daemon=True)
                self._thread.start()

    def finish(self, timeout_s: float) -> str:
        """Wait until the newest one is in the store. Returns why it is not; "" if it is."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return f"the upload to {self._stored.url} has not ended within {timeout_s:g} s"
        return self.failure

    def _run(self) -> None:
        while True:
            with self._lock:
                path, self._next = self._next, None
                if path is None:
                    self._thread = None
                    return
            try:
                step, content = parse_step(path.name), json.loads((path / MANIFEST).read_bytes())
                files = {STATE: FileChecksum(content["size_bytes"], content["sha256"])}
                self._stored.upload(step, self._token, path / STATE)
                self._stored.publish(step, build_manifest(step, files, folder=self._token), best=False)
                self._stored.delete_old(step, self._keep, None)
                self.failure = ""
            except Exception as error:  # noqa: BLE001 - the top of a thread: the learner reports it when it saves
                self.failure = f"{path.name} is only in {self._folder}: {summarize_error(error)}"
