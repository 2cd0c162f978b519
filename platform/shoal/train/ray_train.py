"""The Trainer under Ray Train: one worker for each rank, and a mailbox between rank 0 and the driver.

`Fit` is one attempt: a group of workers, started, watched and ended by Ray Train v2. It is never retried here, because
only who owns the run knows which failures are worth another attempt. Called by flows.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from shoal.errors import RankLost, ShoalError, TrainError
from shoal.parallel import World
from shoal.parallel.world import TIMEOUT_S
from shoal.train.journal import Journal, Silent
from shoal.train.outcome import Outcome
from shoal.train.spec import TrainSpec
from shoal.train.task import JOBS, make_task

CALL_TIMEOUT_S = 30.0
DELIVERY_S = 0.2  # between two deliveries of rank 0; also how late it hears of a request to stop
Message = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Setting:
    """What every worker must know of its run."""

    spec: TrainSpec
    run_id: str
    folder: Path
    working_folder: Path


@ray.remote(num_cpus=0, max_concurrency=8)
class Mailbox:
    """What workers have said and the driver has not yet read; and whether they are asked to stop."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._errors: list[ShoalError] = []
        self._stop = False
        self._lock = threading.Lock()

    def deliver(self, messages: list[Message]) -> bool:
        """From rank 0; answers whether it should stop."""
        with self._lock:
            self._messages += messages
            return self._stop

    def fail(self, error: ShoalError) -> None:
        """From any rank: why it ended."""
        with self._lock:
            self._errors.append(error)

    def take(self) -> tuple[list[Message], list[ShoalError]]:
        """For the driver: what is new, and every error so far."""
        with self._lock:
            messages, self._messages = self._messages, []
            return messages, list(self._errors)

    def stop(self) -> None:
        """For the driver: ask the workers to save and end."""
        self._stop = True


class _Posted:
    """The journal of rank 0: a thread delivers what it is told, and hears whether to stop.

    | capacity  | what blocks | who unblocks | close()                         |
    |-----------|-------------|--------------|---------------------------------|
    | unbounded, emptied every DELIVERY_S | nothing | | delivers the rest, ends the thread |
    """

    def __init__(self, mailbox: ActorHandle) -> None:
        self._mailbox = mailbox
        self._pending: list[Message] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.stop_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._add(("log", (step, dict(values))))

    def event(self, kind: str, /, **details: object) -> None:
        self._add(("event", (kind, details)))

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._add(("histogram", (step, name, counts, edges)))

    def close(self) -> None:
        """Deliver the rest. Idempotent."""
        self._closing.set()
        self._thread.join(CALL_TIMEOUT_S)

    def _add(self, message: Message) -> None:
        with self._lock:
            self._pending.append(message)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(DELIVERY_S)
            with self._lock:
                pending, self._pending = self._pending, []
            try:
                if ray.get(self._mailbox.deliver.remote(pending), timeout=CALL_TIMEOUT_S):
                    self.stop_asked.set()
            except RayError:  # the driver is gone, and the run with it: save, and end
                self.stop_asked.set()


def _train(config: Mapping[str, Any]) -> Outcome:
    """One rank's life in a worker of Ray Train."""
    from shoal.train.assembly import set_threads  # not in the driver, which would load a second of torch for nothing
    from shoal.train.trainer import Trainer

    setting: Setting = config["setting"]
    mailbox: ActorHandle = config["mailbox"]
    _go_to_the_task(setting)
    context = get_context()
    posted = _Posted(mailbox) if context.get_world_rank() == 0 else None
    journal: Journal = posted if posted is not None else Silent()
    try:
        world = World.joined(setting.spec.device, context.get_local_rank())
        set_threads(setting.spec, os.cpu_count() or 1)
        trainer = Trainer(
            setting.spec,
            make_task(setting.spec.task, setting.spec.args),
            world,
            setting.folder,
            run_id=setting.run_id,
            journal=journal,
            should_stop=posted.stop_asked.is_set if posted is not None else lambda: False,
        )
        return trainer.run()
    except Exception as error:
        ray.get(mailbox.fail.remote(_typed(error)), timeout=CALL_TIMEOUT_S)
        raise
    finally:
        if posted is not None:
            posted.close()


def _go_to_the_task(setting: Setting) -> None:
    """To the folder that the task's file is relative to: the driver's own, or the copy of it that Ray has sent here."""
    place = setting.spec.task.partition(":")[0]
    names = [Path(place)] if place.endswith(".py") else [JOBS / f"{place}.py"]
    for folder in (setting.working_folder, *map(Path, sys.path)):
        if any((folder / name).is_file() for name in names):
            os.chdir(folder)
            return


def _typed(error: Exception) -> ShoalError:
    """The error as it travels: a user's own exception with its traceback."""
    if isinstance(error, ShoalError):
        return error
    return TrainError("".join(traceback.format_exception(error)).rstrip())


class Fit:
    """One attempt to train, in a thread of this process. `poll` it until it is over."""

    def __init__(self, setting: Setting) -> None:
        self._mailbox = Mailbox.remote()  # type: ignore[attr-defined]
        self._outcome: Outcome | None = None
        self._failure: str | None = None
        self._surprise: Exception | None = None
        config = {"setting": setting, "mailbox": self._mailbox}
        spec = setting.spec
        scaling = ScalingConfig(num_workers=spec.workers, use_gpu=spec.device == "cuda")
        storage = RunConfig(
            name=setting.run_id, storage_path=str(setting.folder / "ray"), failure_config=FailureConfig(max_failures=0)
        )
        backend = TorchConfig(backend=spec.parallel.backend, timeout_s=int(TIMEOUT_S))
        trainer = TorchTrainer(
            _train, train_loop_config=config, scaling_config=scaling, run_config=storage, torch_config=backend
        )
        self._thread = threading.Thread(target=self._fit, args=(trainer,), name="ray-train", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> tuple[list[Message], bool]:
        """What rank 0 has said since the last time, and whether the attempt is over."""
        self._thread.join(timeout_s)
        is_over = not self._thread.is_alive()  # asked first: what is said last must not be missed
        messages, _ = ray.get(self._mailbox.take.remote(), timeout=CALL_TIMEOUT_S)
        return messages, is_over

    def stop(self) -> None:
        """Ask the workers to save and end; `poll` goes on until they have."""
        ray.get(self._mailbox.stop.remote(), timeout=CALL_TIMEOUT_S)

    def outcome(self) -> Outcome:
        """How the attempt ended. Raises the workers' own error; RankLost when a worker died without a word."""
        if self._outcome is not None:
            return self._outcome
        if self._surprise is not None:
            raise self._surprise
        _, errors = ray.get(self._mailbox.take.remote(), timeout=CALL_TIMEOUT_S)
        causes = [error for error in errors if not isinstance(error, RankLost)]
        if causes:
            raise causes[0]
        raise RankLost(f"a worker died: {self._failure}")

    def close(self) -> None:
        """Let the mailbox go. Idempotent."""
        ray.kill(self._mailbox)

    def _fit(self, trainer: TorchTrainer) -> None:
        try:
            self._outcome = trainer.fit().return_value
        except (RayError, ray.train.TrainingFailedError) as error:
            # As text: its frames would keep the group's placement alive, and the next attempt waiting for it.
            self._failure = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        except Exception as error:  # noqa: BLE001 - the top of a thread: whoever asks for the outcome gets it
            self._surprise = error
