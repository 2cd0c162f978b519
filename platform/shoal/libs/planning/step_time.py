"""The seconds of a step of each kind of plan, from what was measured. Pure arithmetic.

A step is over the full global batch, by all workers together. Called by `planner`. W workers, S servers, H hosts, P
bytes of parameters.

    all-reduce      compute + what the collectives take beyond the backward pass that hides them
    pipeline        the simulated schedule + what is outside of it, the data ranks' collectives included
    server, BSP     compute + push + update of W gradients + pull
    server, free    the longest of: a worker's own loop, the server's W updates, all work divided by the cores
    local steps     compute + the optimiser + (push + update + pull) / every
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.extend.sync import ServerCosts
from shoal.libs.planning.calibration import Calibration, LinkCost
from shoal.libs.planning.predict.rank_step import CollectiveTraffic

BACKWARD_SHARE = 2 / 3  # of computing: two products for each one of the forward pass


@dataclass(frozen=True)
class Machine:
    """The hardware of a plan, with all numbers known.

    cores:         that share the computing of a host's processes; None: devices of their own
    is_overlapped: whether devices compute while they communicate within a host
    network_s:     a byte from host to host
    latency_s:     a message from host to host
    device_s:      a byte between devices of a host; None: as between processes of this machine
    speed:         of a device, as a multiple of this machine's
    """

    hosts: int
    devices: int
    cores: int | None
    is_overlapped: bool = False
    network_s: float = 0.0
    latency_s: float = 0.0
    device_s: float | None = None
    speed: float = 1.0

    def hosts_of(self, ranks: Iterable[int]) -> list[int]:
        return [rank // self.devices for rank in ranks]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: computing, reading data included; communication that nothing hides; the pipeline's bubble.

    limit: what the time is bound by, if not by the workers
    """

    compute_s: float
    exposed_s: float = 0.0
    bubble_s: float = 0.0
    limit: str = ""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s


def compute_slowdown(calibration: Calibration, machine: Machine, workers: int, *, is_waiting: bool = True) -> float:
    """How much longer a worker computes than alone on this machine, beside the others of its host.

    is_waiting: each step lasts as long as that of the slowest worker
    """
    if machine.cores is None:
        return 1.0 / machine.speed
    near, alone_s = min(workers, machine.devices), calibration.alone.compute_s
    most = (calibration.slowest if is_waiting else calibration.together).compute_s / alone_s
    share = min(1.0, (near - 1) / (calibration.num_processes - 1))
    return (1.0 + max(0.0, most - 1.0) * share) / machine.speed


def time_collectives(
    traffic: Iterable[CollectiveTraffic], calibration: Calibration, machine: Machine, compute_s: float
) -> float:
    """Seconds that a step's collectives add to its computing."""
    near_s = 0.0
    far_s = 0.0
    far_calls = 0
    for each in traffic:
        if len(set(machine.hosts_of(each.ranks))) == 1:
            link = calibration.shared if each.is_shared else calibration.sockets
            link = link if machine.device_s is None else LinkCost(link.latency_s, machine.device_s)
            near_s += link.time_s(each.num_calls, each.sent_bytes)
        else:
            # A ring over hosts; groups of other ranks of the same host share its network.
            hosts = machine.hosts_of(each.ranks)
            rings = max(1, machine.devices // max(map(hosts.count, hosts)))
            link = LinkCost(2 * (len(each.ranks) - 1) * machine.latency_s, rings * machine.network_s)
            far_s += link.time_s(each.num_calls, each.sent_bytes)
            far_calls += each.num_calls
    if machine.is_overlapped:
        far_s, near_s = far_s + near_s, 0.0
    hidden_s = BACKWARD_SHARE * compute_s
    return near_s + max(far_s - hidden_s, far_s / max(1, far_calls))  # nothing hides the last one


def time_synchronous(
    compute_s: float, traffic: Iterable[CollectiveTraffic], calibration: Calibration, machine: Machine
) -> StepTime:
    """Without a pipeline. compute_s: of a worker, beside the others of its host."""
    return StepTime(compute_s, time_collectives(traffic, calibration, machine, compute_s))


def time_exchange(
    costs: ServerCosts, calibration: Calibration, machine: Machine, workers: int, servers: int, num_pushes: int
) -> float:
    """Seconds in which all workers push at once, each server applies `num_pushes` of them, and all pull."""
    crossing = workers - machine.devices if machine.hosts > 1 else 0  # of the workers, to each server
    network_s = 2 * (crossing * costs.weight_bytes / servers * machine.network_s + (crossing > 0) * machine.latency_s)
    return _add_parts(costs, calibration, num_pushes) * compute_exchange_factor(costs, calibration) + network_s


def compute_exchange_factor(costs: ServerCosts, calibration: Calibration) -> float:
    """How much longer a real exchange on this host takes than its parts, measured one by one in one process."""
    if calibration.exchange_s is None:
        return 1.0
    return max(1.0, calibration.exchange_s / _add_parts(costs, calibration, calibration.num_processes))


def _add_parts(costs: ServerCosts, calibration: Calibration, num_pushes: int) -> float:
    return 2 * costs.copy_s + 2 * calibration.call_s + costs.time_update_s(num_pushes)


def time_bsp(
    compute_s: float, costs: ServerCosts, calibration: Calibration, machine: Machine, workers: int, servers: int
) -> StepTime:
    """Each update waits for all workers."""
    return StepTime(compute_s, time_exchange(costs, calibration, machine, workers, servers, workers))


def time_free(
    compute_s: float,
    slowdown: float,
    costs: ServerCosts,
    calibration: Calibration,
    machine: Machine,
    workers: int,
    servers: int,
    threads: int = 1,
) -> StepTime:
    """No worker waits for another; each waits for its own update. threads: of a worker."""
    factor = compute_exchange_factor(costs, calibration)
    own_s = _add_parts(costs, calibration, 1) * factor
    far_bytes = costs.weight_bytes * (machine.hosts - 1) / machine.hosts
    own_s += 2 * (far_bytes * machine.network_s + (machine.hosts > 1) * machine.latency_s)
    limits = {"": compute_s + own_s, "the server's updates": workers * costs.time_update_s(1)}
    crossing = workers - machine.devices if machine.hosts > 1 else 0
    limits["the server's network"] = crossing * costs.weight_bytes / servers * machine.network_s
    if machine.cores is not None:
        busy_s = min(workers, machine.devices) * (compute_s * threads + 2 * costs.copy_s + 2 * calibration.call_s)
        limits["the host's cores"] = (busy_s + workers * costs.time_update_s(1) * slowdown) / machine.cores
    limit = max(limits, key=lambda name: limits[name])
    return StepTime(compute_s, limits[limit] - compute_s, limit=limit)


def time_local_steps(
    compute_s: float,
    costs: ServerCosts,
    calibration: Calibration,
    machine: Machine,
    workers: int,
    servers: int,
    every: int,
) -> StepTime:
    """An exchange of all after `every` steps."""
    exchange_s = (
        time_exchange(costs, calibration, machine, workers, servers, workers) + costs.copy_s
    )  # and keeps a copy
    return StepTime(compute_s, (exchange_s + costs.copy_s) / every)  # a copy of the pulled weights is kept
