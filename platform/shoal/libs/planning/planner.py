"""Ranks the plans for a Task on given hardware by predicted step time and memory, and gives the reasons.

Every plan is run rank by rank in this process, without its other ranks (`predict/`); what the ranks do to each
other comes from a calibration of this machine and from the hardware's network. Called by `shoal plan`. Starts only the
calibration's processes; leaves random numbers and threads as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch

from shoal.cpu_count import count_usable_cores
from shoal.errors import ConfigError, ShoalError, summarize_error
from shoal.extend.cost import ModelTooLarge, build_small_model, measure_peak_flops
from shoal.extend.parallel import choose_device
from shoal.extend.sync import find_sync_config_type, load_probe
from shoal.extend.train import Task, TrainSpec, build_model, make_optimizer
from shoal.libs.planning import step_time
from shoal.libs.planning.calibration import Calibration, calibrate
from shoal.libs.planning.candidates import Candidate, enumerate_candidates
from shoal.libs.planning.estimate import PlanEstimate, estimate_plan, sort_estimates
from shoal.libs.planning.hardware import HardwareSpec
from shoal.libs.planning.large_planner import LargePlanner
from shoal.libs.planning.predict.fake_plan import open_task
from shoal.libs.planning.predict.predict import run_ranks, simulate_pipeline
from shoal.libs.planning.predict.rank_step import RankStep
from shoal.libs.planning.predict.single_device import preserve_process, profile_single_device
from shoal.libs.planning.step_time import Machine, StepTime

CALIBRATED_STEP_S = 0.2  # a longer step is calibrated on fewer samples


@dataclass
class Planner:
    """Estimates candidates for one Task.

    spec:     of the Task, without the choices of a plan
    sample_s: a sample's part of a step of the full model
    """

    task: Task
    spec: TrainSpec
    machine: Machine
    calibration: Calibration
    device_memory: float
    sample_s: float
    _replicas: dict[int, RankStep] = field(default_factory=dict)  # by their number

    def estimate(self, candidate: Candidate) -> PlanEstimate:
        """The candidate's numbers, or why it is not applicable."""

        def find() -> PlanEstimate:
            spec = self.spec.override(candidate.overrides)
            return (self._estimate_replicas if spec.sync.num_servers else self._estimate)(candidate, spec)

        return estimate_plan(candidate, find, self.device_memory)

    def _estimate(self, candidate: Candidate, spec: TrainSpec) -> PlanEstimate:
        """All ranks take part in each step."""
        cores = self.machine.cores or count_usable_cores()
        threads = min(count_usable_cores(), cores // min(spec.workers, self.machine.devices))  # this machine times them
        spec = spec.model_copy(update={"threads": spec.threads or max(1, threads)})
        runs = self._run_ranks(spec)
        slowdown = step_time.compute_slowdown(self.calibration, self.machine, spec.workers)
        input_s = self._input_s(spec.batch_size / spec.resolve_dims().data)
        if spec.resolve_dims().pipeline > 1:
            time = self._time_pipeline(spec, runs, slowdown, input_s)
        else:
            [run] = runs.values()
            compute_s = slowdown * run.values["step_s"] + input_s
            time = step_time.time_synchronous(compute_s, run.traffic, self.calibration, self.machine)
        memory = max(run.values["memory_peak"] for run in runs.values())
        sent = max(run.values["sent_bytes"] for run in runs.values())
        return PlanEstimate(candidate, time, memory, sent_bytes=sent)

    def _run_ranks(self, spec: TrainSpec) -> dict[int, RankStep]:
        with preserve_process(spec.seed, spec.threads or 1):
            return run_ranks(self.task, spec, self.task.data(), self.sample_s)[0]

    def _time_pipeline(self, spec: TrainSpec, runs: dict[int, RankStep], slowdown: float, input_s: float) -> StepTime:
        degrees = spec.resolve_dims()

        def time_message(stage: int, size_bytes: float) -> float | None:
            ranks = [degrees.rank(degrees.coordinates(0)._replace(pipeline=each)) for each in (0, 1)]
            near, far = (self.machine.hosts_of([each])[0] for each in (ranks[1] * stage, ranks[1] * (stage + 1)))
            if near != far:
                return self.machine.latency_s + size_bytes * self.machine.devices * self.machine.network_s
            return None if self.machine.device_s is None else size_bytes * self.machine.device_s

        played = simulate_pipeline(spec, runs, slowdown, time_message)
        rounds = spec.parallel.accumulate
        bubble_s = played.idle_share * played.step_s * rounds
        outside_s = slowdown * max(run.times.outside_s for run in runs.values()) + input_s
        compute_s = played.step_s * rounds - bubble_s + outside_s
        exposed_s = max(
            step_time.time_collectives(run.traffic, self.calibration, self.machine, compute_s) for run in runs.values()
        )
        return StepTime(compute_s, exposed_s, bubble_s)

    def _estimate_replicas(self, candidate: Candidate, spec: TrainSpec) -> PlanEstimate:
        """Each worker has the full model and takes a share of the batch by itself."""
        workers, sync = spec.workers, spec.sync
        if workers not in self._replicas:
            overrides = ["sync=all_reduce", "parallel=single", "workers=1", f"batch_size={spec.batch_size // workers}"]
            [self._replicas[workers]] = self._run_ranks(spec.override(overrides)).values()
        run = self._replicas[workers]
        with preserve_process(spec.seed, 1):
            optimizer = make_optimizer(self.task, spec.optimizer, build_model(self.task, spec.task).parameters())
            costs = load_probe(sync).measure(optimizer, sync)
        slowdown = step_time.compute_slowdown(
            self.calibration, self.machine, workers, is_waiting=sync.waits_for_all and not sync.local_steps
        )
        optimizer_s = 0.0 if sync.local_steps else min(self.calibration.alone.optimizer_s, run.values["step_s"])
        compute_s = slowdown * (run.values["step_s"] - optimizer_s) + self._input_s(spec.batch_size / workers)
        shared = costs, self.calibration, self.machine, workers, sync.num_servers
        memory, sent = run.values["memory_peak"], 2.0 * costs.weight_bytes
        if sync.local_steps:
            time = step_time.time_local_steps(compute_s, *shared, sync.local_steps)
            memory, sent = memory + costs.weight_bytes, sent / sync.local_steps
        else:
            memory -= run.values["memory_optimizer"]
            if sync.waits_for_all:
                time = step_time.time_bsp(compute_s, *shared)
            else:
                time = step_time.time_free(compute_s, slowdown, *shared, threads=spec.threads or 1)
        return PlanEstimate(candidate, time, memory, costs.memory_bytes(workers, sync.num_servers), sent)

    def _input_s(self, samples: float) -> float:
        return self.calibration.together.input_s * samples / self.calibration.samples


def rank_plans(
    task: Task,
    spec: TrainSpec,
    hardware: HardwareSpec,
    report: Callable[[str], None] = lambda line: None,
    sync: Sequence[str] = (),
) -> list[PlanEstimate]:
    """All plans: those that can run, the fastest first; then those that do not fit, and those that are not applicable.

    spec:   of the Task; `workers`, `parallel` degrees and `sync.kind` are chosen here
    report: receives the name of each plan before it is estimated
    sync:   overrides of local steps, such as `sync.every=20`

    Raises ConfigError for hardware that is not fully known, and for a Task that one device cannot train.
    """
    local = spec.override(["parallel=single", "sync.kind=diloco", *sync]).sync
    planner = _choose_planner(task, spec, hardware, report)
    machine, micro_batches = planner.machine, spec.parallel.micro_batches
    candidates = enumerate_candidates(machine.hosts, machine.devices, local.local_steps, micro_batches, sync)
    estimates = []
    for candidate in candidates:
        report(candidate.name)
        estimates.append(planner.estimate(candidate))
    return sort_estimates(estimates)


def _choose_planner(
    task: Task, spec: TrainSpec, hardware: HardwareSpec, report: Callable[[str], None]
) -> Planner | LargePlanner:
    if hardware.hosts > 1 and hardware.network is None:
        raise ConfigError("network", None, f"{hardware.hosts} hosts need one", "for example network=10Gbit")
    try:
        with preserve_process(spec.seed, count_usable_cores()):
            build_small_model(task.model)
        return _prepare(task, spec, hardware, report)
    except ModelTooLarge:
        report("the model, on fake tensors")
    try:
        cores = count_usable_cores()
        devices = hardware.devices or (torch.cuda.device_count() if torch.cuda.is_available() else cores)
        if devices > 1 and hardware.device_bandwidth is None:
            problem = f"{devices} devices of a host need one, since this model is too large to measure it with"
            raise ConfigError("device_bandwidth", None, problem, "for example device_bandwidth=300GB")
        if spec.device == "cuda" and not torch.cuda.is_available():
            for name, example in (("device_flops", "400TFLOP"), ("device_memory", "80GB")):
                if getattr(hardware, name) is None:
                    problem = "is needed for device=cuda: this machine has no GPU to read it from"
                    raise ConfigError(name, None, problem, f"for example {name}={example}")
        single = spec.override(["parallel=single", "sync=all_reduce", "workers=1"])
        fake = open_task(task, single)
        device = torch.device("cuda", 0) if fake.is_cuda else torch.device("cpu")
        with preserve_process(spec.seed, cores):
            flops = hardware.device_flops or measure_peak_flops(device, spec.parallel.precision)
        machine = Machine(
            hosts=hardware.hosts,
            devices=devices,
            cores=None,
            is_overlapped=True,
            network_s=1.0 / hardware.network if hardware.network is not None else 0.0,
            latency_s=hardware.latency or 0.0,
            device_s=1.0 / hardware.device_bandwidth if hardware.device_bandwidth is not None else None,
        )
        return LargePlanner(fake, spec, machine, flops, hardware.device_memory or _find_memory(device, devices))
    except ShoalError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises of tensors without values
        report(f"the real model, which could not be counted on fake tensors: {summarize_error(error)}")
    return _prepare(task, spec, hardware, report)


def _prepare(task: Task, spec: TrainSpec, hardware: HardwareSpec, report: Callable[[str], None]) -> Planner:
    device, cores = choose_device(spec.device, 0), count_usable_cores()
    is_cpu = device.type == "cpu"
    devices = hardware.devices or (cores if is_cpu else torch.cuda.device_count())
    report("this machine")
    processes = max(2, min(devices, cores))
    threads = max(1, cores // processes)
    single = spec.override(["parallel=single", "sync=all_reduce", "workers=1", f"threads={threads}"])
    with preserve_process(spec.seed, threads):
        model = task.model().to(device)
        sample_s = profile_single_device(task, model, task.data(), spec.batch_size, device).sample_s
    share = max(1, spec.batch_size // processes)
    samples = min(share, max(1, int(CALIBRATED_STEP_S / max(sample_s, 1e-9))))
    has_server = True
    try:
        with preserve_process(spec.seed, 1):
            optimizer = make_optimizer(task, single.optimizer, build_model(task, single.task).parameters())
            find_sync_config_type("parameter_server")().check_model(optimizer)  # type: ignore[call-arg]
    except ConfigError:
        has_server = False
    calibration = calibrate(single, processes, samples, threads, has_server=has_server)
    speed = 1.0
    if hardware.device_flops is not None:
        with preserve_process(spec.seed, threads):
            speed = hardware.device_flops / measure_peak_flops(device, spec.parallel.precision)
    machine = Machine(
        hosts=hardware.hosts,
        devices=devices,
        cores=max(cores, devices) if is_cpu and hardware.device_flops is None else None,
        is_overlapped=not is_cpu,
        network_s=1.0 / hardware.network if hardware.network is not None else 0.0,
        latency_s=hardware.latency if hardware.latency is not None else calibration.sockets.latency_s / 2,
        device_s=1.0 / hardware.device_bandwidth if hardware.device_bandwidth is not None else None,
        speed=speed,
    )
    memory = hardware.device_memory or _find_memory(device, devices)
    return Planner(task, spec, machine, calibration, memory, sample_s)


def _find_memory(device: torch.device, devices: int) -> float:
    """Of this machine's GPU, or the device's part of this machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / min(devices, count_usable_cores())
