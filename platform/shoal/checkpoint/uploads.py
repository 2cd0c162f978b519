"""The way of finished checkpoints from this host's disk to the store, in the background.

Every rank uploads its shard; the first one then waits until all shards are in the store, and uploads the manifest. The
ranks communicate only when the training thread saves or ends, so that an upload makes no step wait. Called by
`checkpointer`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint.coordination import CheckpointGroup
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.stored import StoredCheckpoints
from shoal.errors import StoreError, summarize_error

POLL_S = 0.5
MAX_TRIES = 2  # at the end of a run
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Upload(NamedTuple):
    """One rank's part of a checkpoint that is complete on the disk.

    folder:  with the files
    names:   of the files that this rank uploads
    attempt: names the upload in the store
    keep:    how many of the newest the store retains, in addition to the best one
    """

    step: int
    folder: Path
    names: Sequence[str]
    attempt: str
    best: bool
    keep: int


class UploadQueue:
    """What is uploaded next, the same on every rank, one list after the other, in a thread that no exit waits for.

    While an upload is in flight, later checkpoints wait, but only the newest and the best of them: a store that is
    slower than the checkpoints come delays nothing. What failed waits with them. `add` and `finish` are collective.

    failure: why the last upload failed; "" once one has succeeded
    """

    def __init__(self, stored: StoredCheckpoints, ranks: CheckpointGroup) -> None:
        self._stored, self._ranks = stored, ranks
        self._running: tuple[Upload, ...] = ()
        self._waiting: tuple[Upload, ...] = ()
        self._is_started = True  # the thread has `_running`
        self._thread = threading.Thread()  # of the last list
        self._own_failure = ""  # of that, on this rank
        self._given_up = threading.Event()  # on the first rank: it waits no longer for the shards of others
        self._since: int | None = None  # the step last loaded or uploaded
        self.failure = ""

    @property
    def steps(self) -> tuple[int, ...]:
        """What is in flight or waits."""
        return tuple(each.step for each in (*self._running, *self._waiting))

    def add(self, upload: Upload, previous: int | None) -> None:
        """Plan the upload of a checkpoint that is about to be written; `start` begins it.

        previous: the step last saved or loaded: later ones are of an abandoned timeline
        """
        is_busy, _ = self._poll()
        current = [each for each in self._waiting if previous is None or each.step <= previous]
        self._waiting = _choose_uploads([*current, upload])
        if not is_busy:
            self._running = self._waiting
            self._waiting = ()
            self._is_started = False

    def start(self) -> None:
        """The checkpoint is written."""
        if not self._is_started:
            self._is_started = True
            self._begin()

    def resume_from(self, step: int, missing: Sequence[Upload]) -> None:
        """This step was loaded: later ones are of an abandoned timeline.

        missing: what an earlier process could not upload
        """
        self._since = step
        if self._ranks.is_first:  # what is in the store now is of this timeline or of an abandoned one
            with suppress(StoreError):  # then the abandoned one stays there
                self._stored.list_steps()
        if missing:
            self._waiting = _choose_uploads([*self._waiting, *missing])

    def cancel(self, step: int) -> None:
        """The checkpoint could not be written."""
        planned = (*(() if self._is_started else self._running), *self._waiting)
        self._waiting = tuple(each for each in planned if each.step != step)
        if not self._is_started:
            self._running, self._is_started = (), True

    def finish(self, timeout_s: float) -> str:
        """Upload all that waits, and wait for it; what fails is tried again. Returns why it failed, or ""."""
        deadline_s = time.monotonic() + timeout_s
        for attempt in range(1 + MAX_TRIES):
            if attempt:
                self._running, self._waiting = self._waiting, ()
                self._begin()
            is_busy = True
            while is_busy:
                if self._thread.is_alive():
                    self._thread.join(POLL_S)
                is_busy, is_late = self._poll(is_late=time.monotonic() > deadline_s)
                if is_busy and is_late:
                    self.failure = f"the upload has not ended within {timeout_s:g} s"
                    return self.failure
            if not self._waiting:
                return ""
        return self.failure

    def _poll(self, *, is_late: bool = False) -> tuple[bool, bool]:
        """Whether any rank is busy, and whether any is late. What has ended is noted."""
        mine = int(self._thread.is_alive()), int(bool(self._own_failure)), int(is_late)
        is_busy, has_failed, late = self._ranks.all_reduce_max(*mine)
        if has_failed or late:
            self._given_up.set()
        if not is_busy and self._running:
            self.failure = ""
            if has_failed:
                self.failure = "; ".join(filter(None, self._ranks.all_gather(self._own_failure)))
                self._waiting = _choose_uploads([*self._running, *self._waiting])
            self._running = ()
        return bool(is_busy), bool(late)

    def _begin(self) -> None:
        self._own_failure = ""
        self._given_up.clear()
        self._thread = threading.Thread(target=self._run, args=(self._running,), name="checkpoint upload", daemon=True)
        self._thread.start()

    # -- the thread that uploads ---------------------------------------------------------------------------------

    def _run(self, uploads: Sequence[Upload]) -> None:
        for each in uploads:
            try:
                self._upload_one(each)
            except Exception as error:  # noqa: BLE001 - the top of a thread: the ranks report it when they save
                self._own_failure = f"step {each.step}: {summarize_error(error)}"
                return

    def _upload_one(self, upload: Upload) -> None:
        for name in upload.names:
            self._stored.upload(upload.step, upload.attempt, upload.folder / name)
        if not self._ranks.is_first:
            return
        manifest = (upload.folder / MANIFEST).read_bytes()
        pause_s = _FIRST_PAUSE_S
        while missing := self._stored.find_missing(upload.step, upload.attempt, json.loads(manifest)["files"]):
            if self._given_up.wait(pause_s):
                raise StoreError(f"{', '.join(missing)} cannot be seen in {self._stored.url}")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._stored.publish(upload.step, manifest, best=upload.best)
        self._stored.delete_old(upload.step, upload.keep, self._since)
        self._since = upload.step


def _choose_uploads(uploads: Sequence[Upload]) -> tuple[Upload, ...]:
    """The newest checkpoint and the newest best one, oldest first; of one step the last."""
    by_step = {each.step: each for each in uploads}
    newest = max(by_step)
    best = max((step for step, each in by_step.items() if each.best), default=newest)
    return tuple(by_step[step] for step in sorted({best, newest}))
