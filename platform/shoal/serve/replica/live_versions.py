"""Selects the version of a live model that answers on one replica: the newest, until it proves bad.

Owned by a served model. The follower's thread adds versions (`take`), forward threads reject them, the event loop
applies plans (`apply`). A lock guards the selection; it is free while versions load or compute. Knows neither the
source of weights nor the origin of plans.

The newest version is on trial and falls back to the previous one, which stays loaded. A rejected version is not taken
again. A few older versions are retained as received bytes, so that an administrator can return to them. While the
newest has a share alongside a pinned version, it falls back to the pinned one.

`LiveFollower` keeps the selection up to date with the run and the controller's plan, on the event loop; a thread
fetches new weights. Weights that the run has replaced, but the endpoint still needs, come from the controller, which
has them from a replica.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import ConnectionLost, WeightsError
from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.messages.replica_report import MAX_REJECTED, ModelReport, RejectedVersion, truncate_reason
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.replica.fallback_predictor import FallbackPredictor
from shoal.serve.replica.model_statistics import ForwardTimes
from shoal.serve.replica.version_router import Answering, get_version
from shoal.serve.replica.watchers import RETRY_S, ControllerClient, WeightFollower
from shoal.serve.spec.model_options import GuardOptions
from shoal.weights import WeightSnapshot, WeightSource

RETRY_AFTER_S = (0.2, 1.0)  # a load that failed
OLDER_EVERY_S = 30.0  # between retained older versions
logger = logging.getLogger(__name__)


class LiveVersionSelector:
    """The versions of one model on one replica.

    load:      loads a version; raises WeightsError for one that does not fit or cannot answer an example
    point:     called at every change of the answering versions
    forwards:  how long versions have taken
    num_older: the number of retained versions in addition to the two loaded ones
    changed:   called, in any thread, when there is something to report
    """

    def __init__(
        self,
        guard: GuardOptions,
        load: Callable[[WeightSnapshot], LoadedModel],
        point: Callable[[Answering], None],
        forwards: ForwardTimes,
        num_older: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._guard = guard
        self._load = load
        self._point = point
        self._forwards = forwards
        self._clock = clock
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._trial: FallbackPredictor | None = None
        self._older: deque[WeightSnapshot] = deque(maxlen=num_older)
        self._answering = Answering(None)
        self._plan = ModelPlan("", "", {})
        self._rejected: dict[int, RejectedVersion] = {}  # by this replica, in this attempt
        self._is_refused = False  # a version arrived before any could answer, and was not taken

    @property
    def version(self) -> int:
        """The version that answers by default; 0 before the first."""
        return get_version(self._answering.stable)

    @property
    def _candidate(self) -> int:
        return get_version(self._answering.candidate)

    def report(self) -> ModelReport:
        """The versions' part of the report to the controller."""
        with self._lock:
            staged = {each.version for each in self._answering.loaded} | {each.version for each in self._older}
            return ModelReport(self.version, self._candidate, tuple(sorted(staged)), tuple(self._rejected.values()))

    # -- available versions ----------------------------------------------------------------------------------------

    def take(self, snapshot: WeightSnapshot) -> bool:
        """Answer with a version of the run from the next batch on; returns whether it does. Raises WeightsError."""
        if not self._is_wanted(snapshot.version):
            self._tell_if_stuck()
            return False
        try:
            loaded = self._load_version(snapshot)
        except WeightsError as error:
            with self._lock:
                self._reject(snapshot.version, str(error))
                self._is_refused = True
            self.changed()
            raise
        with self._lock:
            is_wanted, is_first = self._is_wanted(snapshot.version), self._trial is None
            if is_wanted:
                self._replace_trial(loaded)
        if not is_wanted:
            self._tell_if_stuck()
        elif is_first:
            self.changed()
        return is_wanted

    def put(self, snapshot: WeightSnapshot) -> None:
        """Answer with an older version, or one that the controller retained, if the plan wants it. Raises
        WeightsError."""
        loaded, version = self._load_version(snapshot), snapshot.version
        with self._lock:
            if version != self.version and version in (self._plan.pinned, self._missing()):
                newest = self._trial.now if self._trial else None
                is_shared = self._plan.candidate and version == self._plan.pinned
                if is_shared and newest is not None and not self._is_rejected(newest.version):
                    self._try(newest, loaded)
                else:
                    self._try(loaded, None)
        self.changed()

    def _load_version(self, snapshot: WeightSnapshot) -> LoadedModel:
        """Load a version. Raises WeightsError for any failure; serving continues.

        Weights that do not fit say so by a WeightsError. Any other error may be of this moment, as when memory is
        short, and would reject the version for all replicas: it must come thrice.
        """
        for pause_s in (*RETRY_AFTER_S, None):
            try:
                loaded = self._load(snapshot)
                loaded.snapshot = snapshot
                return loaded
            except WeightsError:
                raise
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                if pause_s is None:
                    raise WeightsError(problem) from error
                logger.warning("version %d failed to load, once more: %s", snapshot.version, truncate_reason(problem))
                time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def missing(self) -> int:
        """The version that the plan needs and that must be loaded or fetched from the controller; 0 for none."""
        with self._lock:
            return self._missing()

    def apply(self, plan: ModelPlan) -> None:
        """Apply the controller's plan, as far as its versions are available."""
        with self._lock:
            shared = self._shared()
            if plan.attempt != self._plan.attempt:
                self._rejected = {}
            self._plan = plan
            for snapshot in [older for older in self._older if older.version in plan.rejected]:
                self._older.remove(snapshot)
            trial = self._trial
            if trial is None:
                return
            before = trial.before
            if plan.pinned and (shared is None or self._shared() is None):
                there = next((each for each in self._answering.loaded if each.version == plan.pinned), shared)
                if there is not None:  # else the answering version stays until the pinned one arrives
                    self._try(there, None)
            elif before is not None and before is not self._shared() and before.version in plan.rejected:
                self._try(trial.now, None)
            elif before is not None and trial.version in plan.rejected:
                self._try(before, None)
            self._tell()

    def snapshot(self, version: int) -> WeightSnapshot | None:
        """The weights of an available version; None for another."""
        with self._lock:
            snapshots = [*(each.snapshot for each in self._answering.loaded), *self._older]
            return next((snapshot for snapshot in snapshots if snapshot.version == version), None)

    @property
    def is_resting(self) -> bool:
        """Whether no new version would be taken. A pinned version may still be loading; the answering one stays until
        then."""
        plan = self._plan
        return plan.is_frozen or (plan.pinned > 0 and self.version > 0 and self._shared() is None)

    def _is_wanted(self, version: int) -> bool:
        if version in (self.version, self._candidate) or self._is_rejected(version):
            return False
        return not self.is_resting or (version == self._plan.pinned and not self._plan.is_frozen)

    def _is_rejected(self, version: int) -> bool:
        return version in self._rejected or version in self._plan.rejected

    def _tell_if_stuck(self) -> None:
        if not self._trial and not self._is_refused:
            self._is_refused = True
            self.changed()

    def _missing(self) -> int:
        """The version to load, from the controller if it is not available here."""
        plan = self._plan
        if plan.pinned != self.version and any(older.version == plan.pinned for older in self._older):
            return plan.pinned
        if not plan.is_retained or self.version == plan.retained:
            return 0
        has_none_better = self._is_rejected(self.version) if self._trial else self._is_refused
        return plan.retained if plan.pinned == plan.retained or has_none_better else 0

    # -- selection --------------------------------------------------------------------------------------------------

    def _shared(self) -> LoadedModel | None:
        """The pinned version, if available, while the run's newest should have a share alongside it."""
        trial, plan = self._trial, self._plan
        if trial is None or not plan.candidate:
            return None
        pinned = trial.before or trial.now
        return pinned if pinned.version == plan.pinned else None

    def _replace_trial(self, loaded: LoadedModel) -> None:
        """Put a version on trial, before the newest one that has answered a request, or else the first.

        Retains the replaced version, if it is long enough after the last retained one, also if it has answered no
        request: the previous one that has may be as old as the last request.
        """
        trial = self._trial
        before = self._shared()
        older = self._older
        if trial is not None:
            is_rejected = self._is_rejected(trial.version)
            if before is None:
                before = trial.now if trial.is_proven and not is_rejected else trial.before
            last = trial.now.snapshot
            if not is_rejected and (not older or last.published_at - older[-1].published_at >= OLDER_EVERY_S):
                older.append(last)
        self._try(loaded, before)

    def _try(self, now: LoadedModel, before: LoadedModel | None) -> None:
        def reject(rejected: FallbackPredictor, reason: str) -> None:  # in a forward's thread
            with self._lock:
                if rejected is not self._trial:  # another version is on trial by now
                    return
                self._reject(rejected.version, reason)
            logger.error("version %d is rejected for version %d: %s", rejected.version, self.version, reason)
            self.changed()

        self._trial = FallbackPredictor(now, before, self._guard, self._forwards, reject, self._clock)
        self._tell()

    def _tell(self) -> None:
        """Let the version on trial answer, alone or alongside the pinned one."""
        trial = self._trial
        assert trial is not None  # of a model with a version
        loaded = tuple(filter(None, (trial.now, trial.before)))
        answering = Answering(trial, loaded=loaded)
        if trial.before is not None and self._shared() is not None:
            answering = Answering(trial.before, trial, self._plan.shares, loaded)
        self._answering = answering
        self._point(answering)

    def _reject(self, version: int, reason: str) -> None:
        trial = self._trial
        has_answered = trial is not None and trial.version == version
        if has_answered and trial is not None and trial.before is not None:
            self._try(trial.before, None)
        rejected = RejectedVersion(version, truncate_reason(reason), self._plan.attempt, self.version, has_answered)
        self._rejected[version] = rejected
        if len(self._rejected) > MAX_REJECTED:
            del self._rejected[min(self._rejected)]


class LiveFollower:
    """Follows one model until close(); `thread` takes the weights of the run.

    changed: called on the event loop when there is something to report
    """

    def __init__(
        self,
        name: str,
        versions: LiveVersionSelector,
        weights: WeightSource,
        controller: ControllerClient,
        plan: ModelPlan,
        changed: Callable[[], None],
    ) -> None:
        self._name = name
        self._versions = versions
        self._controller = controller
        self._changed = changed
        self._plan = plan
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        versions.changed = self._tell
        versions.apply(plan)
        self.thread = WeightFollower(weights, versions.take)
        self.apply(plan)

    @property
    def has_polled(self) -> bool:
        """Whether what the run had published, if anything, was taken or rejected, and no version is to be fetched."""
        return self.thread.has_polled and not self._versions.missing()

    def has(self, plan: ModelPlan) -> bool:
        """Whether it answers with the pinned version, if that is available."""
        return not plan.pinned or not plan.is_retained or self._versions.version == plan.pinned

    def apply(self, plan: ModelPlan) -> None:
        """Apply the controller's plan: at once if the version is loaded, else once it arrives."""
        is_again = plan.attempt != self._plan.attempt
        self._plan = plan
        self._versions.apply(plan)
        self._rest(is_again)
        self._poll()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop following; waits up to `timeout_s` for the thread. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        self.thread.close(timeout_s)

    def _rest(self, is_again: bool = False) -> None:
        """Pause the run's thread while no version would be taken, and resume with the newest weights afterwards."""
        is_resting = self._versions.is_resting
        if is_resting != self.thread.is_paused or is_again:
            self.thread.set_paused(is_resting)

    def _tell(self) -> None:
        """Notify the event loop. Callable from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._poll)
            self._loop.call_soon_threadsafe(self._changed)

    def _poll(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._exchange())

    async def _exchange(self) -> None:
        """Send the controller the weights it should retain, and fetch the missing ones."""
        while True:
            plan = self._plan
            try:
                if missing := self._versions.missing():
                    snapshot = self._versions.snapshot(missing)
                    snapshot = snapshot or await self._controller.fetch_weights(self._name, missing)
                    if snapshot is not None:  # else another version is retained by now, as the next plan shows
                        try:
                            await asyncio.to_thread(self._versions.put, snapshot)
                        except WeightsError as error:
                            logger.error("older weights are rejected, serving continues: %s", error)
                        self._rest()
                is_wanted = plan.retained and not plan.is_retained
                if is_wanted and (snapshot := self._versions.snapshot(plan.retained)) is not None:
                    await self._controller.store_weights(self._name, snapshot)
            except ConnectionLost as error:
                logger.debug("the controller is away, serving continues: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:
                logger.exception("%s: weights could not be exchanged with the controller", self._name)
                return  # the next plan or local change tries again
            if plan is self._plan:
                return
