"""Estimates plans for a model that this process does not hold, from steps on fake tensors.

Four plans are read, on two short models each: one device, ddp, fsdp over all ranks, and fsdp with the most tensor
ranks. Others follow from these, since what a rank holds and does is linear in the number of blocks and of samples, and
in the shares of a layer and of a state. Times are those of the operations at the devices' rate and of the bytes at the
links' rates. Called by `planner`. Runs nothing, measures no link.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from shoal.errors import PlanError
from shoal.extend.parallel import ParallelDims, ParallelSpec, check_plan
from shoal.extend.train import TrainSpec
from shoal.libs.planning import step_time
from shoal.libs.planning.calibration import Calibration, LinkCost, StepTimes
from shoal.libs.planning.candidates import Candidate
from shoal.libs.planning.estimate import PlanEstimate, estimate_plan
from shoal.libs.planning.predict import fake_step
from shoal.libs.planning.predict.fake_plan import make_pipeline
from shoal.libs.planning.predict.fake_step import FakeTask, StepByDepth
from shoal.libs.planning.predict.rank_step import STATES, CollectiveTraffic, RankStep
from shoal.libs.planning.step_time import Machine, StepTime

OF_SAMPLES = ("flops_rank", "flops_forward", "flops_backward", "memory_activations", "bytes_tensor")
NOTHING = StepTimes(0.0, 0.0, 0.0)


@dataclass
class LargePlanner:
    """Estimates candidates for one Task.

    spec:          of the Task, without the choices of a plan
    flops:         operations a second of a device
    device_memory: bytes
    """

    fake: FakeTask
    spec: TrainSpec
    machine: Machine
    flops: float
    device_memory: float
    _read: dict[ParallelDims, dict[int, StepByDepth]] = field(default_factory=dict)  # by plan and samples
    _tensor: ParallelDims | PlanError | None = None  # the plan with the most tensor ranks

    def estimate(self, candidate: Candidate) -> PlanEstimate:
        """The candidate's numbers, or why it is not applicable."""
        return estimate_plan(candidate, lambda: self._estimate(candidate), self.device_memory)

    def _estimate(self, candidate: Candidate) -> PlanEstimate:
        spec = self.spec.override(candidate.overrides)
        if spec.sync.num_servers:
            remedy = "choose another plan"
            raise PlanError("sync.kind", spec.sync.kind, "is estimated only for a model that can be run here", remedy)
        degrees, parallel = spec.resolve_dims(), spec.parallel
        check_plan(self.fake.model, self.fake.task, parallel, degrees)
        samples = parallel.compute_micro_batch_size(spec.batch_size, degrees)
        if degrees.pipeline > 1:
            return self._estimate_pipeline(candidate, spec, degrees, samples)
        num_blocks = 0 if self.fake.blocks is None else len(self.fake.blocks.names)
        step = self._read_steps(spec, degrees, samples * parallel.accumulate).at(num_blocks)
        traffic = _list_traffic(step, degrees)
        compute_s = step.values["flops_rank"] / self.flops
        time = StepTime(compute_s, self._exposed_s(traffic, compute_s))
        sent = sum(each.sent_bytes for each in traffic)
        return PlanEstimate(candidate, time, step.memory_peak, sent_bytes=sent, is_run=False)

    def _estimate_pipeline(
        self, candidate: Candidate, spec: TrainSpec, degrees: ParallelDims, samples: int
    ) -> PlanEstimate:
        pipeline, repeats = make_pipeline(self.fake, spec.parallel, degrees), spec.parallel.accumulate
        steps = self._read_steps(spec, degrees, samples)
        whole, stage = steps.at(pipeline.num_blocks), pipeline.read_stage(steps)
        handed_bytes = whole.handed_bytes[0]
        for name in ("calls_tensor", "bytes_tensor"):
            stage.values[name] *= pipeline.micro_batches * repeats
        forward_s, backward_s = (whole.values[f"flops_{way}"] / self.flops for way in ("forward", "backward"))
        message_s = self.machine.latency_s + handed_bytes * self.machine.devices * self.machine.network_s
        if degrees.workers // degrees.pipeline % self.machine.devices and degrees.workers <= self.machine.devices:
            message_s = handed_bytes * (self.machine.device_s or 0.0)  # no two stages are on different hosts
        played = pipeline.simulate(forward_s, backward_s, message_s)
        traffic = _list_traffic(stage, degrees)
        bubble_s = played.idle_share * played.step_s * repeats
        compute_s = played.step_s * repeats - bubble_s
        time = StepTime(compute_s, self._exposed_s(traffic, compute_s), bubble_s)
        sent = sum(each.sent_bytes for each in traffic) + 2 * handed_bytes * pipeline.micro_batches * repeats
        return PlanEstimate(candidate, time, stage.values["memory_peak"], sent_bytes=sent, is_run=False)

    def _exposed_s(self, traffic: list[CollectiveTraffic], compute_s: float) -> float:
        link = LinkCost(self.machine.latency_s, self.machine.device_s or 0.0)
        calibration = Calibration(2, 1, NOTHING, NOTHING, NOTHING, link, link, 0.0)
        return step_time.time_collectives(traffic, calibration, self.machine, compute_s)

    # -- steps

    def _read_steps(self, spec: TrainSpec, degrees: ParallelDims, samples: int) -> StepByDepth:
        """Of a rank of the plan without its stages."""
        everyone = self.machine.hosts * self.machine.devices
        whole = ParallelDims(data=everyone, shard=True)
        if degrees.tensor == 1 and not degrees.is_sharded:
            return self._read_samples(spec, ParallelDims(data=min(2, degrees.data)), samples)
        if degrees.tensor == 1:
            steps = self._read_samples(spec, whole, samples)
        else:
            # That with the most tensor ranks of a host whose layers can be split. Raises PlanError
            # if it has too few.
            sizes = (each for each in range(self.machine.devices, 1, -1) if self.machine.devices % each == 0)
            for size in sizes if self._tensor is None else ():
                plan = ParallelDims(data=self.machine.hosts * self.machine.devices, shard=True, tensor=size)
                try:
                    self._read_samples(spec, plan, samples)
                except PlanError as error:
                    self._tensor = self._tensor or error
                    continue
                self._tensor = plan
                break
            if isinstance(self._tensor, PlanError):
                raise self._tensor
            assert self._tensor is not None
            if degrees.tensor > self._tensor.tensor:
                remedy = "use fewer tensor ranks"
                raise PlanError(
                    "parallel.tensor", degrees.tensor, f"at most {self._tensor.tensor} ranks can share layers", remedy
                )
            most = self._tensor
            one, all_ranks = self._read_samples(spec, whole, samples), self._read_samples(spec, most, samples)
            by = (1 - 1 / degrees.tensor) / (1 - 1 / most.tensor)
            mixed = []
            for each, widest in ((one.small, all_ranks.small), (one.large, all_ranks.large)):
                step = each.extrapolate(widest, by)
                exchanged = {name: widest.values[name] for name in ("calls_tensor", "bytes_tensor")}
                mixed.append(replace(step, values={**step.values, **exchanged}))  # the same for any number of ranks
            steps = StepByDepth(*mixed)
        shards = degrees.data // degrees.replicate if degrees.is_sharded else 1
        return StepByDepth(*(_hold_more(step, everyone / shards) for step in (steps.small, steps.large)))

    def _read_samples(self, spec: TrainSpec, degrees: ParallelDims, samples: int) -> StepByDepth:
        """Read for two numbers of samples; all others follow."""
        known = self._read.setdefault(degrees, {})
        if not known:
            if self.fake.blocks is not None:
                steps = self.fake.read_depths(_flatten(spec), degrees, samples)
            else:
                steps = StepByDepth(*(self.fake.run_step(_flatten(spec), degrees, samples),) * 2)
            known[samples] = StepByDepth(*(_sum_traffic(step, degrees) for step in (steps.small, steps.large)))
        elif samples not in known and len(known) == 1:
            [(before, steps)] = known.items()
            small = _sum_traffic(self.fake.run_step(_flatten(spec), degrees, samples, fake_step.NUM_BLOCKS[0]), degrees)
            known[samples] = _scale_samples(steps, small, samples / before - 1, degrees)
        if samples in known:
            return known[samples]
        (few, one), (many, two) = known.items()
        by = (samples - few) / (many - few)
        return StepByDepth(one.small.extrapolate(two.small, by), one.large.extrapolate(two.large, by))


def _flatten(spec: TrainSpec) -> ParallelSpec:
    return spec.parallel.model_copy(update={"pipeline": 1})


def _scale_samples(steps: StepByDepth, small: RankStep, by: float, degrees: ParallelDims) -> StepByDepth:
    """The steps at other samples, from the smaller one of them: a block's part grows as the samples, its states do not.

    by: the growth of the samples, 1 for twice as many
    """
    block = {name: value - steps.small.values[name] for name, value in steps.large.values.items()}
    states = sum(block[name] for name in STATES)
    before = states if degrees.data > 1 and not degrees.shard else states - block["memory_gradients"]
    values = {
        name: value + small.values[name] - steps.small.values[name] + (by * block[name] if name in OF_SAMPLES else 0.0)
        for name, value in steps.large.values.items()
    }
    peaks = tuple(
        large + now - then + by * (large - then - held)
        for large, now, then, held in zip(
            steps.large.peaks, small.peaks, steps.small.peaks, (before, before, states, states), strict=True
        )
    )
    return StepByDepth(small, replace(small, values=values, peaks=peaks))


def _sum_traffic(step: RankStep, degrees: ParallelDims) -> RankStep:
    """The collectives of tensor ranks and of data ranks as values, with bytes as of a group without end."""
    values: dict[str, float] = dict.fromkeys(("calls_data", "bytes_data", "calls_tensor", "bytes_tensor"), 0.0)
    for each in step.traffic:
        is_tensor = degrees.tensor > 1 and list(each.ranks) == degrees.peers(0, "tensor")
        axis, size = "tensor" if is_tensor else "data", len(each.ranks)
        values[f"calls_{axis}"] += each.num_calls
        values[f"bytes_{axis}"] += each.sent_bytes * size / (size - 1) if size > 1 else 0.0
    return replace(step, values={**step.values, **values}, traffic=())


def _hold_more(step: RankStep, factor: float) -> RankStep:
    """Of a rank with `factor` times the states. Gradients appear in the backward pass."""
    scaled = {name: step.values[name] * factor for name in (*STATES, "parameters_rank")}
    more = sum(scaled[name] - step.values[name] for name in STATES)
    before = more - (scaled["memory_gradients"] - step.values["memory_gradients"])
    peaks = tuple(peak + each for peak, each in zip(step.peaks, (before, before, more, more), strict=True))
    return replace(step, values={**step.values, **scaled}, peaks=peaks)


def _list_traffic(step: RankStep, degrees: ParallelDims) -> list[CollectiveTraffic]:
    """The collectives of rank 0, in rings."""
    collectives: list[CollectiveTraffic] = []

    def add(ranks: list[int], num_calls: float, size_bytes: float) -> None:
        if len(ranks) > 1 and size_bytes:
            sent = size_bytes * (len(ranks) - 1) / len(ranks)
            collectives.append(CollectiveTraffic(tuple(ranks), max(1, round(num_calls)), sent, is_shared=False))

    values: dict[str, Any] = step.values
    data = degrees.peers(0, "data")
    add(degrees.peers(0, "tensor"), values.get("calls_tensor", 0.0), values.get("bytes_tensor", 0.0))
    if degrees.is_sharded:
        shards = degrees.data // degrees.replicate
        add(data[:shards], values["calls_data"], values["bytes_data"])
        add(data[::shards], values["calls_data"] / 3, 2 * values["memory_gradients"])
    elif degrees.tensor > 1:
        add(data, values["calls_data"] / 3, 2 * values["memory_gradients"])
    else:
        add(data, values["calls_data"], values["bytes_data"])
    return collectives
