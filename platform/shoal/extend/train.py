"""Training, for libraries: Tasks, runs and the Trainer."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.runs.record.event_log import EventLog, ForwardingLog, LogMethod, NullLog, RecordLog
    from shoal.train import Callback, TrainingState
    from shoal.train.export import model_entry
    from shoal.train.export.model_entry import build, make_factory, make_model_name, register_model
    from shoal.train.export.signature import infer_signature
    from shoal.train.initial_weights import (
        SINGLE,
        find_initial_weights,
        load_initial_weights,
        open_folder,
        read_state_dict,
    )
    from shoal.train.launch.checked_run import check_once
    from shoal.train.launch.finalize import fetch_weights
    from shoal.train.launch.local import LocalBackend, fit_locally
    from shoal.train.launch.overrides import spec_from_overrides
    from shoal.train.launch.predicted_cost import predict_table
    from shoal.train.launch.ray_capacity import require_capacity, resolve_device
    from shoal.train.launch.ray_task import change_to_task_folder
    from shoal.train.launch.training_run import Backend, TrainingRun, shutdown_event
    from shoal.train.launch.validate import ValidatedRun, choose_metric, validate_run
    from shoal.train.loop.components import BatchStream, TrainComponents, TrainReplica, build_components, set_threads
    from shoal.train.loop.evaluation import evaluate
    from shoal.train.loop.oom import is_out_of_memory
    from shoal.train.loop.trainer import Trainer
    from shoal.train.optim.lr_schedule import resolve_total_steps
    from shoal.train.optim.optimizers import list_parameters, make_optimizer, set_learning_rate
    from shoal.train.reporting.console import ConsoleLog
    from shoal.train.reporting.result import TrainResult
    from shoal.train.reporting.time_to_accuracy import (
        TRAINING_S,
        TargetReached,
        find_attempts,
        find_target_reached,
        get_evaluations,
    )
    from shoal.train.run_facts import RunFacts
    from shoal.train.spec import Direction, ScheduleSpec, StopSpec, TargetSpec, TrainSpec, require_direction
    from shoal.train.stateful_metric import MetricSet, StatefulMetric
    from shoal.train.task import (
        JOBS,
        Hook,
        Registration,
        Task,
        build_model,
        find_source_file,
        find_task,
        load_data,
        load_task_file,
        make_task,
        unload_if_changed,
    )

__getattr__ = load_on_demand(__name__)
