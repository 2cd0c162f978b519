"""Selects a model's device: the requested one, or the fastest here.

Called by the predictor when it loads its first version. The choice is a pure function of measured times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from shoal.errors import ConfigError
from shoal.serve.spec.model_options import ModelOptions

NUM_TIMINGS = 5
device_lost = threading.Event()  # CUDA fails in this process from now on, as after a failed assertion in a kernel


def is_device_lost() -> bool:
    """Whether an error of CUDA was not the last one; then `device_lost` is set, and this process is of no more use."""
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        device_lost.set()
    return device_lost.is_set()


def devices(options: ModelOptions, has_cuda: bool) -> list[str]:
    """The devices on which the model could run, the CPU first. Raises ConfigError for options that no device here
    has."""
    cuda = "cuda_graphs" if options.cuda_graphs else "device" if options.device == "cuda" else ""
    cpu = "device" if options.device == "cpu" else "precision" if options.precision == "int8" else ""
    if cuda and cpu:
        problem = f"{cuda} = {getattr(options, cuda)!r} needs a GPU, and this the CPU"
        raise ConfigError(cpu, getattr(options, cpu), problem, "choose one of them")
    if cuda and not has_cuda:
        remedy = "reserve one with num_gpus, or set device: auto, and no cuda_graphs"
        raise ConfigError(cuda, getattr(options, cuda), "there is no CUDA device here for this model", remedy)
    if cuda:
        return ["cuda"]
    return ["cpu", "cuda"] if has_cuda and not cpu else ["cpu"]


def time_forwards(forward: Callable[[int], object], sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a forward over so many rows: the median of NUM_TIMINGS, after one warm-up."""
    times = {}
    for size in sizes:
        forward(size)
        taken = []
        for _ in range(NUM_TIMINGS):
            start = time.perf_counter()
            forward(size)
            taken.append(time.perf_counter() - start)
        times[size] = median(taken)
    return times


def select_fastest(times: Mapping[str, Mapping[int, float]]) -> tuple[str, str]:
    """Select the device with the least total time over all sizes; also returns a line with the times."""
    best = min(times, key=lambda device: sum(times[device].values()))
    measured = [
        f"{device} {', '.join(f'{seconds * 1e3:.3g} ms for {size}' for size, seconds in by_size.items())}"
        for device, by_size in times.items()
    ]
    return best, f"{best} is the fastest: {'; '.join(measured)} rows"
