"""The Trainer under Ray Train: one worker for each rank, and a mailbox between rank 0 and the driver.

`RayTrainAttempt` is one attempt: Ray Train v2 starts, supervises and ends a group of workers. It is never retried here,
because only the owner of the run knows which failures deserve another attempt. Called by flows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import ReschedulingState, RunningState, SchedulingState
from torch.distributed import DistNetworkError, DistStoreError

from shoal.cpu_count import count_usable_cores
from shoal.errors import RankLost, ShoalError, TrainError, error_summary, summarize_error
from shoal.gc_freeze import freeze_loaded_objects
from shoal.parallel import World
from shoal.parallel.comm.world import CUDA_BACKEND, TIMEOUT_S, set_network_interface
from shoal.ray_call import call_or_none
from shoal.runs.ray_event_channel import CALL_TIMEOUT_S, Message, RayLog, start_mailbox
from shoal.runs.record.event_log import EventLog, NullLog
from shoal.train.launch.ray_task import change_to_task_folder, to_shoal_error
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task


@dataclass(frozen=True)
class WorkerSetup:
    """The settings that every worker needs."""

    spec: TrainSpec
    run_id: str
    folder: Path
    working_folder: Path


def _use_ray_interface() -> None:
    """In a worker: use the network interface by which Ray reaches its host."""
    set_network_interface(ray.util.get_node_ip_address())


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(_use_ray_interface)
        super().on_start(worker_group, backend_config)


@dataclass
class GroupConfig(TorchConfig):
    """How Ray Train forms the process group, which may span several hosts."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend


class _StartGuard(ControllerCallback, WorkerGroupCallback):
    """In Ray Train's controller: a group that fails at its start, which Ray Train forgets with its placement group, is
    shut down; and one with a worker that has died is not started again there without end."""

    _group: Any = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Raises RankLost."""
        if not isinstance(previous_state, SchedulingState) or isinstance(current_state, RunningState):
            return
        group, self._group = self._group, None
        if group is not None and group.has_started():
            group.shutdown()
        if isinstance(current_state, ReschedulingState):
            failure = current_state.training_failed_error.controller_failure
            if isinstance(failure, WorkerGroupStartupFailedError):  # else it waits for its places
                raise RankLost(summarize_error(failure.__cause__ or failure, line=-1, max_chars=None))


class GuardedTrainer(TorchTrainer):
    """Ray Train's trainer, in which a group that fails at its start leaves nothing."""

    def _create_default_callbacks(self) -> list[Any]:
        return [_StartGuard(), *super()._create_default_callbacks()]  # first: others may fail


def _run_worker(config: Mapping[str, Any]) -> TrainResult:
    """Run one rank in a worker of Ray Train."""
    with freeze_loaded_objects():  # not in the driver, which would spend a second loading torch for nothing
        import torch._dynamo  # noqa: F401 - as every optimiser does

        from shoal.train.loop.components import set_threads
        from shoal.train.loop.trainer import Trainer

    setting: WorkerSetup = config["setting"]
    mailbox: ActorHandle = config["mailbox"]
    change_to_task_folder(setting.spec.task, setting.working_folder)
    context = get_context()
    posted = RayLog(mailbox) if context.get_world_rank() == 0 else None
    journal: EventLog = posted if posted is not None else NullLog()
    try:
        world = World.from_process_group(setting.spec.device, context.get_local_rank())
        set_threads(setting.spec, count_usable_cores())
        trainer = Trainer(
            setting.spec,
            make_task(setting.spec.task, setting.spec.args),
            world,
            setting.folder,
            run_id=setting.run_id,
            journal=journal,
            should_stop=posted.stop_requested.is_set if posted is not None else lambda: False,
        )
        return trainer.run()
    except (Exception, SystemExit) as error:  # a Task that exits the program would do so in each attempt
        ray.get(mailbox.report_failure.remote(to_shoal_error(error)), timeout=CALL_TIMEOUT_S)
        raise
    finally:
        if posted is not None:
            posted.close()


class RayTrainAttempt:
    """One attempt to train, in a thread of this process. `poll` it until it is over."""

    def __init__(self, setting: WorkerSetup) -> None:
        self._mailbox = start_mailbox()
        self._num_received = 0
        self._errors: list[ShoalError] = []
        self._mailbox_death: str | None = None
        self._outcome: TrainResult | None = None
        self._failure: str | None = None  # why a worker was lost
        self._unexpected_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(setting,), name="ray-train", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> tuple[list[Message], bool]:
        """Rank 0's messages since the last call, and whether the attempt is over with all messages read."""
        self._thread.join(timeout_s)
        is_over = not self._thread.is_alive()  # asked first: what is said last must not be missed
        answer = self._call_mailbox(self._mailbox.poll, self._num_received)
        if answer is None:
            return [], is_over and self._mailbox_death is not None
        messages, self._errors = answer
        self._num_received += len(messages)
        return messages, is_over

    def stop(self) -> None:
        """Ask the workers to save and end; `poll` goes on until they have."""
        self._call_mailbox(self._mailbox.request_stop)

    def abort(self, why: str) -> None:
        """Ask the workers to end, and to save nothing; `poll` goes on until they have."""
        self._call_mailbox(self._mailbox.abort, why)

    def get_outcome(self) -> TrainResult:
        """The outcome. Raises the workers' own error, TrainError when they cannot start, RankLost when a worker or the
        mailbox died."""
        is_cut_short = self._mailbox_death is not None and self._outcome is not None and self._outcome.is_interrupted
        if self._outcome is not None and not is_cut_short:
            return self._outcome
        if self._unexpected_error is not None:
            raise self._unexpected_error
        causes = [error for error in self._errors if not isinstance(error, RankLost)]
        if causes:
            raise causes[0]
        raise RankLost(self._mailbox_death or f"a worker died: {self._failure}")

    def _call_mailbox(self, method: Any, *args: object) -> Any:
        """The mailbox's answer; None when there is none yet, or, as rank 0 hears for itself, will never be."""
        try:
            return call_or_none(method, *args, timeout_s=CALL_TIMEOUT_S)
        except RayActorError as error:
            self._mailbox_death = f"the mailbox of the workers died: {summarize_error(error, line=-1, max_chars=None)}"
            return None

    def close(self) -> None:
        """Release the mailbox. Idempotent."""
        ray.kill(self._mailbox)

    def _run(self, setting: WorkerSetup) -> None:
        try:
            spec = setting.spec
            lanes = {"CPU": float(spec.applied_sync.num_lanes)} if spec.applied_sync.num_lanes > 1 else None
            scaling = ScalingConfig(num_workers=spec.workers, use_gpu=spec.device == "cuda", resources_per_worker=lanes)
            storage = RunConfig(
                name=setting.run_id,
                storage_path=str(setting.folder / "ray"),
                failure_config=FailureConfig(max_failures=0),
            )
            # Not Ray's own choice for CUDA, nccl alone: collectives on the host need a back end, too.
            chosen = spec.parallel.backend or (CUDA_BACKEND if spec.device == "cuda" else None)
            backend = GroupConfig(backend=chosen, timeout_s=int(TIMEOUT_S))
            config = {"setting": setting, "mailbox": self._mailbox}
            # Workers take it over; with it, they print all twice.
            os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
            trainer = GuardedTrainer(
                _run_worker, train_loop_config=config, scaling_config=scaling, run_config=storage, torch_config=backend
            )
            result: TrainResult = trainer.fit().return_value
            self._outcome = result
        except (RayError, ray.train.TrainingFailedError) as error:
            # As text: its frames would keep the group's placement alive, and the next attempt waiting for it.
            self._failure = error_summary(str(error)) or summarize_error(error, line=-1, max_chars=None)
            # Whether a worker has raised it while its group started, and not since another is gone
            # or a port was taken.
            if (
                isinstance(error, ControllerError)
                and isinstance(error.controller_failure, RayTaskError)
                and not isinstance(error.controller_failure, DistNetworkError | DistStoreError)
            ):
                self._unexpected_error = TrainError(f"the workers cannot start: {self._failure}")
        except Exception as error:  # noqa: BLE001 - the top of a thread: whoever asks for the outcome gets it
            self._unexpected_error = error
