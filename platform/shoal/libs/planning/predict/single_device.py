"""The cost of one sample on one device, before any plan: parameters, arithmetic forward and backward, latency.

Owns the isolation of a trial of a Task (random numbers, threads). Called by `predict`. Starts no process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.extend.cost import count_ops
from shoal.extend.data import Batch, Data, load_first_batch
from shoal.extend.parallel import eval_mode, get_train_step, get_value, read_clock_s, sum_losses
from shoal.extend.train import Task
from shoal.random_state import preserve_rng

NUM_LATENCIES = 20
LATENCY_BUDGET_S = 0.2
MIN_TIMING_S = 0.03  # a shorter step does not predict the time of a larger one
_PARAMETERS_WITHOUT_PRODUCT = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class SingleDeviceProfile:
    """The full model in one process. FLOPs are of a sample, `sample_s` is of a step's share; NaN: not timed."""

    parameters: int
    trainable: int
    flops_forward: float
    flops_backward: float
    unknown: tuple[str, ...]
    sample_s: float = math.nan
    latency_s: float = math.nan

    @classmethod
    def count(
        cls, model: nn.Module, num_samples: int, flops: tuple[float, float], unknown: Iterable[str]
    ) -> SingleDeviceProfile:
        """flops: forward and backward, of all samples"""
        sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
        parameters, trainable = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        forward, backward = (each / num_samples for each in flops)
        return cls(parameters, trainable, forward, backward, tuple(unknown))


@contextmanager
def preserve_process(seed: int, threads: int) -> Iterator[None]:
    """Within, random numbers begin at `seed`, and torch has so many threads; afterwards both are as before."""
    before = torch.get_num_threads()
    with preserve_rng(seed):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def profile_single_device(
    task: Task, model: nn.Module, data: Data, most: int, device: torch.device
) -> SingleDeviceProfile:
    """Run the model forward and backward on enough samples to time one, and forward on one.

    Its modules stay in their training modes: some may be frozen.

    most: samples: those of a micro-batch
    """
    num_samples, seconds = 0, 0.0
    while num_samples < most and seconds < MIN_TIMING_S:
        num_samples = min(most, max(2, 4 * num_samples))
        batch = load_first_batch(data, num_samples, device, is_exact=True)
        _forward_backward(task, model, batch)
        passes_s = []
        for _ in range(2):
            began_s = read_clock_s(device)
            _forward_backward(task, model, batch)
            passes_s.append(read_clock_s(device) - began_s)
        seconds = min(passes_s)
    with watch_silent_modules(model) as silent, count_ops() as reading:
        _forward_backward(task, model, batch)
    model.zero_grad()
    flops, unknown = (reading.flops_forward, reading.flops_backward), (*sorted(reading.unknown), *silent)
    profile = SingleDeviceProfile.count(model, num_samples, flops, unknown)
    latency_s = _measure_latency_s(task, model, load_first_batch(data, 1, device, is_exact=True), device)
    return replace(profile, sample_s=seconds / num_samples, latency_s=latency_s)


def _forward_backward(task: Task, model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    step = get_train_step(task)
    loss = get_value(task.loss(model(*task.inputs(batch)), batch)) if step is None else sum_losses(step(model, batch))
    loss.backward()


def _measure_latency_s(task: Task, model: nn.Module, batch: Batch, device: torch.device) -> float:
    """The median of some forward passes, after two for warm-up."""
    seconds: list[float] = []
    inputs = task.inputs(batch)
    with eval_mode(model), torch.no_grad():
        while len(seconds) < 5 or (len(seconds) < NUM_LATENCIES and sum(seconds) < LATENCY_BUDGET_S):
            began_s = read_clock_s(device)
            model(*inputs)
            seconds.append(read_clock_s(device) - began_s)
    return statistics.median(seconds[2:] or seconds)


@contextmanager
def watch_silent_modules(model: nn.Module) -> Iterator[list[str]]:
    """List the names of modules with matrices of their own that no operator used, though they were called.

    They compute outside of torch (NumPy, an extension): their arithmetic is unknown, and not 0.
    """
    silent: list[str] = []
    owners = {
        name: [each for each in module.parameters(recurse=False) if each.dim() >= 2]
        for name, module in model.named_modules()
        if not isinstance(module, _PARAMETERS_WITHOUT_PRODUCT)
    }
    called: set[str] = set()
    modules = dict(model.named_modules())
    watch = _StorageReads()
    handles = [
        modules[name].register_forward_hook(lambda *_, name=name: called.add(name))
        for name, matrices in owners.items()
        if matrices
    ]
    try:
        with watch:
            yield silent
    finally:
        for handle in handles:
            handle.remove()
        for name in sorted(called):
            if not any(each.untyped_storage().data_ptr() in watch.storages for each in owners[name]):
                silent.append(f"{name or 'model'} ({type(modules[name]).__name__})")


class _StorageReads(torch.utils._python_dispatch.TorchDispatchMode):
    """The storages that operators have read, other than by views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and torch._C._current_graph_task_id() == -1:
            flat = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
            self.storages |= {each.untyped_storage().data_ptr() for each in flat if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))
