"""Run the model over the validation data: means over all samples, the same numbers on every rank.

Called by the Trainer, the launchers and the CLI. Does not change the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from shoal.data import Loader
from shoal.errors import ConfigError
from shoal.parallel.model import ParallelModel
from shoal.plugins.find import find_in_library
from shoal.train.loop.split_check import SplitCheck
from shoal.train.stateful_metric import MetricSet
from shoal.train.task import Task


def evaluate(
    model: ParallelModel, loader: Loader, stateful: MetricSet | None = None, check: SplitCheck | None = None
) -> dict[str, float]:
    """The mean loss and metrics over every sample of `loader`, each counted once. Collective.

    A `Mean` is the sum of its totals over the sum of its counts; NaN if no sample counts.

    stateful: further metrics, over the same samples
    check:    of means over several batches

    Raises ConfigError for metrics that only some batches have, since their mean would be undefined, or that depend on
    how samples are divided into batches.
    """
    sums: dict[str, Tensor] = {}
    for batch in loader:
        if check is not None and (loader.num_batches != 1 or model.num_data_ranks > 1):
            check.watch(loader.host_batch)
        measured = model.evaluate(batch, loader.num_samples, None if stateful is None else stateful.observe)
        if sums and measured.keys() != sums.keys():
            raise _make_uneven_metrics_error(sorted(measured.keys() ^ sums.keys()))
        sums = {name: measured[name] + sums.get(name, 0.0) for name in sums or measured}
    further = {} if stateful is None else {**stateful.compute(), **stateful.finish()}
    if check is not None:
        check.verify()
    names = sorted(sums)
    if not names:
        return further
    values = torch.stack([sums[name] for name in names])  # [K, 2]
    if model.num_data_ranks > 1:
        mine = float(crc32(repr(names).encode()))
        [total] = model.sum_over_data_ranks(values.new_tensor([mine])).tolist()
        if total != mine * model.num_data_ranks:
            raise _make_uneven_metrics_error(names)
    totals = dict(zip(names, model.sum_over_data_ranks(values).tolist(), strict=True))
    return {name: total / count if count else math.nan for name in sums for total, count in [totals[name]]} | further


def load_sample_sheet() -> Callable[[int, Path, Task], Any]:
    """What draws predictions of validation samples: made of their number, the run's folder and the Task, it has
    `observe(outputs, batch)` and `write(step, epoch)`. Raises ConfigError without a library that does."""
    made: Callable[[int, Path, Task], Any] = find_in_library("samples", "shoal.films", "films", "evaluate.samples")
    return made


def watch_samples(count: int, stateful: MetricSet, folder: Path, task: Task) -> Callable[[int, float], None]:
    """What writes the sheet of an evaluation, given its step and epoch; nothing, without samples."""
    if not count:
        return lambda step, epoch: None
    sheet = load_sample_sheet()(count, folder, task)
    stateful.watch.append(sheet.observe)
    write: Callable[[int, float], None] = sheet.write
    return write


def _make_uneven_metrics_error(names: list[str]) -> ConfigError:
    remedy = "give the same metrics for every batch"
    return ConfigError("Task.metrics", names, "are not measured of every batch alike", remedy)
