"""Checkpoints of a sharded state: every rank writes its part in the background; they appear completely or not at all.

    FOLDER/step-000000123/shard-00002-of-00004.safetensors    the chunks of rank 2
    FOLDER/step-000000123/index.json       the place of each chunk; all values except tensors; `extras`; `per_rank`
    FOLDER/step-000000123/manifest.json    written last: step, time, world size, plan, size and SHA-256 of every file
    FOLDER/best.json                       the step that is retained in addition to the newest ones

Called by the Trainer, on every rank at the same points of the program. Needs a folder shared by all ranks. Never
unpickles files; knows nothing of models and optimisers. docs/checkpoints.md has the format.
"""

from __future__ import annotations

import contextlib
import operator
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch.distributed.checkpoint.planner import SavePlan

from shoal.checkpoint import manifest as record
from shoal.checkpoint import shard_reader
from shoal.checkpoint.coordination import CheckpointGroup
from shoal.checkpoint.directory import checkpoint_path, draft_path, list_newest_first
from shoal.checkpoint.json_state import DTYPE_NAMES, Leaf, decode, encode, flatten
from shoal.checkpoint.manifest import SaveJob
from shoal.checkpoint.shard_plan import assign_shards, build_index, describe_tensors, make_save_plan, plan_reads
from shoal.checkpoint.staging_buffer import StagingBuffer, has_cuda
from shoal.errors import CheckpointError, Closed, ConfigError, ShoalError, SpecMismatch


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
    asynchronous: whether `save` returns as soon as the state is copied
    timeout_s:    how long to wait for another rank, and for a save in flight

    | saves in flight | one                                                         |
    | what blocks     | every method, while one is in flight: so a second save too; |
    |                 | `wait_until_copied` no longer than it says                  |
    | who unblocks    | the background thread when it has ended; else `timeout_s`   |
    | close()         | waits for it, then ends thread and group                    |

    With several ranks every method is called on all of them, in the same order: a save that failed is an error on each.
    """

    def __init__(
        self, folder: Path | str, *, keep: int = 2, asynchronous: bool = True, timeout_s: float = 300.0
    ) -> None:
        if keep < 1:
            raise ConfigError("keep", keep, "is less than one checkpoint", "keep at least 1")
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        self._timeout_s = timeout_s
        self._ranks = CheckpointGroup(timeout_s)
        self._token: str = self._ranks.broadcast(uuid.uuid4().hex[:8])
        self._num_saves = 0
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._outline: tuple[Any, ...] | None = None
        self._staging: StagingBuffer | None = None
        self._index: dict[str, Any] = {}  # of the tensors; on the first rank
        self._in_flight: Future[None] | None = None
        self._previous_path: Path | None = (
            None  # the step last loaded or saved: any steps between it and the next belong to another timeline
        )
        self._closed = False

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
            step = _as_int(step)
            if step < 0:
                raise ConfigError("step", step, "is below 0", "count from 0, or from 1")
            leaves = flatten(state)
            tensors = _select_tensors(leaves)
            values = {name: encode(leaf.value, name) for name, leaf in leaves.items() if name not in tensors}
            notes = (encode(dict(extras or {}), "extras"), encode(dict(per_rank or {}), "per_rank"))
        staging = self._prepare_staging(tensors, step)
        staging.start_copy(tensors, later)
        self._num_saves += 1
        draft = draft_path(self.folder, step, f"{self._token}-{self._num_saves}")
        job = SaveJob(
            step, draft, checkpoint_path(self.folder, step), plan, best, self.keep, self._previous_path, values, *notes
        )
        self._in_flight = self._writer.submit(self._write, job, staging)
        if not self.asynchronous:
            self.wait()

    @property
    def is_saving(self) -> bool:
        """Whether this rank is still writing the last `save`."""
        return self._in_flight is not None and not self._in_flight.done()

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
            flying.result(self._timeout_s)
        except NotYet:
            self._in_flight = flying
            raise CheckpointError(f"a save in {self.folder} has not ended within {self._timeout_s:g} s") from None

    def latest(self) -> Found | None:
        """The newest intact checkpoint; None if there is none at all.

        Raises CheckpointError when there are checkpoints, but none is intact, or a newer Shoal wrote one.
        """
        self.wait()
        damaged: list[str] = []
        for path in self._ranks.broadcast(list_newest_first(self.folder) if self._ranks.is_first else []):
            found = self._verify(path)
            if isinstance(found, Found):
                return found._replace(damaged=damaged)
            damaged.append(f"{path.name}: {found}")
        if damaged:
            raise CheckpointError(f"no checkpoint in {self.folder} can be read: {'; '.join(damaged)}")
        return None

    def find(self, step: int) -> Found:
        """The checkpoint of that step. Raises CheckpointError when there is none or when it is damaged."""
        self.wait()
        path = checkpoint_path(self.folder, step)
        found = self._verify(path)
        if isinstance(found, Found):
            return found
        raise CheckpointError(f"{path.name} in {self.folder} cannot be used: {found}")

    def best(self) -> Found | None:
        """The checkpoint last saved as the best one, or None. Raises CheckpointError."""
        step = self.best_step()
        return None if step is None else self.find(step)

    def best_step(self) -> int | None:
        """The step of that checkpoint, without verifying it. Raises CheckpointError as `wait` does."""
        self.wait()
        return self._ranks.broadcast(record.read_best_step(self.folder))

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
        held = self._ranks.all_gather((list(state), list(leaves), _find_misfit(index, leaves, tensors, found)))
        misfit = next((one for _, _, one in held if one), None) or _find_leftovers(index, held, found)
        if misfit is not None:
            raise SpecMismatch(*misfit)
        trouble = ""
        try:
            shard_reader.fill_tensors(found.path, plan_reads(index["tensors"], tensors), tensors)
        except CheckpointError as error:
            trouble = str(error)
        if trouble := next(filter(None, self._ranks.all_gather(trouble)), ""):
            raise CheckpointError(trouble)
        for name in leaves.keys() - tensors.keys():
            leaves[name].container[leaves[name].key] = decode(index["values"][name])
        self._previous_path = found.path
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
            plans = self._ranks.all_gather(_plan_or_error(tensors))
            if error := next((one for one in plans if isinstance(one, ShoalError)), None):
                raise error
            layouts = assign_shards([one for one in plans if isinstance(one, SavePlan)])  # the same on every rank
            files = [shard_reader.shard_name(rank, self._ranks.size) for rank in range(self._ranks.size)]
            self._index = build_index([one for one in plans if isinstance(one, SavePlan)], layouts, files)
            self._staging = StagingBuffer(layouts[self._ranks.rank], has_cuda(tensors), self._staging)
            self._outline = now
        return self._staging

    def _write(self, job: SaveJob, staging: StagingBuffer) -> None:
        """In the background thread: write this rank's shard, then, together, the rest of the checkpoint."""
        staging.finish_copy()
        name = shard_reader.shard_name(self._ranks.rank, self._ranks.size)
        written = record.write_shard(job, name, staging.iter_blocks())
        reason: str | None = None
        if gathered := self._ranks.gather(written):
            reason = record.commit(job, self._index, gathered)
        reason = self._ranks.broadcast(reason)
        if reason:
            raise CheckpointError(f"step {job.step} could not be saved in {self.folder}: {reason}")
        self._previous_path = job.target

    def _verify(self, path: Path) -> Found | str:
        """The checkpoint, or its problem. The ranks share the reading."""
        manifest = self._ranks.broadcast(record.read_manifest(path) if self._ranks.is_first else "")
        if isinstance(manifest, record.NewerFormat):
            raise CheckpointError(manifest)
        if isinstance(manifest, str):
            return manifest
        mine = sorted(manifest["files"])[self._ranks.rank :: self._ranks.size]
        wrong = self._ranks.all_gather(record.find_damages(path, {name: manifest["files"][name] for name in mine}))
        reasons = [reason for of_rank in wrong for reason in of_rank]
        if reasons:
            return "; ".join(reasons)
        return Found(manifest["step"], path, manifest["world_size"], manifest["plan"], [])


def _as_int(step: int) -> int:
    """Convert numbers of NumPy and torch for JSON. Raises ConfigError for a step that the ranks cannot compare."""
    try:
        whole = operator.index(step)
    except TypeError:
        raise ConfigError("step", step, "is no whole number") from None
    if whole >= 2**63:
        raise ConfigError("step", step, "is beyond the whole numbers of 64 bits")
    return whole


def _select_tensors(leaves: Mapping[str, Leaf]) -> dict[str, torch.Tensor]:
    return {name: leaf.value for name, leaf in leaves.items() if isinstance(leaf.value, torch.Tensor)}


def _plan_or_error(tensors: Mapping[str, torch.Tensor]) -> SavePlan | ConfigError:
    try:
        return make_save_plan(tensors)
    except ConfigError as error:
        return error


Misfit = tuple[str, object, str, str]  # the arguments of SpecMismatch


def _find_misfit(
    index: Mapping[str, Any], leaves: Mapping[str, Leaf], tensors: Mapping[str, torch.Tensor], found: Found
) -> Misfit | None:
    """The first entry of this rank's state that the checkpoint cannot fill."""
    here = f"{found.path.name} (plan {found.plan!r}, {found.world_size} ranks)"
    for name in leaves:
        tensor = tensors.get(name)
        other = "tensors" if tensor is None else "values"
        if tensor is None and name in index["values"]:
            continue
        saved = index["tensors"].get(name)
        if name in index[other]:
            kind = "a tensor" if tensor is None else "not a tensor"
            return name, str(type(leaves[name].value).__name__), f"is {kind} in {here}", "load it into the same model"
        if tensor is None or saved is None:
            return name, "", f"is not in {here}", "load it into the same model and optimiser"
        held = (DTYPE_NAMES.get(tensor.dtype), list(tensor.shape), tensor.is_meta)
        if held != (saved["dtype"], saved["shape"], False):
            what = f"{'meta ' * tensor.is_meta}{tensor.dtype} {list(tensor.shape)}"
            return name, what, f"is {saved['dtype']} {saved['shape']} in {here}", "load it into the same model"
    return None


def _find_leftovers(
    index: Mapping[str, Any], stored: Sequence[tuple[list[str], list[str], Misfit | None]], found: Found
) -> Misfit | None:
    """The first entry of the checkpoint without a place in the state, which has places for others of its kind."""
    tops = tuple({f"{top}." for tops, _, _ in stored for top in tops})
    names = {name for _, names, _ in stored for name in names}
    for name in [*index["tensors"], *index["values"]]:
        if name not in names and name.startswith(tops):
            remedy = "load it into the same model and optimiser, whose state torch makes at its first step"
            return name, "", f"is in {found.path.name}, but the state has no place for it", remedy
    return None
