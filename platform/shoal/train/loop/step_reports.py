"""What the Trainer reports of its steps: losses, rates, distributions of weights and gradients.

Called by the Trainer, after each step and at each report. Decides nothing. A step's loss stays on the device until the
ranks exchange signals, so that no step waits for it. Histograms are of this rank's part: of sharded weights its shard,
of a pipeline its stages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import default_convert

from shoal.parallel.model import ParallelModel
from shoal.runs.record.event_log import EventLog, NullLog
from shoal.sync.synchronizer import RankSignals

NUM_BINS = 64
CHUNK_SIZE = 2**24  # torch.histc counts in float32, which cannot count further by 1


@dataclass(frozen=True)
class UnreadLoss:
    """The loss of a step, which is read later, when the device has computed it.

    named:  further losses, by the Task's names
    weight: of the loss in a mean over steps
    """

    step: int
    loss: Tensor
    norm: Tensor | None
    indices: list[int] | None
    named: Mapping[str, Tensor] = field(default_factory=dict)
    weight: Tensor | float = 1.0


class LossReport:
    """The losses of the steps since the last exchange, and their sums over all ranks since the last report."""

    def __init__(self) -> None:
        self._steps: list[UnreadLoss] = []
        self._names: tuple[str, ...] = ()  # of the Task's further losses
        self._clear_sums()

    def _clear_sums(self) -> None:
        self._sum, self._weight = 0.0, 0.0
        self._named_sums: list[float] = []

    def add(self, step: UnreadLoss) -> None:
        self._names = self._names or tuple(sorted(step.named))
        self._steps.append(step)

    def sum_steps(self) -> RankSignals:
        """This rank's weighted sums of the losses, the sum of the weights, and whether each loss and norm is finite."""
        if not self._steps:
            return RankSignals(named_losses=(0.0,) * len(self._names))
        losses = torch.stack([each.loss for each in self._steps]).double()
        norms = [each.norm for each in self._steps if each.norm is not None]
        read = torch.cat([losses, torch.stack(norms).double()]) if norms else losses
        weights = torch.tensor([float(each.weight) for each in self._steps], dtype=torch.double)
        named = []
        for name in self._names:
            values = [each.named[name] * each.weight for each in self._steps if name in each.named]
            named.append(float(torch.stack(values).sum()) if values else 0.0)
        return RankSignals(
            is_not_finite=not read.isfinite().all(),
            loss=float((losses.cpu() * weights).sum()),
            num_losses=float(weights.sum()),
            named_losses=tuple(named),
        )

    def take(self, combined: RankSignals) -> None:
        """Count the sums of all ranks, instead of the steps."""
        self._sum += combined.loss
        self._weight += combined.num_losses
        sums = zip_longest(self._named_sums, combined.named_losses, fillvalue=0.0)
        self._named_sums = [before + new for before, new in sums]
        self._steps.clear()

    def make_means(self) -> dict[str, float]:
        """The mean losses since the last report, which begins anew; NaN where no step had a weight."""
        sums = {"loss": self._sum, **dict(zip(self._names, self._named_sums, strict=False))}
        means = {f"train/{name}": each / self._weight if self._weight else math.nan for name, each in sums.items()}
        self._clear_sums()
        return means

    def find_not_finite(self) -> tuple[int, bool, list[int] | None] | None:
        """The first step that is not finite, whether only its gradient is not, and its samples."""
        for each in self._steps:
            is_loss_finite = bool(torch.isfinite(each.loss))
            if not is_loss_finite or (each.norm is not None and not bool(torch.isfinite(each.norm))):
                return each.step, is_loss_finite, each.indices
        return None


def find_remedy(source: Any, indices: Iterable[int], splits_batches: bool) -> str:
    """The remedy for samples whose loss or gradient is not finite; "" for that of any."""
    for index in indices:
        for path, leaf in tree_leaves_with_path(default_convert(source[index])):
            values = torch.as_tensor(leaf).double() if isinstance(leaf, Tensor | float) else torch.zeros(())
            for place in values.isfinite().logical_not().nonzero().tolist():
                where = f"{values[tuple(place)]} in its {keystr(path)} at {place}"
                return f"sample {index} of the data has {where}: repair it, or leave it out"
    if not splits_batches:
        return ""
    return (
        "if a part of the batch may have nothing to divide by, return shoal.Mean(total, count); "
        "else lower optimizer.learning_rate, set clip_norm, or look at these samples"
    )


class ThroughputMeter:
    """Rates since the last report, and the seconds of all training steps.

    peak_flops:       per second, of all devices together
    communicated_s:   returns the seconds spent waiting for other ranks so far; NaN if unknown
    flops_per_sample: forward and backward; NaN until known
    """

    def __init__(self, peak_flops: float, communicated_s: Callable[[], float]) -> None:
        self._communicated_s = communicated_s
        self.flops_per_sample, self._peak_flops = math.nan, peak_flops
        self._training_before_s = 0.0
        self._began_s = self._reported_s = time.perf_counter()
        self._steps = self._samples = 0
        self._paused_s = self._paused_before_s = 0.0
        self._waited_s = self._communicated_before_s = self._communicated_paused_s = 0.0

    def begin(self, training_s: float) -> None:
        """Start measuring; earlier attempts of the run have spent `training_s` on their steps."""
        self._training_before_s = training_s
        self._began_s = self._reported_s = time.perf_counter()

    @property
    def training_s(self) -> float:
        """Seconds of training steps, over all attempts, without evaluations and checkpoints."""
        return self._training_before_s + time.perf_counter() - self._began_s - self._paused_s

    def count_steps(self, num_steps: int, num_samples: int) -> None:
        """Count steps over this number of samples, of all ranks. Replicas without waiting make several at once."""
        self._steps += num_steps
        self._samples += num_samples

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the body (an evaluation, a checkpoint) from the step times."""
        began_s, communicated_s = time.perf_counter(), self._communicated_s()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - began_s
            self._communicated_paused_s += self._communicated_s() - communicated_s

    def compute_rates(self, waited_s: float) -> dict[str, float]:
        """Rates since the last report, given the sum of seconds spent waiting for data.

        Unknown values (NaN) are omitted.
        """
        now_s, steps = time.perf_counter(), self._steps
        elapsed_s = max(now_s - self._reported_s - (self._paused_s - self._paused_before_s), 1e-9)
        per_s = self._samples / elapsed_s
        communicated_s = self._communicated_s() - self._communicated_paused_s
        rates = {
            "samples/per_s": per_s,
            "step/seconds": elapsed_s / max(steps, 1),
            "wait/data": _share(waited_s - self._waited_s, elapsed_s),
            "wait/communication": _share(communicated_s - self._communicated_before_s, elapsed_s),
            "flops/utilisation": per_s * self.flops_per_sample / self._peak_flops,
        }
        self._reported_s = now_s
        self._steps = 0
        self._samples = 0
        self._paused_before_s = self._paused_s
        self._waited_s = waited_s
        self._communicated_before_s = communicated_s
        return {name: value for name, value in rates.items() if math.isfinite(value)} if steps else {}


def _share(waited_s: float, elapsed_s: float) -> float:
    """At most 1; keeps NaN, of which `min` would make 1."""
    return min(1.0, waited_s / elapsed_s) if math.isfinite(waited_s) else math.nan


def write_histograms(journal: EventLog, model: ParallelModel, step: int) -> None:
    """Write `weights/NAME` and `gradients/NAME` of each parameter; free on ranks that write nothing."""
    if isinstance(journal, NullLog):
        return
    for name, parameter in model.named_parameters():
        for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
            histogram = None if tensor is None else compute_histogram(tensor)
            if histogram is not None:
                journal.log_histogram(step, f"{kind}/{name}", *histogram)


def compute_histogram(tensor: Tensor, num_bins: int = NUM_BINS) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts [bins] and edges [bins + 1] of the finite values of this rank's part; None if there are none.

    Counts both parts of complex values, and the stored values of a sparse gradient.
    """
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    local = local.coalesce().values() if local.is_sparse else local
    values = (torch.view_as_real(local.resolve_conj()) if local.is_complex() else local).float().flatten()
    values = values[torch.isfinite(values)]
    if not values.numel():
        return None
    low, high = (float(each) for each in torch.aminmax(values))
    if low == high:  # a bin around the only value
        margin = max(abs(low), 1.0) * 1e-3
        low, high = low - margin, high + margin
    counts = torch.stack([torch.histc(part, num_bins, low, high).long() for part in values.split(CHUNK_SIZE)])
    return counts.sum(0).cpu().numpy(), np.linspace(low, high, num_bins + 1)
