"""One trial of a sweep that is a run of the loop: gateway and learner in this process, actors as processes of its own.

The trial starts its actors and ends them with itself. It reports the mean return of the last 100 episodes, evenly over
its budget. Called by the worker of a trial (`ray_trial`), and at the end of a sweep to register the best policy.
Imports no Ray.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import shoal.runs
from shoal import atomic_file
from shoal.errors import RecordUnwritable, RunError
from shoal.extend.flows import (
    MEAN_RETURN,
    ActorLearnerMetrics,
    HistorySampler,
    LocalRun,
    describe_experience,
    describe_policy_model,
    inspect_environment,
)
from shoal.extend.registry import Criterion, Registry
from shoal.extend.runs import RunKind, RunRecorder, Status
from shoal.libs.sweep.loop_spec import LoopTrialSpec
from shoal.libs.sweep.trial import JOB, Trial, TrialReport, find_trial
from shoal.weights import WeightSnapshot

LEARNED = "learned"  # the event at the end of a trial
WEIGHTS = "model.safetensors"
POLL_S = 0.1


class LoopTrial(Trial):
    """The run of the loop of one trial."""

    def __init__(self, run_id: str, spec: LoopTrialSpec, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        super().__init__(run_id, should_stop)
        self._spec = spec

    def _load_end(self) -> TrialReport | None:
        record = find_trial(self.run_id)
        if record is None or not record.status.is_complete:
            return None
        ended = record.last_events()[LEARNED]
        return TrialReport(ended["steps"], 1.0, {MEAN_RETURN: ended[MEAN_RETURN]}, is_over=True)

    def _run_recorded(self) -> TrialReport:
        spec = self._spec
        experience, _ = inspect_environment(spec)
        resumed = self.run_id if find_trial(self.run_id) is not None else ""
        with shoal.runs.recording(
            spec.to_record(), JOB, begun="gateway_ready", kind=RunKind.LOOP, resumed=resumed, run_id=self.run_id
        ) as recorder:
            with LocalRun("a trial", spec, experience, recorder.folder, spec.actors, spec.learner.seed) as run:
                recorder.record_event("gateway_ready", address=run.loop.address, env=spec.env, server_key="")
                report = _LoopFollower(spec, run, recorder).follow(self._report, self._is_stopping)
            if not report.is_over:
                recorder.finish(Status.STOPPED)
        return report


class _LoopFollower:
    """Watches one loop: records what it does, reports, and decides when its budget is spent."""

    def __init__(self, spec: LoopTrialSpec, run: LocalRun, recorder: RunRecorder) -> None:
        self._spec = spec
        self._run = run
        self._loop = run.loop
        self._recorder = recorder
        self._metrics = ActorLearnerMetrics()
        self._sampler = HistorySampler(time.monotonic())
        self._taken_version = 0

    def follow(self, report: Callable[[TrialReport], None], is_stopping: Callable[[], bool]) -> TrialReport:
        """Until the budget is spent, or `is_stopping`: then the result is not over. Raises RunError."""
        next_report, current = 0.0, TrialReport(0, 0.0)
        while True:
            stats = self._poll()
            progress = self._spec.stop.compute_progress(stats["steps"], stats["elapsed_s"])
            current = TrialReport(stats["steps"], progress, {MEAN_RETURN: float(stats["mean_return"])})
            is_scored = math.isfinite(stats["mean_return"])
            if current.progress >= 1.0:
                # Store the newest policy. Raises RunError for a trial in which no episode has
                # ended.
                mean_return = float(stats["mean_return"])
                if not math.isfinite(mean_return):
                    raise RunError(f"no episode has ended in {stats['steps']:,} steps: raise stop.steps or stop.wall_s")
                snapshot = self._loop.learner.pause()
                atomic_file.replace_synced(self._recorder.folder / WEIGHTS, snapshot.payload)
                self._recorder.record_event(
                    LEARNED,
                    steps=stats["steps"],
                    seconds=stats["elapsed_s"],
                    episodes=stats["episodes"],
                    mean_return=mean_return,
                    version=snapshot.version,
                )
                return TrialReport(stats["steps"], 1.0, {MEAN_RETURN: mean_return}, is_over=True)
            if is_stopping():
                return current
            next_report = next_report or (math.floor(current.progress * self._spec.reports) + 1) / self._spec.reports
            if current.progress >= next_report and is_scored:
                report(current)
                next_report = 0.0
            time.sleep(POLL_S)

    def _poll(self) -> dict[str, Any]:
        """The gateway's counts, recorded. Raises RunError when the learner or an actor has failed."""
        self._loop.require_learner()
        self._run.require_actors()
        stats = self._loop.gateway.stats()
        with suppress(RecordUnwritable):
            for at, kind, details in self._loop.gateway.take_events():
                self._recorder.record_event(kind, at=at, **details)
            if stats["steps"]:
                values = self._metrics.compute(stats, self._loop.learner.stats(), 0.0, time.time())
                self._recorder.log(stats["steps"], values, in_history=self._sampler.should_keep(time.monotonic()))
            for published in self._loop.learner.take_published(self._taken_version):
                self._recorder.record_weights(*published)
                self._taken_version = published.version
        return stats


def register_trial(spec: LoopTrialSpec, run_id: str, recorder: RunRecorder, lineage: Mapping[str, object]) -> None:
    """Register the policy of a finished trial, and record that in the sweep. Raises RegistryError.

    run_id:  of the trial
    lineage: where the sweep has found it
    """
    record = shoal.runs.load(run_id)
    ended = record.last_events()[LEARNED]
    experience, _ = inspect_environment(spec)
    factory, signature = describe_policy_model(spec, experience)
    version = Registry().register(
        spec.model_name,
        WeightSnapshot.from_payload(ended["version"], (record.folder / WEIGHTS).read_bytes()),
        model=factory,
        signature=signature,
        run_id=recorder.id,
        metrics={"mean_return_100": ended[MEAN_RETURN], "steps": float(ended["steps"])},
        data={"environment": spec.env},
        aliases=spec.aliases,
        criterion=Criterion("mean_return_100", is_higher_better=True),
        lineage=lineage,
        files=describe_experience(experience),
    )
    recorder.record_model(version.name, version.version, version.aliases, version.decision)
