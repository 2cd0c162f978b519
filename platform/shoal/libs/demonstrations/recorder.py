"""Keeps the demonstrations and episodes of a gateway, and copies those that a run starts with.

| queue                    | capacity            | what blocks | who unblocks | close()                        |
|--------------------------|---------------------|-------------|--------------|--------------------------------|
| files for the store      | those of the folder | nothing     | the thread   | uploads for CLOSE_S, then ends  |
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from shoal.errors import ConfigError, InvalidSegment, RunError
from shoal.extend.rl import DemonstrationSite
from shoal.extend.runs import load
from shoal.libs.demonstrations.files import (
    EPISODES,
    FOLDER,
    SUFFIX,
    Demonstration,
    DemonstrationFiles,
    Info,
    open_files,
    open_shared,
)
from shoal.store import Mirror, Store, open_store
from shoal.wire import Segment

RETRY_S = 1.0
CLOSE_S = 10.0
_MARK = "copied-from"  # the source that a run has started with


class RecordedFolder:
    """Demonstrations or episodes of a policy, of `max_mb` and `newest` at most: beyond, the oldest go. Mirrored to
    `$SHOAL_STORE` in the background. Raises OSError."""

    def __init__(self, site: DemonstrationSite, folder: str, max_mb: float, newest: int | None = None) -> None:
        self.store = open_store(site.folder / folder)
        self.store.remove_drafts(0.0)  # of a gateway that was killed
        self._max_bytes = int(max_mb * 2**20)
        self._newest = newest
        self._num_bytes = 0
        self._stored: dict[str, tuple[Info, int]] = {}  # facts and bytes, the oldest first
        for name, (info, _) in DemonstrationFiles([self.store]).read_sound().items():
            self._add(name, info, self.store.find(name + SUFFIX).size_bytes)
        self._changed = deque(self._stored)  # names that are not mirrored yet
        self._uploaded: set[str] | None = None  # what the store had when this gateway began
        self._mirror: Mirror | None = None
        if (shared := open_shared(site.name, folder)) is not None:
            warning = f"{shared.url} takes nothing now"
            self._mirror = Mirror(folder, partial(self._upload, shared), retry_s=RETRY_S, warning=warning)
            self._mirror.wake()

    @property
    def infos(self) -> dict[str, Info]:
        return {name: info for name, (info, _) in self._stored.items()}

    def write(self, demonstration: Demonstration) -> None:
        payload = demonstration.to_bytes()
        self.store.write(demonstration.name + SUFFIX, payload)
        self._add(demonstration.name, demonstration.info, len(payload))
        changed = [demonstration.name]
        while len(self._stored) > 1 and (
            self._num_bytes > self._max_bytes or len(self._stored) > (self._newest or inf)
        ):
            changed.append(oldest := next(iter(self._stored)))
            self._num_bytes -= self._stored.pop(oldest)[1]
        self.store.delete(name + SUFFIX for name in changed[1:])
        if self._mirror is not None:
            self._changed += changed
            self._mirror.wake()

    def close(self) -> None:
        """Upload what the store lacks, for CLOSE_S at most. Idempotent."""
        if self._mirror is not None:
            self._mirror.close(CLOSE_S, is_patient=True)

    def __len__(self) -> int:
        return len(self._stored)

    def _add(self, name: str, info: Info, size_bytes: int) -> None:
        self._num_bytes += size_bytes - self._stored.pop(name, (info, 0))[1]
        self._stored[name] = info, size_bytes

    def _upload(self, shared: Store) -> None:
        """Upload what the store lacks, and delete there what is gone here."""
        if self._uploaded is None:
            self._uploaded = {each.key for each in shared.list_entries()}
        while self._changed:
            key = self._changed[0] + SUFFIX
            try:
                payload = self.store.read(key)
            except FileNotFoundError:
                shared.delete([key])
                self._uploaded.discard(key)
            else:
                if key not in self._uploaded:
                    shared.write(key, payload)
            self._changed.popleft()


class Recorder:
    """A DemonstrationRecorder in the folder of `site`, of at most `max_mb`."""

    def __init__(self, site: DemonstrationSite) -> None:
        self._files = RecordedFolder(site, FOLDER, site.spec.max_mb)

    def store(self, key: tuple[str, int], seq: int, segment: Segment, run_steps: int) -> None:
        self._files.write(Demonstration.of(key, seq, segment, run_steps))

    def get_counts(self) -> dict[str, int]:
        infos = self._files.infos.values()
        ended = sum(info.terminated or info.truncated for info in infos)
        return {"segments": len(infos), "steps": sum(info.num_steps for info in infos), "episodes": ended}

    def close(self) -> None:
        self._files.close()


def copy_source(site: DemonstrationSite) -> None:
    """Copy the demonstrations of `site.spec.source`, once in a run. Raises ConfigError."""
    source, target = site.spec.source, open_files(site)
    mark = target.stores[0]
    with suppress(FileNotFoundError):
        if mark.read(_MARK).decode() == source:
            return
    for name, each in read_source(site).items():
        payload = each.to_bytes()
        for store in target.stores:
            store.write(name + SUFFIX, payload)
    mark.write(_MARK, source.encode())


def read_source(site: DemonstrationSite) -> dict[str, Demonstration]:
    """Those of `site.spec.source`, by name, and the segments of its recorded episodes. Raises ConfigError where there
    are none, or one does not fit."""
    source = site.spec.source
    demonstrations = {
        name if len(pieces) == 1 else f"{name}-{index:04d}": piece
        for name, each in _open_source(site).read_sound().items()
        for pieces in [each.split()]
        for index, piece in enumerate(pieces)
    }
    field = "demonstrations.source"
    if not demonstrations:
        problem, remedy = "has no demonstrations", "name a run, or a folder of `shoal demonstrations RUN --out FOLDER`"
        raise ConfigError(field, source, problem, remedy)
    fitting = {}
    for name, each in demonstrations.items():
        try:
            fitting[name] = each.fit(site.experience)
        except InvalidSegment as error:
            problem = f"has {name}, which does not fit this run: {error.field}: {error.problem}"
            raise ConfigError(field, source, problem, "drop it there, or use a game of the same spaces") from None
    return fitting


def _open_source(site: DemonstrationSite) -> DemonstrationFiles:
    """Raises ConfigError."""
    source = site.spec.source
    path = Path(source).expanduser()
    if path.is_dir():
        return DemonstrationFiles([open_store(path)])
    name, _, rest = source.rpartition("/")
    source, folder = (name, EPISODES) if rest == EPISODES else (source, FOLDER)
    try:
        run = load(source)
    except RunError as error:
        raise ConfigError("demonstrations.source", source, str(error), "name a run, RUN/episodes or a folder") from None
    policy = site.name.partition("/")[2]  # of a run with several
    if policy and (run.folder / policy).is_dir():
        return open_files(replace(site, folder=run.folder / policy, name=f"{run.id}/{policy}"), folder)
    return open_files(replace(site, folder=run.folder, name=run.id), folder)
