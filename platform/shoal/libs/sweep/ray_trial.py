"""A trial of a sweep as Ray Tune's worker: a shell around a `TrialRun` or a `LoopTrial`.

Ray Tune creates it with the parameters of a trial, asks for one evaluation after another, and reuses it for further
trials. A trial of one worker trains in this process; one of several starts Ray workers, as any training run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from shoal.device_memory import limit_device_memory
from shoal.extend.runs import RunRecorder
from shoal.extend.train import Backend, EventLog, TrainSpec, change_to_task_folder, validate_run
from shoal.gc_freeze import freeze_loaded_objects
from shoal.libs.sweep.loop_spec import add_module_folders
from shoal.libs.sweep.trial import Trial, TrialRun, TrialSetting, is_remote, make_run_id

# Of a result, beside the metrics of an evaluation, whose names have a prefix.
PROGRESS = "progress"
STEP = "step"
FAILURE = "failure"
VALUE = "value/"
FINISHED = "finished"
NUM_CHECKPOINTS = 4  # of a trial that others may copy: it goes on while Ray Tune decides whether they do


def format_trial_name(number: int) -> str:
    """The name of a trial in Ray Tune."""
    return f"trial-{number:03d}"


def parse_trial_name(name: str) -> int:
    """The number in it."""
    return int(name.rpartition("-")[2])


class TuneTrial(Trainable):
    """One trial at a time. Its number is in its name, since a copy of another trial has that one's parameters."""

    def setup(self, config: dict[str, Any], setting: TrialSetting | None = None) -> None:
        assert setting is not None
        self._is_remote = is_remote(setting)
        os.environ["SHOAL_HOME"] = str(setting.home)
        change_to_task_folder(setting.spec.source, setting.working_folder)
        if setting.spec.loop is not None:
            add_module_folders(setting.spec.loop.recipe)
        with freeze_loaded_objects():
            import torch._dynamo  # noqa: F401 - as every optimiser does
        self._setting = setting
        self._open(config)

    def _open(self, config: Mapping[str, Any]) -> None:
        setting, number = self._setting, parse_trial_name(self.trial_name)
        limit_device_memory(setting.spec.gpus_per_trial)
        run_id, parameters = make_run_id(setting.sweep_id, number), config["trial"]["parameters"]
        if setting.spec.loop is not None:
            from shoal.libs.sweep.loop_trial import LoopTrial  # what the loop needs, trainings do not wait for

            loop = setting.spec.make_loop_spec(parameters)
            self._run: Trial = LoopTrial(run_id, loop, should_stop=setting.stop_file.exists)
            return
        spec = prepare_trial_spec(setting, parameters)
        checked = setting.checked.run
        if checked is None or spec.args != setting.spec.train.args:
            checked = validate_run(spec)

        def make_ray_backend(
            spec: TrainSpec, recorder: RunRecorder, log: EventLog, should_stop: Callable[[], bool]
        ) -> Backend:
            from shoal.extend.flows import RayBackend
            from shoal.extend.train import resolve_device

            return RayBackend(resolve_device(spec), recorder, log, should_stop)

        self._run = TrialRun(
            run_id,
            spec,
            checked,
            make_backend=make_ray_backend if setting.spec.starts_workers else None,
            threads=max(1, int(setting.spec.cpus_per_trial)),
            should_stop=setting.stop_file.exists,
            is_remote=self._is_remote,
        )

    def step(self) -> dict[str, Any]:
        """The next evaluation."""
        report = self._run.next_report()
        values = {f"{VALUE}{name}": value for name, value in report.metrics.items()}
        result = {PROGRESS: report.progress, STEP: report.step, FAILURE: report.failure, **values}
        checked = self._setting.checked
        if report.failure:  # the worst there is, for schedulers that compare
            result[f"{VALUE}{checked.metric}"] = -math.inf if checked.is_higher else math.inf
        is_replaced = bool(report.failure) and self._setting.spec.search == "pbt"  # by the scheduler
        return {**result, FINISHED: report.is_over and not report.failure, "done": report.is_over and not is_replaced}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        assert isinstance(self._run, TrialRun)  # others are not copied
        self._run.copy_checkpoint(Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        assert isinstance(self._run, TrialRun)
        self._run.start_from(Path(checkpoint_dir))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._run.stop()
        self._open(new_config)
        return True

    def cleanup(self) -> None:
        self._run.stop()


def prepare_trial_spec(setting: TrialSetting, parameters: Mapping[str, object]) -> TrainSpec:
    """The spec of a trial. One that others may copy saves a checkpoint at each evaluation."""
    spec = setting.spec.make_trial_spec(parameters)
    if setting.spec.search == "pbt":
        assert spec.evaluate.every_steps is not None  # see `check_sweep`
        changes = {"every_steps": spec.evaluate.every_steps, "keep": max(NUM_CHECKPOINTS, spec.checkpoint.keep)}
        spec = spec.update({"checkpoint": changes})
    return spec
