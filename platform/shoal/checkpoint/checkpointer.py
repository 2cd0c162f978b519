"""Checkpoints of a sharded state: every rank writes its part in the background; they appear completely or not at all.

    FOLDER/step-000000123/shard-00002-of-00004.safetensors    the chunks of rank 2
    FOLDER/step-000000123/index.json       the place of each chunk; all values except tensors; `extras`; `per_rank`
    FOLDER/step-000000123/manifest.json    written last: step, time, world size, plan, size and SHA-256 of every file
    FOLDER/best.json                       the step that is retained in addition to the newest ones

With a store, they are uploaded from there in the background (`uploads`, `stored`). Called by the Trainer, on every rank
at the same points of the program. Needs a store, or a folder shared by all ranks. Never unpickles files; knows nothing
of models and optimisers. docs/architecture/checkpoints.md has the format.
"""

from __future__ import annotations

import contextlib
import operator
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
from torch.distributed.checkpoint.planner import SavePlan

from shoal.checkpoint import manifest as record
from shoal.checkpoint.coordination import CheckpointGroup
from shoal.checkpoint.directory import checkpoint_path, draft_path
from shoal.checkpoint.json_state import Leaf, decode, encode, flatten
from shoal.checkpoint.manifest import INDEX, SaveJob
from shoal.checkpoint.shard_plan import (
    assign_shards,
    build_index,
    describe_tensors,
    fill_tensors,
    find_leftovers,
    find_misfit,
    make_save_plan,
    plan_reads,
    shard_name,
)
from shoal.checkpoint.sources import CheckpointSources, divide_files, probe_folder, require_durable
from shoal.checkpoint.staging_buffer import DirectStaging, StagingBuffer, has_cuda
from shoal.checkpoint.stored import StoredCheckpoints
from shoal.checkpoint.uploads import Upload, UploadQueue
from shoal.errors import CheckpointError, Closed, ConfigError, ShoalError, SpecMismatch
from shoal.store import Store

T = TypeVar("T")


class Found(NamedTuple):
    """A fully verified checkpoint. `damaged`: newer ones that were skipped, each with the reason."""

    step: int
    path: Path
    world_size: int
    plan: str
    damaged: list[str]


class Extras(NamedTuple):
    """The further arguments of `save`. `own` is this rank's of `per_rank`, if the number of ranks is the same.

    absent: the names of `may_lack` that the checkpoint lacks
    """

    step: int
    extras: dict[str, Any]
    per_rank: list[dict[str, Any]]
    own: dict[str, Any] | None
    absent: frozenset[str]


class Checkpointer:
    """Saves and loads, together with the same object on all other ranks.

    keep:         the number of newest checkpoints to retain, in addition to the best one
    asynchronous: whether `save` returns as soon as the state is copied, which takes host memory of its size
    timeout_s:    how long to wait for another rank, and for a save in flight
    store:        where checkpoints outlive this host; `folder` has them first, and what could not be uploaded

    | saves in flight | one                                                         |
    | what blocks     | every method, while one is in flight: so a second save too; |
    |                 | `wait_until_copied` no longer than it says                  |
    | who unblocks    | the background thread when it has ended; else `timeout_s`   |
    | close()         | waits for it, then ends thread and group                    |

    With several ranks every method is called on all of them, in the same order: a save that failed is an error on each.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        timeout_s: float = 300.0,
        store: Store | None = None,
    ) -> None:
        if keep < 1:
            raise ConfigError("keep", keep, "is less than one checkpoint", "keep at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self.asynchronous = asynchronous
        self._timeout_s = timeout_s
        self._ranks = CheckpointGroup(timeout_s)
        self._token: str = self._ranks.broadcast(uuid.uuid4().hex[:8])
        self._visibility = probe_folder(self.folder, self._ranks, self._token)
        self._store, stored = store, None if store is None else StoredCheckpoints(store)
        self._sources = CheckpointSources(self.folder, stored)
        self._uploads = None if stored is None else UploadQueue(stored, self._ranks)
        self._num_saves = 0
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._outline: tuple[Any, ...] | None = None
        self._staging: StagingBuffer | None = None
        self._index: dict[str, Any] = {}  # of the tensors; on the first rank
        self._in_flight: Future[None] | None = None
        # The step last loaded or saved: any steps between it and the next belong to another timeline.
        self._previous_step: int | None = None
        self._closed = False

    def require_durable(self) -> None:
        """Raises ConfigError, on every rank, when ranks on several hosts have neither a store nor a shared folder."""
        require_durable(self.folder, self._store, self._ranks, self._visibility, self._token)

    def prepare(self, state: dict[str, Any]) -> None:
        """Plan and allocate for such a state, so that the first `save` is as fast as the later ones."""
        self.wait()
        with self._report_rejection():
            tensors = _select_tensors(flatten(state))
        self._prepare_staging(tensors, step=0)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        extras: Mapping[str, Any] | None = None,
        *,
        per_rank: Mapping[str, Any] | None = None,
        plan: str = "",
        best: bool = False,
        later: Collection[str] = (),
    ) -> None:
        """Write `state` as step `step`. When it returns, the state is copied and may change, except `later`.

        step:     0 or more
        state:    nested dicts and lists of tensors, DTensors, numbers and strings; values with one name on several
                  ranks must be equal, and are written once
        extras:   numbers, strings, lists, dicts and small tensors of the first rank
        per_rank: the same, saved for every rank (random states)
        plan:     a description, stored with it
        best:     retain this one as the best, in place of the previous best, even when `keep` newer ones exist
        later:    top-level names that are copied in the background: they must not change before `wait_until_copied`

        Raises CheckpointError when the previous save failed (this one is then not started), RankLost, and ConfigError
        for a state or step that cannot be saved. With `asynchronous=False`, also when this one failed.
        """
        self.wait()
        with self._report_rejection():
            try:
                step = operator.index(step)  # numbers of NumPy and torch, for JSON
            except TypeError:
                raise ConfigError("step", step, "is no whole number") from None
            if step >= 2**63:
                raise ConfigError("step", step, "is beyond the whole numbers of 64 bits")
            if step < 0:
                raise ConfigError("step", step, "is below 0", "count from 0, or from 1")
            leaves = flatten(state)
            tensors = _select_tensors(leaves)
            values = {name: encode(leaf.value, name) for name, leaf in leaves.items() if name not in tensors}
            notes = (encode(dict(extras or {}), "extras"), encode(dict(per_rank or {}), "per_rank"))
        staging = self._prepare_staging(tensors, step)
        staging.start_copy(tensors, later)
        self._in_flight = self._writer.submit(self._write, self._plan_job(step, plan, best, values, notes), staging)
        if not self.asynchronous:
            self.wait()

    def _plan_job(self, step: int, plan: str, best: bool, values: dict[str, Any], notes: tuple[Any, Any]) -> SaveJob:
        self._num_saves += 1
        attempt = f"{self._token}-{self._num_saves}"
        target, since = checkpoint_path(self.folder, step), self._previous_step
        draft = draft_path(self.folder, step, attempt)
        if self._uploads is None:
            return SaveJob(step, draft, target, plan, best, self.keep, since, values, *notes)
        if step in self._uploads.steps:  # its files are being read
            self._uploads.finish(self._timeout_s)
        names = [shard_name(self._ranks.rank, self._ranks.size), *([INDEX] if self._ranks.is_first else [])]
        self._uploads.add(Upload(step, target, names, attempt, best, self.keep), since)
        pinned = frozenset(self._uploads.steps)
        return SaveJob(step, draft, target, plan, best, self.keep, since, values, *notes, attempt, pinned)

    @property
    def is_saving(self) -> bool:
        """Whether this rank is still writing the last `save`."""
        return self._in_flight is not None and not self._in_flight.done()

    @property
    def is_idle(self) -> bool:
        """Whether there is no `save` to wait for."""
        return self._in_flight is None

    def wait_until_copied(self) -> None:
        """Wait until the full state of the last `save` may change. Raises CheckpointError after `timeout_s`."""
        staging = self._staging if self._in_flight is not None else None
        if staging is not None and not staging.wait_until_copied(self._timeout_s):
            raise CheckpointError(f"the state was not copied within {self._timeout_s:g} s")

    def wait(self) -> None:
        """Wait until no save is in flight. Raises CheckpointError, once, when it failed."""
        if self._closed:
            raise Closed("the checkpointer is closed")
        flying, self._in_flight = self._in_flight, None
        if flying is None:
            return
        try:
            flying.result(self._timeout_s if self.asynchronous else None)  # without a copy the state may not change
        except NotYet:
            self._in_flight = flying
            raise CheckpointError(f"a save in {self.folder} has not ended within {self._timeout_s:g} s") from None

    @property
    def upload_failure(self) -> str:
        """Why the last upload failed; "" if it did not, or without a store."""
        return "" if self._uploads is None else self._uploads.failure

    def finish_uploads(self, timeout_s: float) -> None:
        """Wait until every checkpoint to be retained is in the store; what failed is tried again.

        Raises CheckpointError, on every rank, naming the steps that are not in the store after `timeout_s`.
        """
        self.wait()
        if self._uploads is None:
            return
        if failure := self._uploads.finish(timeout_s):
            found = self._uploads.steps
            steps = f"step{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
            where = f"only in {self.folder} on {', '.join(sorted(set(self._visibility.hosts)))}"
            assert self._store is not None
            problem = f"the checkpoints of {steps} are not in {self._store.url}, {where} ({failure})"
            raise CheckpointError(f"{problem}: resume the run there when the store can be used")

    def latest(self) -> Found | None:
        """The newest intact checkpoint; None if there is none at all.

        Raises CheckpointError when there are checkpoints, but none is intact, or a newer Shoal wrote one.
        """
        self.wait()
        self._finish_reading()
        damaged: list[str] = []
        for step in self._read_on_first(lambda: self._sources.list_steps(is_shared=self._visibility.is_shared)):
            checked = self._verify(step)
            if isinstance(checked, Found):
                return checked._replace(damaged=damaged)
            damaged.append(f"{checkpoint_path(self.folder, step).name}: {checked}")
        if damaged:
            raise CheckpointError(f"no checkpoint in {self._shown_folder} can be read: {'; '.join(damaged)}")
        return None

    def find(self, step: int) -> Found:
        """The checkpoint of that step. Raises CheckpointError when there is none or when it is damaged."""
        self.wait()
        self._finish_reading()
        checked = self._verify(step)
        if isinstance(checked, Found):
            return checked
        name = checkpoint_path(self.folder, step).name
        raise CheckpointError(f"{name} in {self._shown_folder} cannot be used: {checked}")

    def best(self) -> Found | None:
        """The checkpoint last saved as the best one, or None. Raises CheckpointError."""
        step = self.best_step()
        return None if step is None else self.find(step)

    def best_step(self) -> int | None:
        """The step of that checkpoint, without verifying it. Raises CheckpointError as `wait` does."""
        self.wait()
        return self._read_on_first(self._sources.read_best_step)

    def load(self, found: Found, state: dict[str, Any], may_lack: Collection[str] = ()) -> Extras:
        """Fill `state` in place; its tensors may be sharded differently and over another number of ranks.

        The checkpoint must have every entry of the state, except top-level names in `may_lack`. Every checkpoint entry
        under a top-level name of some rank's state must be in some rank's state. Raises SpecMismatch naming the first
        entry that does not fit, before anything is changed, and CheckpointError.
        """
        self.wait()
        index = self._ranks.broadcast(record.read_index(found.path) if self._ranks.is_first else {})
        if isinstance(index, str):
            raise CheckpointError(f"{found.path.name}: {index}")
        known = {name.partition(".")[0] for name in [*index["tensors"], *index["values"]]}
        absent = frozenset(may_lack) - known
        leaves = flatten({name: part for name, part in state.items() if name not in absent})
        tensors = _select_tensors(leaves)
        here = f"{found.path.name} (plan {found.plan!r}, {found.world_size} ranks)"
        held = self._ranks.all_gather((list(state), list(leaves), find_misfit(index, leaves, tensors, here)))
        misfit = next((one for _, _, one in held if one), None) or find_leftovers(index, held, found.path.name)
        if misfit is not None:
            raise SpecMismatch(*misfit)
        problem = ""
        try:
            reads = plan_reads(index["tensors"], tensors)
            verified = {
                name
                for rank in self._visibility.ranks
                for name in self._sources.get_share(found.step, rank, self._ranks.size)
            }
            needed = {chunk.file for _, chunk in reads} - verified  # else it was verified elsewhere
            if problems := self._sources.fetch(found.step, sorted(needed)):
                raise CheckpointError(f"{found.path.name}: {'; '.join(problems)}")
            fill_tensors(found.path, reads, tensors)
        except CheckpointError as error:
            problem = str(error)
        if problem := next(filter(None, self._ranks.all_gather(problem)), ""):
            raise CheckpointError(problem)
        for name in leaves.keys() - tensors.keys():
            leaves[name].container[leaves[name].key] = decode(index["values"][name])
        self._previous_step = found.step
        if self._uploads is not None:
            self._uploads.resume_from(found.step, self._find_missing_uploads(found.step, self._uploads))
        per_rank = [decode(one) for one in index["per_rank"]]
        own = per_rank[self._ranks.rank] if len(per_rank) == self._ranks.size else None
        return Extras(found.step, decode(index["extras"]), per_rank, own, absent)

    def close(self) -> None:
        """Wait for a save in flight and release everything. Idempotent. Raises CheckpointError when that save
        failed."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._writer.shutdown(wait=False)
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        with contextlib.ExitStack() as stack:
            if error is not None:  # more important than the outcome of the last save
                stack.enter_context(contextlib.suppress(CheckpointError))
            self.close()

    @contextlib.contextmanager
    def _report_rejection(self) -> Iterator[None]:
        """Around checks of this rank's state: the other ranks learn of a failure when they plan."""
        try:
            yield
        except ConfigError:
            self._ranks.all_reduce_max(1, 0, 0, 0)
            raise

    def _prepare_staging(self, tensors: dict[str, torch.Tensor], step: int) -> StagingBuffer:
        """The save plans of all ranks, computed again only when the state has changed on any rank."""
        now = describe_tensors(tensors)
        failed, changed, newest, oldest = self._ranks.all_reduce_max(0, int(now != self._outline), step, -step)
        if failed:
            raise CheckpointError(f"step {step} cannot be saved: another rank's state does not allow it")
        if newest != -oldest:
            raise CheckpointError(f"ranks save different steps at the same time: {-oldest} and {newest}")
        if changed or self._staging is None:
            plan: SavePlan | ConfigError
            try:
                plan = make_save_plan(tensors)
            except ConfigError as error:
                plan = error
            plans = self._ranks.all_gather(plan)
            if rejection := next((one for one in plans if isinstance(one, ShoalError)), None):
                raise rejection
            layouts = assign_shards([one for one in plans if isinstance(one, SavePlan)])  # the same on every rank
            files = [shard_name(rank, self._ranks.size) for rank in range(self._ranks.size)]
            self._index = build_index([one for one in plans if isinstance(one, SavePlan)], layouts, files)
            layout, old = layouts[self._ranks.rank], self._staging
            copied = self.asynchronous
            self._staging = StagingBuffer(layout, has_cuda(tensors), old) if copied else DirectStaging(layout)
            self._outline = now
        return self._staging

    def _write(self, job: SaveJob, staging: StagingBuffer) -> None:
        """In the background thread: write this rank's shard, then, together, the rest of the checkpoint."""
        staging.finish_copy()
        name = shard_name(self._ranks.rank, self._ranks.size)
        written = record.write_shard(job, name, staging.iter_blocks())
        reason: str | None = None
        if gathered := self._ranks.gather(written):
            reason = record.commit(job, self._index, gathered)
        reason = self._ranks.broadcast(reason)
        if reason:
            if self._uploads is not None:
                self._uploads.cancel(job.step)
            if self._is_leader:
                shutil.rmtree(job.draft, ignore_errors=True)
            raise CheckpointError(f"step {job.step} could not be saved in {self.folder}: {reason}")
        if 0 not in self._visibility.ranks:
            record.commit_shard(job, name, is_leader=self._is_leader)
        self._previous_step = job.step
        if self._uploads is not None:
            self._uploads.start()

    def _find_missing_uploads(self, step: int, uploads: UploadQueue) -> list[Upload]:
        """Of this step and the best one: what an earlier process has left in a folder that all ranks see."""
        if not self._visibility.is_shared:
            return []
        missing = self._read_on_first(lambda: self._sources.find_missing_uploads(step, uploads.steps))
        return [
            Upload(
                manifest["step"],
                checkpoint_path(self.folder, manifest["step"]),
                divide_files(manifest["files"], self._ranks.rank, self._ranks.size),
                manifest["folder"],
                is_best,
                self.keep,
            )
            for manifest, is_best in missing
        ]

    @property
    def _is_leader(self) -> bool:
        """Whether this rank cleans up, of those that see its folder."""
        return min(self._visibility.ranks) == self._ranks.rank

    @property
    def _shown_folder(self) -> str:
        return str(self.folder if self._store is None else self._store.url)

    def _finish_reading(self) -> None:
        """Before reading what other hosts write: only the store has all of it."""
        if self._uploads is not None and not self._visibility.is_shared:
            self._uploads.finish(self._timeout_s)

    def _read_on_first(self, read: Callable[[], T]) -> T:
        """What the first rank reads, on every rank. Raises CheckpointError, on every rank, for an OSError there."""
        result: T | None = None
        problem = ""
        if self._ranks.is_first:
            try:
                result = read()
            except OSError as error:
                problem = f"the checkpoints in {self._shown_folder} cannot be read: {error}"
        result, problem = self._ranks.broadcast((result, problem))
        if problem:
            raise CheckpointError(problem)
        return cast("T", result)

    def _verify(self, step: int) -> Found | str:
        """The checkpoint, or its problem. The ranks share the reading."""
        manifest, is_stored = self._read_on_first(lambda: self._sources.read_manifest(step))
        if isinstance(manifest, record.NewerFormat):
            raise CheckpointError(manifest)
        if isinstance(manifest, str):
            return manifest
        self._sources.remember(step, manifest, is_stored=is_stored)
        mine = divide_files(manifest["files"], self._ranks.rank, self._ranks.size)
        wrong = self._ranks.all_gather(self._sources.find_damages(step, manifest, mine))
        reasons = [reason for of_rank in wrong for reason in of_rank]
        if reasons:
            return "; ".join(reasons)
        path = checkpoint_path(self.folder, step)
        return Found(manifest["step"], path, manifest["world_size"], manifest["plan"], [])


def _select_tensors(leaves: Mapping[str, Leaf]) -> dict[str, torch.Tensor]:
    return {name: leaf.value for name, leaf in leaves.items() if isinstance(leaf.value, torch.Tensor)}
