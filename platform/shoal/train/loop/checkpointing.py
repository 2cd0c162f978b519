"""The durable state of a training run: when to save it, its contents, and restoring it.

Owns the contents of a checkpoint (network, optimiser, average, data position, random states, progress). Called by the
Trainer, on every rank at the same step. `shoal.checkpoint` writes the files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import Checkpointer, Extras, Found
from shoal.errors import CheckpointError, NotFinite
from shoal.parallel import World
from shoal.parallel.state import gradients
from shoal.random_state import get_random_state, set_random_state
from shoal.runs.record.event_log import EventLog
from shoal.store import Store
from shoal.train.loop.components import AVERAGE, OUTER_MOMENTUM, TrainComponents
from shoal.train.spec import CheckpointSpec

NUM_REPORTS = 16
COPIED_LATER = ("optimizer", AVERAGE)  # only the optimiser's step changes these; a forward pass may change the network


@dataclass
class TrainProgress:
    """The progress of a run, over all its attempts; JSON-able.

    step:         finished steps of the optimiser
    elapsed_s:    of training and evaluation
    training_s:   of training alone
    evaluated:    the step of the last evaluation, whose results are `metrics`
    policy:       the state of the StopPolicy
    callbacks:    those of the callbacks, in order
    reports:      the last ones, as (step, values, Unix time): a dying cluster may lose them before they are recorded,
                  while the checkpoint survives; so a resumed run repeats them
    """

    step: int = 0
    elapsed_s: float = 0.0
    training_s: float = 0.0
    evaluated: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    reports: list[tuple[Any, ...]] = field(default_factory=list)

    def report(self, step: int, values: dict[str, float], journal: EventLog) -> None:
        """Log `values`, and remember them for a resume."""
        journal.log(step, values)
        self.reports = [*self.reports[1 - NUM_REPORTS :], (step, values, time.time())]


@dataclass(frozen=True)
class Restored:
    """`damaged` names the newer checkpoints that were skipped, each with the reason."""

    progress: TrainProgress
    damaged: list[str]


class CheckpointManager:
    """The checkpoints of one run, on this rank."""

    def __init__(
        self,
        spec: CheckpointSpec,
        assembly: TrainComponents,
        world: World,
        folder: Path,
        journal: EventLog,
        store: Store | None = None,
    ) -> None:
        self._spec = spec
        self._components = assembly
        self._world = world
        self._event_log = journal
        self._checkpointer = Checkpointer(folder, keep=spec.keep, asynchronous=spec.asynchronous, store=store)
        self._is_upload_failing = False
        self._saved_step = -1
        self._saved_elapsed_s = 0.0
        self._uncommitted: dict[str, Any] | None = None  # the data position of a checkpoint on its way to the disk

    def restore(self) -> Restored | None:
        """Restore everything from the newest good checkpoint; None if there is none. Collective.

        Raises ConfigError, on every rank, when not all of them can read what others save.
        """
        self._checkpointer.require_durable()
        newest = self._checkpointer.latest()
        if newest is None:  # without a copy to allocate memory for, the optimiser need not have its state yet
            is_copied = self._spec.asynchronous
            self._checkpointer.prepare(self._components.state() if is_copied else self._components.network_state())
            return None
        state = self._components.state(to_fill=True)
        extras = self._load(newest, state)
        self._components.load_state(state)
        if self._components.average is not None and AVERAGE in extras.absent:
            self._event_log.record_event("average_begun", step=newest.step)
        own = extras.own["position"] if extras.own else None  # None: the number of ranks has changed
        self._components.training.load_state_dict(extras.extras["position"] if own is None else own["data"])
        self._components.load_counts(extras.extras["counts"])
        # The waiting samples belong to this rank's share of the data.
        if own is not None and newest.plan == self._components.degrees.description:
            self._components.load_selective(own)
        elif self._components.selective is not None:
            self._event_log.record_event("selective_backprop_emptied", step=newest.step, plan=newest.plan)
        if extras.own is not None:  # otherwise the number of ranks has changed, and each has its own random state
            set_random_state(extras.own["random"])
        self._checkpointer.prepare(self._components.state())
        progress = TrainProgress(**extras.extras["progress"])
        self._saved_step, self._saved_elapsed_s = progress.step, progress.elapsed_s
        return Restored(progress, newest.damaged)

    def _load(self, found: Found, state: dict[str, Any]) -> Extras:
        """Fill `state`; entries that the checkpoint lacks are removed from it."""
        extras = self._checkpointer.load(found, state, may_lack=(AVERAGE, OUTER_MOMENTUM))
        for name in extras.absent & state.keys():
            del state[name]
        return extras

    def is_due_after(self, elapsed_s: float) -> bool:
        """Whether a checkpoint is due by time; the same on all ranks, given the same synchronised time."""
        return self._spec.every_steps is None and elapsed_s - self._saved_elapsed_s >= self._spec.every_s

    def save(self, progress: TrainProgress, *, best: bool = False, must: bool = False) -> None:
        """Save the present state, unless that was done at this step. Collective.

        On a disk error training goes on: the error is reported as an event, and the next due checkpoint retries. With
        `must`, and at the end, the CheckpointError is raised.

        Raises NotFinite, on all ranks or none, for weights that are not finite, since resuming from them is useless;
        and PlanError for buffers that differ between ranks.
        """
        if self._saved_step == progress.step and not best:
            return
        # A gradient may have corrupted them in a step with a finite loss; the next step would show it too late.
        names = self._world.gather(find_not_finite(self._components.model.named_parameters()))
        if (name := next((each for each in names if each is not None), None)) is not None:
            raise NotFinite(f"the weight {name}", progress.step, None, self.describe_newest())
        self._components.model.check_buffers()
        self.wait()  # for the previous one, whose failure is reported but does not stop this one
        parts = self._components
        own = {"random": get_random_state(), "position": parts.get_rank_position()}
        extras = {"progress": asdict(progress), "position": parts.training.state_dict(), "counts": parts.get_counts()}
        state, plan = parts.state(), parts.degrees.description
        self._event_log.flush()
        try:
            self._checkpointer.save(
                progress.step, state, extras, per_rank=own, plan=plan, best=best, later=COPIED_LATER
            )
        except CheckpointError as error:
            self._report_failed_save(error, progress.step, must)
        else:
            self._saved_step = progress.step
            self._uncommitted = extras["position"] if parts.training.is_stream else None
        self._report_upload()
        self._saved_elapsed_s = progress.elapsed_s

    @property
    def is_idle(self) -> bool:
        """Whether `wait_until_copied` has nothing to wait for."""
        return self._checkpointer.is_idle and self._uncommitted is None

    def wait_until_copied(self) -> None:
        """Wait until the optimiser may step: the rest of the state is copied while the gradients are computed."""
        self._checkpointer.wait_until_copied()
        if self._uncommitted is not None and not self._checkpointer.is_saving:
            self.wait()  # not at all: one process reads a stream

    def wait(self, *, must: bool = False) -> None:
        """Wait until the last checkpoint is on the disk. Collective."""
        try:
            self._checkpointer.wait()
        except CheckpointError as error:
            lost = self._saved_step
            self._saved_step = -1
            self._uncommitted = None
            self._report_failed_save(error, lost if lost >= 0 else None, must)
        self._commit()

    def finish_uploads(self, timeout_s: float) -> None:
        """Wait until the checkpoints are in the store. Collective. Raises CheckpointError naming those that are not."""
        try:
            self._checkpointer.finish_uploads(timeout_s)
        finally:
            self._report_upload()

    def _report_upload(self) -> None:
        """Report a store that cannot be used once, and once that it can be again."""
        failure = self._checkpointer.upload_failure
        if failure and not self._is_upload_failing:
            self._event_log.record_event("upload_failed", error=failure)
        elif self._is_upload_failing and not failure:
            self._event_log.record_event("upload_recovered")
        self._is_upload_failing = bool(failure)

    def _commit(self) -> None:
        """Tell the data what is on the disk."""
        if self._uncommitted is not None:
            self._components.training.commit(self._uncommitted)
            self._uncommitted = None

    def describe_newest(self) -> str | None:
        """The newest good checkpoint as a text for a message, or None. Collective."""
        try:
            self.wait()
            newest = self._checkpointer.latest()
        except CheckpointError:
            return None
        return str(newest.path) if newest is not None else None

    def best_step(self) -> int | None:
        """The step retained as the best one, or None. Collective."""
        self.wait()
        return self._checkpointer.best_step()

    def load_best(self) -> TrainProgress | None:
        """Load the network that was saved as the best one; None if there is none. Collective."""
        best = self._checkpointer.best()
        if best is None:
            return None
        state = self._components.network_state()
        extras = self._load(best, state)
        self._components.load_network_state(state)
        return TrainProgress(**extras.extras["progress"])

    def close(self) -> None:
        """Release the checkpointer. Idempotent."""
        try:
            self._checkpointer.close()
        except CheckpointError as error:
            self._uncommitted = None
            self._report_failed_save(error, None, must=False)
        self._commit()

    def _report_failed_save(self, error: CheckpointError, step: int | None, must: bool) -> None:
        if must:
            raise error
        self._event_log.record_event("checkpoint_failed", step=step, error=str(error))


def find_not_finite(parameters: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """The name of the first parameter with a NaN or infinite value in this rank's part, or None.

    Checks norms, which takes a tenth of the time, and synchronises with the device once. A norm may overflow without
    an infinite value: then the values decide.
    """
    parts = {name: gradients.to_local(each.detach()) for name, each in parameters if each.requires_grad}
    if not parts:
        return None
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(parts.values()))])
    suspects = [name for name, is_finite in zip(parts, norms.isfinite().tolist(), strict=True) if not is_finite]
    return next((name for name in suspects if not bool(parts[name].isfinite().all())), None)
