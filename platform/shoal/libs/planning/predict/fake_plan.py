"""The cost of a plan for a model that this process does not hold: counted on fake tensors, its times computed.

Plans without stages are the plan's own code (`fake_step`). A stage of a pipeline is arithmetic over the steps of such a
plan: an equal part of the repeated blocks, half of the rest, and the activations of the micro-batches in flight. Called
by `predict` and by `shoal plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shoal.errors import PlanError
from shoal.extend.cost import CostTable, measure_peak_flops, use_fake_tensors
from shoal.extend.parallel import ParallelDims, ParallelSpec, ScheduleName, check_plan
from shoal.extend.train import Task, TrainSpec
from shoal.libs.planning.predict.fake_step import MIN_BLOCKS, FakeTask, StepByDepth, find_repeated_blocks
from shoal.libs.planning.predict.placement import build_placement
from shoal.libs.planning.predict.rank_step import RankStep, build_cost_table
from shoal.libs.planning.predict.simulate_pipeline import SimulatedStep, TransferTime, simulate_step
from shoal.libs.planning.predict.single_device import SingleDeviceProfile, preserve_process

NOTE = "counted on fake tensors, since the model is large; nothing was run"


@dataclass(frozen=True)
class Pipeline:
    """num_blocks: of the whole model, over all stages."""

    num_blocks: int
    num_stages: int
    micro_batches: int
    schedule: ScheduleName

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations the first stage holds at once."""
        return self.micro_batches if self.schedule == "gpipe" else min(self.micro_batches, self.num_stages)

    def read_stage(self, steps: StepByDepth) -> RankStep:
        """The stage with the most memory, of the steps of one micro-batch of a whole model."""
        inner, ends = steps.at(self.num_blocks / self.num_stages), steps.at(0)
        values = {name: value - ends.values[name] / 2 for name, value in inner.values.items()}
        gradients, rest = inner.values["memory_gradients"], ends.state_bytes / 2
        forward, begun, ended, after = inner.peaks
        last = max(forward + gradients, begun + gradients, ended, after) - rest
        activations = inner.values["memory_activations"] - ends.values["memory_activations"]
        first = inner.state_bytes - rest + activations * self.num_in_flight
        values["memory_activations"] = max(activations * self.num_in_flight, inner.values["memory_activations"])
        values["memory_peak"] = max(first, last)
        return replace(inner, values=values, peaks=(max(first, last),))

    def simulate(self, forward_s: float, backward_s: float, transit_s: float = 0.0) -> SimulatedStep:
        """A micro-step. Seconds of a micro-batch in all stages together, and of a message between two of them."""
        stages = [1 / self.num_stages] * self.num_stages
        messages = [TransferTime(transit_s=transit_s)] * (self.num_stages - 1)
        forward, backward = ([share * seconds for share in stages] for seconds in (forward_s, backward_s))
        return simulate_step(self.schedule, self.num_stages, self.micro_batches, forward, backward, messages)


def open_task(task: Task, spec: TrainSpec) -> FakeTask:
    """The Task for `spec.device`. Raises what its model raises on fake tensors."""
    is_cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    with use_fake_tensors() as mode:
        model = task.model()
    return FakeTask(task, spec, task.data(), mode, model, find_repeated_blocks(model), is_cuda)


def make_pipeline(fake: FakeTask, parallel: ParallelSpec, degrees: ParallelDims) -> Pipeline:
    """Raises PlanError for a model without repeated blocks, or with fewer than stages."""
    num_blocks = 0 if fake.blocks is None else len(fake.blocks.names)
    if num_blocks < max(MIN_BLOCKS, degrees.pipeline):
        problem = f"needs as many equal blocks to count a model on fake tensors, and this one has {num_blocks}"
        raise PlanError("parallel.pipeline", degrees.pipeline, problem, "use fsdp, or a smaller degree")
    if parallel.schedule not in ("gpipe", "1f1b"):
        problem = "is not counted on fake tensors, as its ranks have two stages each"
        raise PlanError("parallel.schedule", parallel.schedule, problem, "use 1f1b or gpipe")
    return Pipeline(num_blocks, degrees.pipeline, parallel.num_micro_batches(degrees), parallel.schedule)


def predict_on_fake_tensors(task: Task, spec: TrainSpec) -> CostTable:
    """The table for `task` under `spec`, without its model. Its times are those of the operations at the rate of
    this machine's device in large matrix products; it has none for ranks on GPUs, where this machine has no GPU.

    Raises PlanError, DataError or ConfigError for a run that is impossible, and what the model raises on fake tensors.
    """
    degrees, parallel = spec.resolve_dims(), spec.parallel
    samples = parallel.compute_micro_batch_size(spec.batch_size, degrees)
    with preserve_process(spec.seed, spec.threads or torch.get_num_threads()):
        fake = open_task(task, spec)
        check_plan(fake.model, task, parallel, degrees)
        precision = "bf16" if parallel.precision == "bf16_params" else parallel.precision  # of gathered weights
        one = fake.read_step(ParallelSpec(precision=precision), ParallelDims(), samples)
        rate, notes = None, [NOTE]
        if torch.cuda.is_available() or not fake.is_cuda:
            rate = measure_peak_flops(torch.device("cuda" if fake.is_cuda else "cpu"), parallel.precision)
            notes.append(f"times are those of the operations at {rate / 1e9:,.0f} GFLOP a second")
        else:
            remedy = "shoal plan predicts them, given device_flops=400TFLOP"
            notes.append(f"times are not predicted: this machine has no GPU; {remedy}")
        if degrees.tensor > 1:
            notes.append("layers are split where their sizes allow it; a run also tries whether their values do")
        if degrees.pipeline > 1:
            notes.append("a stage is counted as an equal part of the blocks and half of the rest")
            step, times = _read_pipeline(fake, parallel, degrees, samples, rate or 1.0)
        else:
            step = fake.read_step(parallel, degrees, samples * parallel.accumulate)
            times = {"step_s": step.values["flops_rank"] / (rate or 1.0)}
        rows = build_placement(fake.model, degrees) if degrees.tensor == degrees.pipeline == 1 else []
    if rate is None:
        del times["step_s"]
    flops = one.values["flops_forward"], one.values["flops_backward"]
    alone = SingleDeviceProfile.count(fake.model, samples, flops, one.unknown)
    runs = {0: replace(step, values=step.values | times)}
    return replace(build_cost_table(spec, alone, runs, tuple(notes)), placement_rows=tuple(rows))


def _read_pipeline(
    fake: FakeTask, parallel: ParallelSpec, degrees: ParallelDims, samples: int, rate: float
) -> tuple[RankStep, dict[str, float]]:
    """A stage's step, and the times of the pipeline. rate: operations a second"""
    pipeline = make_pipeline(fake, parallel, degrees)
    flat = parallel.model_copy(update={"pipeline": 1, "accumulate": 1})
    steps = fake.read_depths(flat, replace(degrees, pipeline=1), samples)
    whole, stage = steps.at(pipeline.num_blocks), pipeline.read_stage(steps)
    played = pipeline.simulate(*(whole.values[f"flops_{way}"] / rate for way in ("forward", "backward")))
    repeats = pipeline.micro_batches * parallel.accumulate
    flops = whole.values["flops_rank"] / degrees.pipeline * repeats
    sent = stage.values["sent_bytes"] + 2 * whole.handed_bytes[0] * repeats
    step = replace(stage, values={**stage.values, "flops_rank": flops, "sent_bytes": sent})
    return step, {"bubble": played.idle_share, "step_s": played.step_s * parallel.accumulate}
