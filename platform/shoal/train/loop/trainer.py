"""The training loop of one rank: step, evaluate, save, stop. The same in one process, under torchrun and under Ray.

Owns the order of events. `components` has the model, optimiser and loaders, `checkpointing` the checkpoints,
`stopping` the decisions, and a `Synchronizer` keeps the replicas one model. Called by the launchers (`local`,
`ray_train`), which supply a world, a folder and an event log. Imports no Ray; starts and ends no process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.stored import open_run_store
from shoal.cost import MEASURED
from shoal.cost.step_profiler import StepProfiler, measure_peak_flops
from shoal.errors import NotFinite, TrainError, WeightsError
from shoal.parallel import World
from shoal.runs.event_messages import NO_CHECKPOINT
from shoal.runs.record.event_log import EventLog, NullLog
from shoal.sync.synchronizer import INTERVAL_S, Connection, RankSignals, Synchronizer, make_synchronizer
from shoal.train.callback import Callback, CallbackRunner, TrainingState
from shoal.train.loop.checkpointing import CheckpointManager, TrainProgress
from shoal.train.loop.components import TrainReplica, build_components
from shoal.train.loop.evaluation import evaluate, watch_samples
from shoal.train.loop.oom import explain_error, translate_lost_ranks
from shoal.train.loop.split_check import make_checks
from shoal.train.loop.step_reports import LossReport, ThroughputMeter, UnreadLoss, find_remedy, write_histograms
from shoal.train.loop.stopping import Due, StopDecision, StopPolicy
from shoal.train.optim.selective_backprop import count_profiled_steps
from shoal.train.reporting.result import TrainResult
from shoal.train.reporting.time_to_accuracy import TRAINING_S
from shoal.train.spec import TrainSpec
from shoal.train.task import Task
from shoal.weights.tensor_files import list_with_index, write_tensors

WEIGHTS_FILE = "model.safetensors"
UPLOAD_TIMEOUT_S = 600.0  # of the last checkpoints, at the end of a run
INTERRUPTED_UPLOAD_S = 8.0  # before Ray kills an interrupted job


class Trainer:
    """Trains `task` by `spec`. One object for each rank of `world`; all do the same at the same step.

    folder:      of the run; it has the checkpoints, and training continues from the newest good one
    should_stop: polled regularly; once true on any rank, all save and end
    connection:  of this replica with others that no plan connects, each with a world of its own. None: every rank takes
                 part in every step
    sync:        what keeps the replicas one model
    """

    def __init__(
        self,
        spec: TrainSpec,
        task: Task,
        world: World,
        folder: Path,
        *,
        run_id: str = "",
        journal: EventLog | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        connection: Connection | None = None,
    ) -> None:
        self.spec = spec
        self.task = task
        self.world = world
        self.folder = folder
        self._run_id, self._should_stop = run_id, should_stop
        num_lanes = spec.applied_sync.num_lanes
        lane = None if num_lanes == 1 else (0, num_lanes)
        self._replica = lane if connection is None else (connection.index, connection.num_workers)
        self._num_replicas = 1 if self._replica is None else self._replica[1]
        self._num_workers = world.size if connection is None else connection.num_workers
        self._event_log: EventLog = journal if journal is not None and world.is_first else NullLog()
        with translate_lost_ranks(world):
            self._parts = parts = build_components(spec, task, world, self._replica)
            self.spec = spec = parts.spec
            self.sync: Synchronizer = make_synchronizer(
                TrainReplica.of_components(parts, spec.applied_sync, world, connection)
            )
            parts.outer = self.sync.outer
            self._store = open_run_store(run_id)
            self._checkpoints = CheckpointManager(
                spec.checkpoint, parts, world, folder / "checkpoints", self._event_log, self._store
            )
        peak = world.size * self._num_replicas * measure_peak_flops(world.device, spec.parallel.precision)
        self._meter = ThroughputMeter(peak, lambda: parts.model.communication_s + self.sync.waited_s)
        average = parts.average.tensors if parts.average is not None else ()
        self._profiler: StepProfiler | None = StepProfiler(
            parts.model, parts.optimizer, world, count_profiled_steps(spec), average
        )
        self._policy = StopPolicy(spec.stop, self._num_workers, spec.price_per_device_hour)
        num_samples = spec.parallel.compute_micro_batch_size(spec.batch_size, parts.degrees) // self._num_replicas
        self._loss_check, self._metric_check = make_checks(spec, task, parts.model, world, num_samples)
        self._write_samples = watch_samples(spec.evaluate.samples * world.is_first, parts.stateful, folder, task)
        self._progress = TrainProgress()
        self._num_evaluations_due, self._is_first_step = 0, True
        self._began_s = time.monotonic()
        self._elapsed_s = self._logged_s = 0.0  # of this attempt, agreed between the ranks: now, at the last report
        self._losses = LossReport()
        state = TrainingState(parts.model.modules, parts.optimizer, world.is_first, folder, should_stop, self._report)
        self._callbacks = CallbackRunner(task.callbacks(), state, lambda: parts.epoch)

    def run(self) -> TrainResult:
        """Train to the end and return the outcome, the same on every rank.

        Raises NotFinite, OutOfMemory, DataError, CheckpointError, RankLost or ConfigError.
        """
        with translate_lost_ranks(self.world), ExitStack() as closing:
            closing.callback(self._parts.close)
            closing.callback(self._checkpoints.close)
            closing.callback(self.sync.close)
            self._begin()
            return self._finish(self._step_until_stopped())

    # -- before ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        parts, restored = self._parts, self._checkpoints.restore() if self.sync.is_chief else None
        if restored is not None:
            self._progress = restored.progress
            self._policy.load_state_dict(restored.progress.policy)
            self._callbacks.load_state_dict(restored.progress.callbacks)
            self._event_log.record_event("restored", step=restored.progress.step, damaged=restored.damaged)
            for report in restored.progress.reports:
                self._event_log.log(*report)
        elif self.spec.resume:
            self._event_log.record_event(NO_CHECKPOINT)
        step = self.sync.begin(self._progress.step)
        self._set_step(step)
        if self._replica is not None and parts.steps_per_epoch is not None:
            epoch, within = divmod(step, parts.steps_per_epoch)
            parts.training.seek(epoch, within * self.spec.batch_size)
        position, self._num_evaluations_due = parts.get_schedule_position(step), parts.num_evaluations_due(step)
        self._num_epochs = int(parts.epoch)
        self._event_log.record_event(
            "training",
            step=step,
            training_s=self._progress.training_s,
            plan=parts.degrees.description,
            workers=self._num_workers,
            device=str(self.world.device),
            parameters=parts.num_parameters,
            steps_per_epoch=parts.steps_per_epoch,
            total_steps=None if position.total_steps is None else step + round(position.total_steps - position.step),
        )
        if parts.eager_reason:
            self._event_log.record_event("built_eagerly", error=parts.eager_reason)
        self._callbacks.call(Callback.on_begin, step, self._progress.metrics)
        self._began_s = time.monotonic()
        self._meter.begin(self._progress.training_s)

    def _report(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.report(step, dict(values), self._event_log)

    # -- the loop -------------------------------------------------------------------------------------------------

    def _step_until_stopped(self) -> StopDecision:
        """After each step, perform the due actions in a fixed order, the same on every rank."""
        # A resumed run may have ended already.
        stop = self._policy.decide_after_step(self._progress.step, self._parts.epoch, 0.0)
        if self._progress.evaluated == self._progress.step and self._progress.metrics:
            stop = self._decide_after_evaluation()
        elif stop is not None:
            stop = self._evaluate() or stop
        while stop is None:
            self._parts.set_learning_rate(self._progress.step)
            before = self._progress.step
            self._step(self._parts.stream.next())
            stop = self._after_step(before)
        return stop

    def _step(self, batch: Any) -> None:
        parts, step = self._parts, self._progress.step
        norm = None
        self.sync.before_step()
        try:
            if self._loss_check is not None:
                self._loss_check.watch(parts.training.host_batch)
            with self._profiler.step() if self._profiler is not None else nullcontext():
                if parts.has_phases:
                    self._wait_until_copied()
                loss = parts.train_step(batch, step)
                if self._is_first_step:  # of this attempt; later ones wait before an evaluation or a save
                    parts.model.check_buffers()
                    self._is_first_step = False
                self.sync.combine_gradients()
                self._callbacks.call(Callback.on_gradients, step)
                if self.spec.clip_norm is not None:
                    norm = parts.model.clip_gradients(self.spec.clip_norm)
                self._wait_until_copied()
                self._set_step(self.sync.apply_gradients())
        except (MemoryError, RuntimeError) as error:
            better = explain_error(error, parts, batch, step)
            if better is error:
                raise
            raise better from error
        if parts.average is not None:
            parts.average.update()
        indices, named = parts.training.last_indices, parts.model.step_losses
        self._losses.add(UnreadLoss(step, loss, norm, indices, named, parts.step_weight))
        self._callbacks.end_step(self._progress.step, loss)
        num_steps = self._progress.step - step
        self._meter.count_steps(num_steps, self.spec.batch_size * num_steps)
        if self._profiler is not None and self._profiler.is_due:
            cost = self._profiler.collect_table()
            self._profiler = None if self._profiler.is_done else self._profiler
            if self._replica is not None:  # the profile is of one replica, with its own means to exchange gradients
                flops = self._num_replicas * cost["flops_step"]
                cost = replace(cost, values={**cost.values, "flops_step": flops, "sent_bytes": math.nan})
            self._meter.flops_per_sample = cost["flops_step"] / self.spec.batch_size
            self._event_log.record_event(MEASURED, **cost.to_details())

    def _wait_until_copied(self) -> None:
        """Before weights or the optimiser's state change: until a checkpoint has its copy of them."""
        if not self._checkpoints.is_idle:
            with self._meter.pause():
                self._checkpoints.wait_until_copied()

    def _set_step(self, step: int) -> None:
        self._progress.step = step
        if self._replica is not None:
            self._parts.finished_steps = step

    def _after_step(self, before: int) -> StopDecision | None:
        """`before`: the run's finished steps before this one; with replicas there may be none or several since."""
        step = self._progress.step
        if not self.sync.is_chief:
            # A replica that is not the chief ends when the chief has decided so.
            if self.sync.is_exchange_due() and self._exchange_signals().stop:
                return StopDecision("interrupted", f"ended with the others at step {step:,}", step, step)
            return None
        if step == before:
            return None
        due = self._find_due(before, step)
        if not due and self._policy.decide_after_step(step, self._parts.epoch, self._elapsed_s) is None:
            return None
        signals = self._exchange_signals()
        stop = self._policy.decide_after_step(step, self._parts.epoch, self._elapsed_s)  # now of the same time
        if signals.ends:
            stop = self._policy.decide_on_request(step, self._callbacks.stop_reason or "a callback on another rank")
        # Evaluations and checkpoints synchronise the ranks too: an exchange may never become due between them.
        if (
            Due.REPORT in due
            or stop
            or (self.spec.log_every_steps is None and self._elapsed_s - self._logged_s >= INTERVAL_S)
        ):
            self._log()
        if Due.EVALUATION in due or (stop and self._progress.evaluated != step):
            stop = self._evaluate() or stop
        if Due.EPOCH in due:
            self._callbacks.call(Callback.on_epoch_end, step)
        if stop is None and self._callbacks.callbacks and due & (Due.EPOCH | Due.EVALUATION):
            why = max(self.world.gather(self._callbacks.stop_reason))
            stop = self._policy.decide_on_request(step, why) if why else None
        if signals.stop and stop is None:
            return StopDecision("interrupted", f"interrupted at step {step:,}", step, step)
        if stop is None and (Due.CHECKPOINT in due or self._checkpoints.is_due_after(self._progress.elapsed_s)):
            self._save()
        return stop

    def _find_due(self, before: int, step: int) -> Due:
        """What is due by the steps that follow `before`, up to `step`, the same on every rank."""

        def is_passed(every: int | None) -> bool:
            return every is not None and step // every > before // every

        if is_passed(self.spec.histograms_every_steps):
            write_histograms(self._event_log, self._parts.model, step)
        due = Due(0)
        if self.sync.is_exchange_due() or (self.world.size == 1 and self._callbacks.stop_reason):
            due |= Due.EXCHANGE if self.spec.log_every_steps is not None else Due.EXCHANGE | Due.REPORT
        if is_passed(self.spec.log_every_steps):
            due |= Due.REPORT
        if is_passed(self.spec.checkpoint.every_steps):
            due |= Due.CHECKPOINT
        num_evaluations = self._parts.num_evaluations_due(step)
        if num_evaluations > self._num_evaluations_due:
            due |= Due.EVALUATION
        self._num_evaluations_due = num_evaluations
        if self._callbacks.callbacks and self._parts.epoch >= self._num_epochs + 1:
            self._num_epochs = int(self._parts.epoch)
            due |= Due.EPOCH
        return due

    def _exchange_signals(self) -> RankSignals:
        """Read the steps since the last exchange, and combine all ranks' signals. Raises NotFinite, on all or none.

        Saving, evaluating and reporting wait until this has found every loss so far to be finite, and not to depend on
        how its batch was split.
        """
        if self._loss_check is not None:
            self._loss_check.verify()
        mine = self._losses.sum_steps()
        signals = self.sync.exchange(
            mine._replace(
                stop=self._should_stop(),
                elapsed_s=time.monotonic() - self._began_s,
                num_losses=mine.num_losses / self._parts.degrees.pipeline,  # one rank of a pipeline has the loss
                ends=bool(self._callbacks.stop_reason),
            )
        )
        self._progress.elapsed_s += signals.elapsed_s - self._elapsed_s
        self._elapsed_s = signals.elapsed_s
        if signals.is_not_finite:
            self._raise_not_finite()
        self._losses.take(signals)
        return signals

    def _raise_not_finite(self) -> None:
        """Name the step, and the samples of ranks with a non-finite loss: other ranks have it only by their
        gradients."""
        reported = [each for each in self.world.gather(self._losses.find_not_finite()) if each is not None]
        step, is_gradient, _ = min(reported, key=lambda each: each[:2])
        guilty = [indices or [] for at, only, indices in reported if (at, only) == (step, is_gradient)]
        indices = sorted({index for each in guilty for index in each})
        what = "the gradient" if is_gradient else "the loss"
        remedy = find_remedy(self._parts.training.source, indices, self.spec.splits_batches)
        raise NotFinite(what, step + 1, indices or None, self._checkpoints.describe_newest(), remedy)

    def _log(self) -> None:
        self._logged_s = self._elapsed_s
        parts, step = self._parts, self._progress.step
        means = self._losses.make_means()
        values = {
            "train/step": float(step),
            "train/loss": means.pop("train/loss"),
            "train/learning_rate": float(parts.optimizer.param_groups[0]["lr"]),
            "train/epoch": parts.epoch,
            **self._meter.compute_rates(parts.training.wait_s),
            **means,
        }
        self._report(step, values)

    def _evaluate(self) -> StopDecision | None:
        step, parts = self._progress.step, self._parts
        if parts.validation is None:
            return None
        with self._meter.pause(), parts.apply_average():
            self.sync.before_evaluation()
            parts.model.check_buffers()
            metrics = evaluate(parts.model, parts.validation, parts.stateful, self._metric_check)
            self._write_samples(step, parts.epoch)
        self._progress.evaluated, self._progress.metrics = step, metrics
        self._progress.training_s = self._meter.training_s
        named = {f"validation/{name}": value for name, value in metrics.items()}
        self._report(step, {**named, TRAINING_S: self._progress.training_s})
        self._callbacks.call(Callback.on_evaluation, step, metrics)
        return self._decide_after_evaluation()

    def _decide_after_evaluation(self) -> StopDecision | None:
        """The decision after the newest evaluation; saves a network that becomes the best one.

        Also one that became the best when an earlier attempt was killed, before it was saved as such.
        """
        step, before = self._progress.step, self._policy.best_step
        stop = self._policy.decide_after_evaluation(step, self._progress.metrics)
        if self._policy.best_step == step and (step != before or step != self._checkpoints.best_step()):
            self._save(best=True)
        return stop

    def _save(self, *, best: bool = False, must: bool = False) -> None:
        with self._meter.pause():
            self.sync.collect_state()
            self._progress.training_s = self._meter.training_s
            self._progress.policy, self._progress.callbacks = self._policy.state_dict(), self._callbacks.state_dict()
            self._checkpoints.save(self._progress, best=best, must=must)

    # -- after ----------------------------------------------------------------------------------------------------

    def _finish(self, stop: StopDecision) -> TrainResult:
        self.sync.end()
        if not self.sync.is_chief:
            return TrainResult(self._run_id, stop.reason, stop.detail, stop.step, stop.step, self._elapsed_s)
        if stop.reason != "interrupted":
            self._callbacks.call(Callback.on_end, stop.step)
        self._save(must=stop.reason == "interrupted")
        self._checkpoints.wait(must=stop.reason == "interrupted")
        progress, retained_step = self._progress, stop.keep_step
        if stop.reason == "interrupted":
            cut = TrainResult(self._run_id, stop.reason, stop.detail, progress.step, retained_step, progress.elapsed_s)
            self._event_log.record_event("stopped", reason=stop.reason, detail=stop.detail, step=stop.step)
            self._checkpoints.finish_uploads(INTERRUPTED_UPLOAD_S)
            return cut
        metrics = progress.metrics
        if retained_step != progress.step:
            best = self._checkpoints.load_best()
            retained_step = best.step if best is not None else progress.step
            metrics = best.metrics if best is not None else metrics
        self._event_log.record_event(
            "stopped", reason=stop.reason, detail=stop.detail, step=stop.step, kept=retained_step
        )
        ended = TrainResult(
            self._run_id, stop.reason, stop.detail, progress.step, retained_step, progress.elapsed_s, metrics
        )
        ended = replace(ended, weights=self._write_weights())
        self._checkpoints.finish_uploads(UPLOAD_TIMEOUT_S)
        return ended

    def _write_weights(self) -> Path:
        """Write the full network as safetensors, as evaluated: averaged if the spec asks for it.

        No rank gathers more than one of its tensors. Returns the file, or the index of several.
        """
        path = self.folder / WEIGHTS_FILE
        problem = ""
        model = self._parts.model
        with self._parts.apply_average():
            types, tensors = model.describe_full_weights(), model.iter_full_weights()
            try:
                if self.world.is_first:
                    path = write_tensors(path, types, tensors)
                for _ in tensors:  # takes part in gathering
                    pass
            except (OSError, WeightsError) as error:
                problem = f"the trained network could not be written to {path}: {error}"
        if self.world.is_first and not problem:
            problem = self._store_weights(path)
        problem, name = self.world.broadcast((problem, path.name))
        if problem:
            raise TrainError(problem)
        return self.folder / name

    def _store_weights(self, path: Path) -> str:
        """Pass the network on to the driver if the record is on another host; returns what went wrong."""
        try:
            if self._store is not None and not (self.folder / "spec.yaml").exists():
                for file in list_with_index(path):
                    self._store.write(file.name, file)
        except OSError as error:
            return f"the trained network could not be written to {self._store.url if self._store else ''}: {error}"
        return ""
