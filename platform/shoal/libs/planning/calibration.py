"""What this machine takes for what every plan does, measured by processes that run at once for a few seconds.

Owns those processes. Each times the Task's own steps, alone and together with the others, then sums through shared
memory and over sockets, and calls of a service. Called by `planner`. Nothing is stored.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import TrainError
from shoal.extend.parallel import ShmAllReduce, World, set_network_interface
from shoal.extend.sync import (
    EVICTED_BYTES,
    CostProbe,
    Request,
    RpcClient,
    RpcService,
    find_sync_config_type,
    load_probe,
)
from shoal.extend.train import TrainComponents, TrainSpec, build_components, build_model, make_optimizer, make_task

TIMEOUT_S = 120.0
# steps of the Task: for so long, and at least so many
NUM_ROUNDS = 3
STEPS_S = 0.3
LEAST_STEPS = 3
SMALL_BYTES, LARGE_BYTES = 256, 4 << 20
NUM_SMALL = 150
NUM_LARGE = 12
NUM_CALLS = 200
NUM_EXCHANGES = 40
POLL_S = 0.05
BETWEEN_S = 0.001  # of computing between two collectives: gloo's threads must then wake on busy cores


Add = Callable[[Tensor], object]  # replaces values by their sum over all processes


@dataclass(frozen=True)
class LinkCost:
    """Seconds of a collective: `latency_s`, and `byte_s` for each byte that a rank sends, as in a ring."""

    latency_s: float
    byte_s: float

    def time_s(self, num_calls: float, sent_bytes: float) -> float:
        return num_calls * self.latency_s + sent_bytes * self.byte_s


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of the Task: computing it, of which the optimiser, and reading its batch."""

    compute_s: float
    optimizer_s: float
    input_s: float


@dataclass(frozen=True)
class Calibration:
    """Measured on this machine.

    num_processes: that computed at once
    samples:       of each of their steps
    alone:         a step of one process while the others wait
    together:      a step of each while all compute
    slowest:       the longest of a step of each while all compute
    shared:        sums between them through shared memory
    sockets:       sums between them over loopback, by gloo
    call_s:        a call of a service in another process, with its answer
    exchange_s:    a push of all to a server process, its update and a pull of all, between two steps; None: not tried
    """

    num_processes: int
    samples: int
    alone: StepTimes
    together: StepTimes
    slowest: StepTimes
    shared: LinkCost
    sockets: LinkCost
    call_s: float
    exchange_s: float | None = None


def calibrate(spec: TrainSpec, num_processes: int, samples: int, threads: int, *, has_server: bool) -> Calibration:
    """Measure with `num_processes` (at least 2) processes of `threads` threads.

    spec:       of the Task; its plan is not used
    samples:    of each step
    has_server: try a parameter server too, which the Task's optimiser must allow

    Raises TrainError when a process ends early, and what the Task raises.
    """
    single = spec.override(["parallel=single", "sync=all_reduce", "workers=1", f"batch_size={samples}"])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    with (
        tempfile.TemporaryDirectory(prefix="shoal-plan-") as folder,
        _find_probe().open_controller(folder, num_processes),
        ProcessPoolExecutor(num_processes + 1, context) as pool,
    ):
        arguments = num_processes, single, threads, folder, has_server
        running = [pool.submit(_measure, rank, *arguments) for rank in range(num_processes)]
        server = [pool.submit(_serve, num_processes, single, folder)] if has_server else []
        try:
            results = [each.result(TIMEOUT_S) for each in running]
            for each in server:
                each.result(TIMEOUT_S)
        except BrokenProcessPool as error:
            raise TrainError("a process that measures this machine has ended early") from error
    return results[0]


def _find_probe() -> CostProbe:
    return load_probe(find_sync_config_type("parameter_server")())  # type: ignore[call-arg]  # its kind is the default


def _serve(num_workers: int, spec: TrainSpec, folder: str) -> None:
    """The process of a parameter server, until the workers are done."""
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    task = make_task(spec.task, spec.args)
    optimizer = make_optimizer(task, spec.optimizer, build_model(task, spec.task).parameters())
    done = Path(folder, "done")
    with _find_probe().open_server(folder, num_workers, optimizer):
        while not done.exists():
            time.sleep(POLL_S)


def _measure(rank: int, size: int, spec: TrainSpec, threads: int, folder: str, has_server: bool) -> Calibration:
    """One process. All do the same at the same time; the first one's numbers count."""
    sys.stdout = sys.stderr  # a Task's own output is not part of a result
    torch.set_num_threads(threads)
    set_network_interface("127.0.0.1")
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    try:
        parts = build_components(spec, make_task(spec.task, spec.args), World.single(spec.device))
        try:
            rounds = [
                (_time_steps(parts, has_part=rank == 0), _time_steps(parts, has_part=True)) for _ in range(NUM_ROUNDS)
            ]
            exchange_s = _measure_exchange(parts, rank, folder) if has_server else None
        finally:
            parts.close()
            dist.barrier()
            Path(folder, "done").touch()
        assert dist.group.WORLD is not None
        sums = ShmAllReduce.try_create(dist.group.WORLD)
        sockets = _measure_link(size, dist.all_reduce, is_awaited=False)
        shared = sockets
        if sums is not None:
            shared = _measure_link(size, sums.sum, is_awaited=True)
            sums.close()
        call_s = _measure_call(rank, f"ipc://{folder}/service")
        alone = _take_least([each.take_medians() for each, _ in rounds])
        together = _take_least([each.take_medians() for _, each in rounds])
        times = alone, together, _take_least([each.take_slowest() for _, each in rounds])
        return Calibration(size, spec.batch_size, *times, shared, sockets, call_s, exchange_s)
    finally:
        dist.destroy_process_group()


class _Echo(Request[None], frozen=True):
    """Answered at once."""


@dataclass(frozen=True)
class _Steps:
    """[processes, steps, 3]: seconds of each step in each process that took part: the fields of StepTimes."""

    seconds: list[list[tuple[float, float, float]]]

    def take_medians(self) -> StepTimes:
        """Of the first process. The first step warms up and is left out."""
        return _take_medians(self.seconds[0])

    def take_slowest(self) -> StepTimes:
        """Of the longest among the processes' steps of the same number."""
        num_steps = min(map(len, self.seconds))
        steps = zip(*(each[:num_steps] for each in self.seconds), strict=True)
        return _take_medians([max(each) for each in steps])


def _take_medians(steps: list[tuple[float, float, float]]) -> StepTimes:
    return StepTimes(*(statistics.median(values) for values in zip(*steps[1:], strict=True)))


def _take_least(rounds: list[StepTimes]) -> StepTimes:
    """Other load on the machine only lengthens a step."""
    return min(rounds, key=lambda each: each.compute_s)


def _time_steps(parts: TrainComponents, *, has_part: bool) -> _Steps:
    """Some steps, at once in every process that has a part in it; the others wait."""
    taken = list[tuple[float, float, float]]()
    dist.barrier()
    began_s = time.perf_counter()
    while has_part and (len(taken) <= LEAST_STEPS or time.perf_counter() - began_s < STEPS_S):
        before_s = time.perf_counter()
        batch = parts.stream.next()
        read_s = time.perf_counter()
        parts.train_step(batch, len(taken))
        computed_s = time.perf_counter()
        parts.optimizer.step()
        ended_s = time.perf_counter()
        taken.append((ended_s - read_s, ended_s - computed_s, read_s - before_s))
    everyone: list[list[tuple[float, float, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, taken)
    return _Steps([steps for steps in everyone if steps])


def _measure_exchange(parts: TrainComponents, rank: int, folder: str) -> float:
    """Seconds of a step with a parameter server beyond computing, waiting for the slower worker included."""
    with closing(_find_probe().open_worker(folder, rank, parts.optimizer)) as sync:
        sync.begin(0)
        seconds = []
        for step in range(NUM_EXCHANGES):
            batch = parts.stream.next()
            began_s = time.perf_counter()
            sync.before_step()
            pulled_s = time.perf_counter()
            parts.train_step(batch, step)
            computed_s = time.perf_counter()
            sync.apply_gradients()
            seconds.append(time.perf_counter() - computed_s + pulled_s - began_s)
        return statistics.median(seconds[1:])


def _measure_link(size: int, add: Add, *, is_awaited: bool) -> LinkCost:
    """The cost of `add`, which replaces values by their sum over all processes.

    is_awaited: the calling thread itself waits for the others. Otherwise threads must wake for each sum, sooner or
                later by chance, so that the mean of many counts, on cores that compute in between
    """
    small_s = _time_sums(SMALL_BYTES, NUM_SMALL, add)
    large_s = _time_sums(LARGE_BYTES, NUM_LARGE, add)
    sent_bytes = 2 * (size - 1) / size * LARGE_BYTES
    byte_s = max(0.0, statistics.median(large_s) - statistics.median(small_s)) / sent_bytes
    latency_s = statistics.median(small_s)
    if not is_awaited:
        latency_s = statistics.mean(_time_sums(SMALL_BYTES, NUM_SMALL, add, BETWEEN_S))
    return LinkCost(latency_s, byte_s)


def _time_sums(size_bytes: int, repeats: int, add: Add, between_s: float = 0.0) -> list[float]:
    values, factor = torch.zeros(size_bytes // 4), torch.ones(256, 256)
    others, seconds = torch.zeros(EVICTED_BYTES // 4 if size_bytes == LARGE_BYTES else 0), []
    for _ in range(repeats):
        others += 1
        deadline_s = time.perf_counter() + between_s
        while time.perf_counter() < deadline_s:
            factor @ factor
        began_s = time.perf_counter()
        add(values)
        seconds.append(time.perf_counter() - began_s)
    return seconds[2:]


def _measure_call(rank: int, address: str) -> float:
    """Process 1 calls a service of process 0, and all have its median."""
    answer_s = torch.zeros(1, dtype=torch.double)
    if rank == 0:
        service = RpcService(address, {_Echo: lambda caller, request: None})
        service.start()
        dist.barrier()
        dist.broadcast(answer_s, 1)
        service.close()
        return answer_s.item()
    dist.barrier()
    if rank == 1:
        client = RpcClient(address, TIMEOUT_S)
        seconds = []
        for _ in range(NUM_CALLS):
            began_s = time.perf_counter()
            client.call(_Echo())
            seconds.append(time.perf_counter() - began_s)
        client.close()
        answer_s[0] = statistics.median(seconds)
    dist.broadcast(answer_s, 1)
    return answer_s.item()
