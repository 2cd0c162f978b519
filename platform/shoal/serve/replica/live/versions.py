"""Which version of a live model answers in one replica: the newest of its run, until it turns out to be bad.

Owned by a hosted model. The follower's thread brings versions (`take`), forward threads ask for answers (`predict`),
the event loop says what the controller wants (`apply`); a lock that nobody holds while loading or computing guards who
answers. Knows neither where weights come from nor who decides.

The version before is held beside the one that answers, for as long as that does: a batch at which the newer one fails
is answered by the older one, and then it is known whom to blame, the version or what was asked. What is left is not
taken again. A few older versions are held too, for hands to go back to: as the bytes that came.

While the newest of the run has a share beside a pinned version, it is the newest that is on trial, and the pinned one
that stands before it, whichever newer ones come.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from shoal.errors import InferenceError, WeightsError
from shoal.serve.controller.canary_guard import NUM_COMPARED, Tried, judge_live, latency_ratio
from shoal.serve.messages.desired_state import LivePlan
from shoal.serve.messages.inference import Arrays
from shoal.serve.messages.replica_report import MAX_REJECTED_VERSIONS, LiveReport, RejectedVersion, truncate_reason
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.replica.forward_times import ForwardTimes
from shoal.serve.replica.live.trial import Answered, Answering, Held, Trial
from shoal.serve.spec.model_options import GuardOptions
from shoal.weights import WeightSnapshot

OLDER_EVERY_S = 30.0  # between the publications of older versions that are held
logger = logging.getLogger(__name__)


class LiveVersions:
    """Of one model in one replica.

    load:      makes a version ready; raises WeightsError for one that does not fit, or cannot answer an example
    flip:      told of every change of who answers
    forwards:  how long versions have taken
    num_older: how many versions are held beside these two
    changed:   called, in any thread, when there is something to report
    """

    def __init__(
        self,
        guard: GuardOptions,
        load: Callable[[WeightSnapshot], LoadedModel],
        flip: Callable[[Answering], None],
        forwards: ForwardTimes,
        num_older: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._guard, self._load, self._flip, self._forwards, self._clock = guard, load, flip, forwards, clock
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._trial: Trial | None = None
        self._stable: Held | None = None  # what is pinned, while the newest has a share beside it
        self._older: deque[WeightSnapshot] = deque(maxlen=num_older)
        self._plan = LivePlan()
        self._left: dict[int, RejectedVersion] = {}  # by itself, in this era
        self._is_refused = False  # something came before there was a version to answer with, and was not taken

    @property
    def version(self) -> int:
        """The version that answers who asks for nothing else; 0 before the first."""
        stable, trial = self._stable, self._trial
        if stable is not None:
            return stable.version
        return trial.now.version if trial else 0

    def report(self) -> LiveReport:
        """What the controller is told."""
        with self._lock:
            held = {held.version for held in self._all_held()} | {older.version for older in self._older}
            return LiveReport(self._plan.era, tuple(sorted(held)), tuple(self._left.values()), self._candidate())

    # -- what is there to answer with -------------------------------------------------------------------------------

    def take(self, snapshot: WeightSnapshot) -> bool:
        """Answer with a version of the run from the next batch on; whether it does. Raises WeightsError."""
        if not self._is_wanted(snapshot.version):
            self._tell_if_stuck()
            return False
        try:
            held = self._loaded(snapshot)
        except WeightsError as error:
            with self._lock:
                self._leave(snapshot.version, str(error))
                self._is_refused = True
            self.changed()
            raise
        with self._lock:
            is_wanted, is_first = self._is_wanted(snapshot.version), self._trial is None
            if is_wanted:
                before = self._to_go_back_to()
                self._hold_on_to_the_last()
                self._answer_with(held, before)
        if not is_wanted:
            self._tell_if_stuck()
        elif is_first:
            self.changed()
        return is_wanted

    def put(self, snapshot: WeightSnapshot) -> None:
        """Answer with an older version, or one that the controller had kept, if that is wanted. Raises WeightsError."""
        held = self._loaded(snapshot)
        with self._lock:
            if held.version != self.version and held.version in (self._plan.pinned, self._missing()):
                newest = self._trial.now if self._trial else None
                self._answer_with(held, None)
                self._set_beside()
                if self._stable is held and newest is not None and not self._is_left(newest.version):
                    self._answer_with(newest, held)
        self.changed()

    def _loaded(self, snapshot: WeightSnapshot) -> Held:
        """Raises WeightsError whatever goes wrong: what serves goes on serving."""
        try:
            return Held(self._load(snapshot), snapshot)
        except WeightsError:
            raise
        except Exception as error:
            raise WeightsError(f"{type(error).__name__}: {error}") from error

    def missing(self) -> int:
        """The version to load, to do what the controller wants, and to ask it for if it is not held; 0 for none."""
        with self._lock:
            return self._missing()

    def apply(self, plan: LivePlan) -> None:
        """Do what the controller wants, as far as that is held."""
        with self._lock:
            if plan.era != self._plan.era:
                self._left = {}
            self._plan = plan
            self._forget_older(plan.left)
            self._set_beside()
            trial = self._trial
            if trial is not None and plan.pinned and self._stable is None:
                self._answer_with_held(plan.pinned)
                self._set_beside()
            elif trial is not None:
                if trial.before is not None and trial.before is not self._stable and trial.before.version in plan.left:
                    trial = self._answer_with(trial.now, None)
                if trial.now.version in plan.left and trial.before is not None:
                    self._answer_with(trial.before, None)

    def held(self, version: int) -> WeightSnapshot | None:
        """The weights of a version that is held."""
        with self._lock:
            snapshots = [*(held.snapshot for held in self._all_held()), *self._older]
            return next((snapshot for snapshot in snapshots if snapshot.version == version), None)

    @property
    def is_resting(self) -> bool:
        """Whether nothing new would be taken. What is pinned may be on its way: until then, what answers stays."""
        plan = self._plan
        return plan.frozen or (plan.pinned > 0 and self.version > 0 and self._stable is None)

    def _is_wanted(self, version: int) -> bool:
        if version in (self.version, self._candidate()) or self._is_left(version):
            return False
        return not self.is_resting or (version == self._plan.pinned and not self._plan.frozen)

    def _is_left(self, version: int) -> bool:
        return version in self._left or version in self._plan.left

    def _tell_if_stuck(self) -> None:
        if not self._trial and not self._is_refused:
            self._is_refused = True
            self.changed()

    def _missing(self) -> int:
        """The version that is to be loaded, and that the controller has if it is not held."""
        plan = self._plan
        if plan.pinned != self.version and any(older.version == plan.pinned for older in self._older):
            return plan.pinned
        if not plan.is_kept or self.version == plan.kept:
            return 0
        has_none_better = self._is_left(self.version) if self._trial else self._is_refused
        return plan.kept if plan.pinned == plan.kept or has_none_better else 0

    def _to_go_back_to(self) -> Held | None:
        """The newest version that has answered something, when another comes; or else the first."""
        trial = self._trial
        if trial is None or self._stable is not None:
            return self._stable
        return trial.now if trial.is_proven and not self._is_left(trial.now.version) else trial.before

    def _all_held(self) -> list[Held]:
        trial = self._trial
        return [held for held in (trial.now, trial.before) if held is not None] if trial else []

    def _hold_on_to_the_last(self) -> None:
        """Another version is to answer: keep this one, if it comes long enough after the one kept last.

        Whether anybody has asked it or not: the one before that has answered may be as old as the last request.
        """
        trial = self._trial
        if trial is None or self._is_left(trial.now.version):
            return
        last, older = trial.now.snapshot, self._older
        if not older or last.published_at - older[-1].published_at >= OLDER_EVERY_S:
            older.append(last)

    def _forget_older(self, versions: Collection[int]) -> None:
        for snapshot in [older for older in self._older if older.version in versions]:
            self._older.remove(snapshot)

    def _answer_with_held(self, version: int) -> None:
        for held in self._all_held():
            if held.version == version:
                self._answer_with(held, None)

    def _answer_with(self, now: Held, before: Held | None) -> Trial:
        trial = self._trial = Trial(now, before, self._guard.min_requests)
        self._tell_who_answers(trial)
        return trial

    def _tell_who_answers(self, trial: Trial) -> None:
        now, before, stable = trial.now, trial.before, self._stable
        if stable is None:
            self._flip(Answering(now.loaded, before.loaded if before else None))
        elif now is stable:
            self._flip(Answering(stable.loaded))
        else:
            self._flip(Answering(stable.loaded, now.loaded, self._plan.newest))

    def _candidate(self) -> int:
        """The version of the run that has a share; 0 for none."""
        stable, trial = self._stable, self._trial
        return trial.now.version if trial and stable is not None and trial.now is not stable else 0

    def _set_beside(self) -> None:
        """The plan is another, or what is pinned has come: give the newest its share, or take it away."""
        trial, stable, plan = self._trial, self._stable, self._plan
        if trial is None:
            return
        if plan.newest is None or (stable is not None and stable.version != plan.pinned):
            if stable is not None:
                if plan.pinned:  # forwards look at both without the lock: never at a candidate that is to go
                    trial = self._answer_with(trial.now if trial.now.version == plan.pinned else stable, None)
                self._stable = None
                self._tell_who_answers(trial)
        elif stable is not None:
            self._tell_who_answers(trial)  # with other shares
        elif trial.now.version == plan.pinned:
            self._stable = trial.now
            self._answer_with(trial.now, None)

    def _leave(self, version: int, reason: str) -> None:
        trial = self._trial
        has_answered = trial is not None and trial.now.version == version
        if has_answered and trial is not None and trial.before is not None:
            self._answer_with(trial.before, None)
        self._left[version] = RejectedVersion(version, truncate_reason(reason), self.version, has_answered)
        if len(self._left) > MAX_REJECTED_VERSIONS:
            del self._left[min(self._left)]

    # -- answers, in a forward's thread -------------------------------------------------------------------------------

    def predict(self, requests: Sequence[Arrays], for_candidate: bool = False) -> Answered:
        """Compute a batch with the version that answers, or with the one before where that fails.

        Raises what the version that answers has raised when no other can do better.
        """
        stable, trial = self._stable, self._trial
        if stable is not None and not for_candidate:
            return Answered(stable.loaded.predict_batch(requests), stable.version, True)
        assert trial is not None  # calls are admitted when there is a version, and one never goes without another
        if trial.before is None:
            return Answered(trial.now.loaded.predict_batch(requests), trial.now.version, True)
        if trial.is_suspect:
            return self._compare(trial, trial.before, requests)
        try:
            outputs = trial.now.loaded.predict_batch(requests)
        except Exception as error:  # noqa: BLE001 - whatever a model raises: the version before may do better
            return self._rescued(trial, trial.before, requests, error)
        with self._lock:
            trial.requests += len(requests)
            if trial.requests >= trial.next_look:
                trial.next_look *= 2
                ratio = latency_ratio(
                    self._forwards.get_medians(trial.before.version), self._forwards.get_medians(trial.now.version)
                )
                trial.is_suspect = ratio is not None and ratio > self._guard.max_latency_ratio
        return Answered(outputs, trial.now.version, True)

    def _rescued(self, trial: Trial, before: Held, requests: Sequence[Arrays], error: Exception) -> Answered:
        if isinstance(error, InferenceError) and error.status != 500:
            raise error
        try:
            outputs = before.loaded.predict_batch(requests)
        except Exception:  # noqa: BLE001 - it is not to blame alone: this is about what was asked
            raise error from None
        with self._lock:
            trial.requests += len(requests)
            trial.errors += len(requests)
            self._judge(trial, f" ({type(error).__name__}: {error})")
        return Answered(outputs, before.version, False)

    def _compare(self, trial: Trial, before: Held, requests: Sequence[Arrays]) -> Answered:
        """Compute a batch with both, so that what else the machine does is the same for both."""
        is_first = trial.num_compared % 2 == 0  # the second finds what it reads in the cache
        before_s = self._seconds_of(before, requests) if is_first else None
        started_s = self._clock()
        try:
            outputs = trial.now.loaded.predict_batch(requests)
        except Exception as error:  # noqa: BLE001 - as in `predict`
            return self._rescued(trial, before, requests, error)
        now_s = self._clock() - started_s
        before_s = before_s if is_first else self._seconds_of(before, requests)
        with self._lock:
            trial.requests += len(requests)
            trial.num_compared += 1
            if before_s:
                trial.ratios.append(now_s / before_s)
            if trial.num_compared == NUM_COMPARED:
                self._judge(trial, "")
                trial.is_suspect, trial.num_compared, trial.ratios = False, 0, []
        return Answered(outputs, trial.now.version, False)

    def _seconds_of(self, held: Held, requests: Sequence[Arrays]) -> float | None:
        started_s = self._clock()
        try:
            held.loaded.predict_batch(requests)
        except Exception:  # noqa: BLE001 - there is nothing to compare with
            return None
        return self._clock() - started_s

    def _judge(self, trial: Trial, details: str) -> None:
        reason = judge_live(self._guard, Tried(trial.requests, trial.errors, trial.ratios))
        if reason and trial is self._trial:
            self._leave(trial.now.version, reason + details)
            logger.error("version %d is left for version %d: %s", trial.now.version, self.version, reason + details)
            self.changed()
