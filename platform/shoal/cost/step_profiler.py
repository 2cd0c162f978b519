"""The cost of a running Trainer's steps, measured on a few of them.

Owns the schedule of an attempt's first steps: some for warm-up, some timed, and one profiled operator by operator. Then
the table is reported; if steps are short, more are timed, and it is reported again. All other steps run as if there
were no profiler. Called by the Trainer, on every rank at the same steps.

The bubble of a step is the share of its schedule in which ranks do not compute. A rank that finishes its last action
before the others leaves the schedule, and waits later: in `clip`, or for the first message of the next step. So the
schedule lasts as long as on the rank that is in it for longest.

    profiler = StepProfiler(model, optimizer, world)
    with profiler.step():                 # around train_step, clip and optimizer.step
        ...
    if profiler.is_due:                   # true once or twice, on every rank alike
        log.record_event(MEASURED, **profiler.collect_table().to_details())
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.cost.cost_table import CostTable, combine_ranks
from shoal.cost.measure.memory import MemoryGrowth, bytes_of, measure_growth, state_of, storages_of, to_local
from shoal.cost.measure.op_counter import OpCounts, count_ops
from shoal.parallel.comm.world import World, read_clock_s
from shoal.parallel.layers.precision import DTYPES
from shoal.parallel.model import ParallelModel
from shoal.parallel.spec import Precision

NUM_WARM_UP, NUM_TIMED = 3, 7
MIN_TIMED_S, MAX_MORE = 1.0, 60  # a few short steps depend on the machine's momentary load: continue for so long

_PRODUCT_SIZE = {"cpu": 768, "cuda": 8192}  # of the matrices by which a device's peak is measured
_PRODUCT_REPEATS = 4


@dataclass(frozen=True)
class TimedStep:
    """One step on one rank: seconds in total, of its pipeline schedules, and of the rank's computations in them.

    pipeline: the index of the pipeline, among those with other samples; its ranks wait for each other
    """

    pipeline: int
    step_s: float
    busy_s: float
    scheduled_s: float


class StepProfiler:
    """One for each rank and attempt of a run.

    num_metered: the number of steps to profile, if they are not all alike; several are averaged
    average:     of the weights, which is stored in addition
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        world: World,
        num_metered: int = 1,
        average: Sequence[Tensor] = (),
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._average = average
        self._num_metered, self._metered_steps = num_metered, list[dict[str, float]]()
        self._num_seen, self._num_timed = 0, NUM_TIMED
        self._timed_steps: list[TimedStep] = []
        self._found: dict[str, float] = {}
        self._num_reported = 0

    @property
    def is_due(self) -> bool:
        """Whether there are measurements that were not read yet."""
        return bool(self._found) and not self.is_done and len(self._timed_steps) == self._num_timed

    @property
    def is_done(self) -> bool:
        """Whether the profiler can be dropped."""
        return self._num_reported == 2

    def step(self) -> AbstractContextManager[object]:
        self._num_seen += 1
        if self._num_seen <= NUM_WARM_UP or self.is_due or self.is_done:
            return nullcontext()
        return self._time_step() if len(self._timed_steps) < self._num_timed else self._profile_step()

    @contextmanager
    def _time_step(self) -> Iterator[None]:
        busy_s, scheduled_s = sum(self._model.busy_by_stage.values()), self._model.scheduled_s
        began_s = self._now_s()
        yield
        step_s = self._now_s() - began_s
        busy_s = sum(self._model.busy_by_stage.values()) - busy_s
        self._timed_steps.append(
            TimedStep(self._model.data_rank, step_s, busy_s, self._model.scheduled_s - scheduled_s)
        )

    @contextmanager
    def _profile_step(self) -> Iterator[None]:
        with profile_step(self._model, self._optimizer, self._average) as profile:
            yield
        metered = profile.values
        self._metered_steps.append(metered)
        if len(self._metered_steps) == self._num_metered:
            for name in metered:  # the average work of a step, and its maximum memory
                values = [step[name] for step in self._metered_steps]
                is_size = name.startswith(("memory", "parameters"))
                self._found[name] = max(values) if is_size else statistics.mean(values)

    def _now_s(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()

    def collect_table(self) -> CostTable:
        """The table of all ranks. Collective."""
        self._num_reported += 1
        typical = statistics.median if self._num_metered == 1 else statistics.mean
        self._found["step_s"] = typical(timed.step_s for timed in self._timed_steps)
        everyone = self._world.gather((self._found, self._timed_steps))
        longest_s = max(found["step_s"] for found, _ in everyone)
        more = min(MAX_MORE, int(MIN_TIMED_S / longest_s) - self._num_timed)
        self._num_timed += max(0, more)
        if more <= 0:
            self._num_reported = 2
        ranks = {rank: found for rank, (found, _) in enumerate(everyone)}
        values = combine_ranks(ranks)
        if self._model.busy_by_stage:
            steps = zip(*(timed_steps for _, timed_steps in everyone), strict=True)
            values["bubble"] = statistics.median(compute_bubble(step) for step in steps)
        return CostTable(values, ranks=ranks)


def compute_bubble(step: Sequence[TimedStep]) -> float:
    """The share of one step's schedules in which its ranks have waited.

    step: the times of each rank
    """
    longest_s: dict[int, float] = {}
    for rank in step:
        longest_s[rank.pipeline] = max(rank.scheduled_s, longest_s.get(rank.pipeline, 0.0))
    return 1.0 - sum(rank.busy_s for rank in step) / sum(longest_s[rank.pipeline] for rank in step)


@dataclass
class StepProfile:
    """One step on this rank: numbers of the cost table, and what the operators took. Complete when it has ended."""

    counts: OpCounts
    values: dict[str, float] = field(default_factory=dict)


@contextmanager
def profile_step(
    model: ParallelModel,
    optimizer: Optimizer,
    average: Sequence[Tensor] = (),
    *,
    is_fake: bool = False,
    allocates: bool = True,
) -> Iterator[StepProfile]:
    """Profile the one step in the body. A dry run and a running Trainer measure alike.

    average:   of the weights, which is stored all the time
    is_fake:   the other ranks are not there
    allocates: False of fake tensors, whose memory is in `counts` alone
    """
    state = state_of(model.modules, optimizer)
    parameters = [parameter for _, parameter in model.named_parameters()]
    device = next((each.device for each in state["parameters"]), torch.device("cpu"))
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    references = {id(each): weakref.ref(each) for gradient in gradients for each in storages_of(gradient)}
    for parameter in parameters:
        parameter.grad = None
    buckets = [storage for storage in (reference() for reference in references.values()) if storage is not None]
    resident = [*state["parameters"], *state["optimizer"], *average]
    past_group_bytes = model.shm_sent_bytes
    growth = measure_growth(device) if allocates else nullcontext(MemoryGrowth())
    with growth as grown, count_ops(grown, resident, buckets, is_fake, model.shared_memory) as counts:
        profile = StepProfile(counts)
        yield profile
    saved = model.model_state()  # without weights that are frozen for good, which no count of parameters has
    counted = [parameter for name, parameter in model.named_parameters() if name in saved]
    profile.values |= {
        "parameters_rank": float(sum(to_local(parameter).numel() for parameter in counted)),
        "flops_rank": counts.flops,
        "memory_parameters": float(bytes_of(state["parameters"])),
        "memory_gradients": float(bytes_of(parameter.grad for parameter in parameters)),
        "memory_optimizer": float(bytes_of(state["optimizer"])),
        "memory_average": float(bytes_of(average)),
        "memory_activations": float(counts.saved_bytes),
        "memory_peak": float(counts.resident_bytes + grown.peak_bytes),
        "sent_bytes": counts.sent_bytes + model.shm_sent_bytes - past_group_bytes,
    }


def measure_peak_flops(device: torch.device, precision: Precision) -> float:
    """The peak arithmetic of a device, in some hundredths of a second: operations per second of square matrix products
    in `precision`, the fastest of a few.

    The layouts are those of a layer, forward and for its weight's gradient: in bf16 some CPUs take ten times as long
    for two matrices that are both stored by rows.
    """
    size = _PRODUCT_SIZE.get(device.type, _PRODUCT_SIZE["cpu"])
    left = torch.ones(size, size, dtype=DTYPES[precision], device=device)
    product = torch.empty_like(left)
    fastest_s = float("inf")
    for first, second in [(left, left.T), (left.T, left)] * _PRODUCT_REPEATS:
        began_s = read_clock_s(device)
        torch.mm(first, second, out=product)
        fastest_s = min(fastest_s, read_clock_s(device) - began_s)
    return 2.0 * size**3 / fastest_s
