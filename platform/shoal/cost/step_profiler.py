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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.cost.cost_table import CostTable, combine_ranks
from shoal.cost.step_profile import profile_step
from shoal.parallel.comm.world import World
from shoal.parallel.model import ParallelModel

NUM_WARM_UP, NUM_TIMED = 3, 7
MIN_TIMED_S, MAX_MORE = (
    1.0,
    60,
)  # a few short steps depend on the machine's momentary load: continue for so long


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
        self._model, self._optimizer, self._world, self._average = model, optimizer, world, average
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
        with profile_step(self._model, self._optimizer, average=self._average) as found:
            yield
        self._metered_steps.append(found)
        if len(self._metered_steps) == self._num_metered:
            self._found = _combine_steps(self._metered_steps)

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


def _combine_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The average work of a step, and its maximum memory."""
    combined: dict[str, float] = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        combined[name] = max(values) if name.startswith(("memory", "parameters")) else statistics.mean(values)
    return combined


def compute_bubble(step: Sequence[TimedStep]) -> float:
    """The share of one step's schedules in which its ranks have waited.

    step: the times of each rank
    """
    longest_s: dict[int, float] = {}
    for rank in step:
        longest_s[rank.pipeline] = max(rank.scheduled_s, longest_s.get(rank.pipeline, 0.0))
    return 1.0 - sum(rank.busy_s for rank in step) / sum(longest_s[rank.pipeline] for rank in step)
