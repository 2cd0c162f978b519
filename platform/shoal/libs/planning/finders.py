"""Find good settings before a run: the learning rate, and the batch size that fits into memory.

Called by `shoal find`. Each finder builds the Task's network in this process without a plan, tries it, and releases it:
no run, and no random state of the caller, is changed. `plots` draws the results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from shoal.batch_tree import count_samples, tensors_of
from shoal.cpu_count import count_usable_cores
from shoal.errors import ConfigError, OutOfMemory
from shoal.extend.cost import bytes_of, count_ops, measure_growth, state_of
from shoal.extend.data import length_of, load_first_batch
from shoal.extend.parallel import World
from shoal.extend.runs import format_size as in_bytes
from shoal.extend.train import (
    ScheduleSpec,
    TrainComponents,
    TrainSpec,
    build_components,
    is_out_of_memory,
    make_task,
    set_learning_rate,
)
from shoal.libs.planning.predict.single_device import preserve_process

SMOOTHED_SHARE = 0.03  # of the sweep: the width of the window in which losses are averaged
DIVERGENCE_FACTOR = 4.0  # times the best loss
MIN_SIGNAL_TO_NOISE = 7.0  # times the noise of the averaged losses: by chance alone, 99% of sweeps fall by less
SKIPPED_SHARE = 0.1  # of the sweep: at its beginning the smoothing has few values
FIRST_SIZE = 8  # tried first: small, but enough for batch-norm
PRECISION = 32  # the largest batch is found to within a 32nd
NUM_TIMED, TIMED_S = 5, 2.0
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class LearningRateResult:
    """A learning-rate range test (arXiv:1506.01186): one step at each rate, from low to high.

    smoothed:   the losses, averaged over neighbours on both sides, which shifts nothing
    suggestion: where the smoothed loss falls steepest, by the logarithm of the rate; None when it never falls, or by
                so little that it may be chance
    lowest:     where it is lowest: higher rates are too high
    diverged:   whether the sweep ended early because of divergence
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None
    lowest: float
    diverged: bool


@dataclass(frozen=True)
class BatchTrial:
    """One batch size; rates are NaN where it did not fit.

    memory_bytes: the peak allocation: weights, optimiser, batch, activations and gradients
    was_run:      False if the smaller sizes predicted that it would not fit
    """

    batch_size: int
    fits: bool
    memory_bytes: int
    step_s: float = math.nan
    was_run: bool = True

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step_s


@dataclass(frozen=True)
class BatchSizeResult:
    """tried: by size. largest: the largest that fits. fastest: in samples per second. limit_bytes: of memory.

    is_limited: whether memory ended the search, and not the samples, the time or `up_to`
    """

    tried: list[BatchTrial]
    largest: int
    fastest: int
    limit_bytes: int
    is_limited: bool


def find_learning_rate(
    spec: TrainSpec, lowest: float = 1e-7, highest: float = 10.0, num_steps: int = 100
) -> LearningRateResult:
    """Train for up to `num_steps` steps, each at a higher rate, and analyse the losses.

    Raises as building the Task does, and ConfigError for an optimiser without rate and for a first loss that is not
    finite.
    """
    rates = np.geomspace(lowest, highest, num_steps).tolist()
    losses: list[float] = []
    with _single_device_components(spec) as (parts, _):
        own = parts.optimizer.param_groups[0]["initial_lr"]
        for step, rate in enumerate(rates):
            set_learning_rate(parts.optimizer, rate / own)
            losses.append(_run_step(parts, parts.stream.next(), step))
            if not math.isfinite(losses[0]):
                problem = f"its first loss, of fresh weights, is not finite but {losses[0]}"
                raise ConfigError("task", spec.task, problem, "look at its loss and its data: no rate can mend it")
            if not math.isfinite(losses[-1]):
                break
            best, recent = min(losses), float(np.median(losses[-3:]))
            if recent - best > (DIVERGENCE_FACTOR - 1) * max(abs(best), 0.1 * abs(losses[0])):
                break
    diverged = len(losses) < num_steps or not math.isfinite(losses[-1])
    return analyse_rates(rates[: len(losses)], losses, diverged)


def analyse_rates(rates: list[float], losses: list[float], diverged: bool) -> LearningRateResult:
    """Analyse a sweep. Pure."""
    finite = [loss for loss in losses if math.isfinite(loss)]  # only the last may be non-finite
    rates = rates[: len(finite)]
    width = max(1.0, SMOOTHED_SHARE * len(rates))
    steps, values = np.arange(len(finite)), np.asarray(finite)
    weights = np.exp(-0.5 * ((steps[:, None] - steps[None, :]) / width) ** 2)  # a bell curve, over both sides
    smoothed = (weights @ values) / weights.sum(axis=1)
    if len(rates) < 3:
        return LearningRateResult(rates, finite, smoothed.tolist(), None, rates[0] if rates else math.nan, diverged)
    best = int(smoothed.argmin())
    first = min(int(SKIPPED_SHARE * len(rates)), best)
    slopes = np.gradient(smoothed, np.log(rates))[first : best + 1]
    steepest = first + int(slopes.argmin())
    fall = float(smoothed[: best + 1].max() - smoothed[best])
    # By chance alone, from differences of neighbours: of one loss, and of losses averaged over `width`.
    noise_of_one = 1.4826 * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    noise = noise_of_one / math.sqrt(2 * math.sqrt(math.pi) * width)
    is_clear = slopes.min() < 0 and best > 0 and fall > MIN_SIGNAL_TO_NOISE * noise
    suggestion = rates[steepest] if is_clear else None
    return LearningRateResult(rates, finite, smoothed.tolist(), suggestion, rates[best], diverged)


def find_batch_size(
    spec: TrainSpec, limit_bytes: int | None = None, up_to: int = 65_536, longest_s: float = 10.0
) -> BatchSizeResult:
    """The largest batch that one worker can step on, by doubling and bisection, and the speed at each size.

    limit_bytes: of memory; None: the free memory of the device, or four fifths of a CPU's. On a CPU, a size that is
                 predicted not to fit is not tried, so that the machine stays usable.
    up_to:       the end of the search; at most the number of samples, which may be unknown for an iterable
    longest_s:   of a step; a slower size is not doubled further

    Raises OutOfMemory when not even one sample fits.
    """
    whole = spec.model_copy(update={"batch_size": 1, "parallel": spec.parallel.model_copy(update={"accumulate": 1})})
    with _single_device_components(whole) as (parts, device):
        limit = limit_bytes or _get_free_bytes(device)
        trial = _BatchSearch(parts, device, limit)

        def is_slow() -> bool:
            return any(each.fits and each.step_s > longest_s for each in trial.trials.values())

        largest = search_largest(trial.fits, min(up_to, trial.num_samples or up_to), is_slow)
        if largest == 0:
            raise OutOfMemory(f"not even one sample fits into {in_bytes(limit)}: shard or split the model")
    tried = sorted(trial.trials.values(), key=lambda each: each.batch_size)
    fastest = max((each for each in tried if each.fits), key=lambda each: each.samples_per_s)
    return BatchSizeResult(tried, largest, fastest.batch_size, limit, not all(each.fits for each in tried))


def measure_footprint(spec: TrainSpec) -> tuple[int, int]:
    """Parameters, and bytes at the peak of a step of `batch_size` samples, of the Task in one process."""
    with _single_device_components(spec) as (parts, device):
        memory_bytes, _ = measure_step(parts, parts.stream.next(), device)
        return parts.num_parameters, memory_bytes


def search_largest(fits: Callable[[int], bool], up_to: int, is_enough: Callable[[], bool] = lambda: False) -> int:
    """The largest size in [1, up_to] that fits, to within a 32nd below it; 0 if none does.

    `fits` must be true up to some size and false beyond. Sizes are doubled until one does not fit or is enough.
    """
    low, high = 0, min(FIRST_SIZE, up_to)
    while fits(high):
        low = high
        if low == up_to or is_enough():
            return low
        high = min(2 * low, up_to)
    while high - low > max(1, low // PRECISION):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _BatchSearch:
    """Steps on batches of given sizes, and remembers the measurements."""

    def __init__(self, parts: TrainComponents, device: torch.device, limit_bytes: int) -> None:
        self._parts = parts
        self._device = device
        self._limit_bytes = limit_bytes
        self._data = parts.task.data()
        self.num_samples = length_of(self._data.train)
        self.trials: dict[int, BatchTrial] = {}

    def fits(self, size: int) -> bool:
        """Try this size, unless the two largest that fitted predict that it cannot."""
        expected = 0
        known = sorted((each.batch_size, each.memory_bytes) for each in self.trials.values() if each.fits)[-2:]
        if len(known) == 2:
            (small, least), (large, most) = known
            expected = int(most + (most - least) / (large - small) * (size - large))
        if self._device.type == "cpu" and expected > self._limit_bytes:
            tried: BatchTrial | None = BatchTrial(size, False, expected, was_run=False)
        else:
            tried = self._run(size)
        if tried is None:
            return False
        self.trials[size] = tried
        return tried.fits

    def _run(self, size: int) -> BatchTrial | None:
        """None if the data has too few samples, which may be unknown for an iterable."""
        try:
            batch = load_first_batch(self._data, size, self._device)
            if count_samples(batch) < size:
                return None
            memory_bytes, step_s = measure_step(self._parts, batch, self._device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return BatchTrial(size, False, self._limit_bytes)
        finally:
            self._parts.optimizer.zero_grad()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        if memory_bytes > self._limit_bytes:
            return BatchTrial(size, False, memory_bytes)
        return BatchTrial(size, True, memory_bytes, step_s)


def measure_step(parts: TrainComponents, batch: Any, device: torch.device) -> tuple[int, float]:
    """Bytes allocated at the peak of a step, including everything before; and the median seconds of a step."""
    _run_step(parts, batch, 0)  # creates the optimiser's state, and whatever the first call creates
    parts.optimizer.zero_grad()
    there = state_of(parts.model.modules, parts.optimizer)
    resident_bytes = bytes_of([*there["parameters"], *there["optimizer"], *tensors_of(batch)])
    with measure_growth(device) as grown, count_ops(grown):  # under a counter, cells of trees allocate in torch
        _run_step(parts, batch, 1)
    seconds: list[float] = []
    while not seconds or (len(seconds) < NUM_TIMED and sum(seconds) < TIMED_S):
        began_s = time.perf_counter()
        _run_step(parts, batch, 2 + len(seconds))
        seconds.append(time.perf_counter() - began_s)
    return resident_bytes + grown.peak_bytes, float(np.median(seconds))


@contextmanager
def _single_device_components(spec: TrainSpec) -> Iterator[tuple[TrainComponents, torch.device]]:
    """The components of a run on one device, without a plan, a schedule, an average or selective backprop."""
    degrees = {"data": 1, "replicate": 1, "shard": False, "tensor": 1, "pipeline": 1}
    plan = spec.parallel.model_copy(update=degrees)
    changes = {"parallel": plan, "workers": 1, "schedule": ScheduleSpec(), "average": None, "selective_backprop": None}
    alone = spec.model_copy(update=changes)
    with preserve_process(spec.seed, spec.threads or count_usable_cores()):
        world = World.single(spec.device)
        with closing(build_components(alone, make_task(spec.task, spec.args), world)) as parts:
            yield parts, world.device


def _run_step(parts: TrainComponents, batch: Any, step: int) -> float:
    """Run one step of the optimiser; returns the loss before it, after the device has finished."""
    loss = parts.model.train_step(batch, step)
    if parts.spec.clip_norm is not None:
        parts.model.clip_gradients(parts.spec.clip_norm)
    parts.optimizer.step()
    parts.model.on_optimizer_step()
    return float(loss)


def _get_free_bytes(device: torch.device) -> int:
    """Of the device; for a CPU four fifths of the free memory, also within a container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    free = psutil.virtual_memory().available
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return int(free * 0.8)
