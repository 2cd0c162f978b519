"""A short run of a Task in this process, for tests: without Ray, a record or the registry.

The loop is that of `shoal run train`; what it logs stays in memory. Called by tests: those of users, and ours.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shoal.parallel import World
from shoal.runs.record.event_log import EventLog
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import Task
from shoal.weights.tensor_files import list_files, open_tensors

# Every step is on the curve, and a checkpoint is complete when the next step begins.
DEFAULTS: dict[str, Any] = {"log_every_steps": 1, "checkpoint": {"asynchronous": False}}


class MemoryLog(EventLog):
    """Retains what a run logs.

    metrics:    values by step and name: `train/loss`, `validation/loss`, ...
    events:     (kind, details) in their order
    histograms: (step, name) in their order
    """

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = defaultdict(dict)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.histograms: list[tuple[int, str]] = []

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self.metrics[step].update(values)

    def record_event(self, kind: str, /, **details: object) -> None:
        """Raises TypeError for details that no record could take."""
        self.events.append((kind, json.loads(json.dumps(details))))

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self.histograms.append((step, name))

    def get_curve(self, name: str) -> dict[int, float]:
        """The values of one metric by step."""
        return {step: values[name] for step, values in sorted(self.metrics.items()) if name in values}

    @property
    def losses(self) -> dict[int, float]:
        """The training loss by step."""
        return self.get_curve("train/loss")


@dataclass(frozen=True)
class TaskRun:
    """What a run has done: its outcome, all that it logged, and its folder, which has the checkpoints."""

    result: TrainResult
    log: MemoryLog
    folder: Path

    @property
    def losses(self) -> dict[int, float]:
        """The training loss by step."""
        return self.log.losses

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors of the retained network by name. An interrupted run has none."""
        assert self.result.weights is not None, "the run was interrupted: it is to be continued first"
        return dict(open_tensors(list_files(self.result.weights)))

    @property
    def checkpoints(self) -> list[int]:
        """The steps of its checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*"))


def train(
    task: Task,
    *,
    home: Path,
    steps: int | None = None,
    spec: TrainSpec | None = None,
    world: World | None = None,
    log: MemoryLog | None = None,
    interrupt_after: int | None = None,
    **fields: Any,
) -> TaskRun:
    """Train `task` in this process, and return what the run has done.

    home:            the run's folder; a run that has checkpoints there continues
    steps:           short for `stop={"steps": ...}`
    spec:            instead of `fields`, which are those of TrainSpec
    world:           this process's part of a group of ranks, each of which calls this function; else it is alone
    log:             to read after the run has failed; by default a new one
    interrupt_after: steps of this call after which the run is interrupted, as by Ctrl-C

    Raises as `shoal.fit` does.
    """
    if steps is not None:
        fields["stop"] = {"steps": steps}
    spec = spec or TrainSpec.parse({"task": type(task).__name__, **DEFAULTS, **fields})
    log = log or MemoryLog()
    home.mkdir(parents=True, exist_ok=True)
    calls = itertools.count(1)
    trainer = Trainer(
        spec,
        task,
        world or World.single("cpu"),
        home,
        run_id="test",
        journal=log,
        should_stop=lambda: interrupt_after is not None and next(calls) >= interrupt_after,
    )
    return TaskRun(trainer.run(), log, home)
