"""Pipeline parallel: each rank has some stages of the model, and micro-batches pass through them on a schedule.

The schedules are those of torch.distributed.pipelining; a stage is the model's own forward between two split points.
Gradients equal those of one process that accumulates over the same micro-batches. A parameter that several stages use
is on the rank of each, and its gradients are summed over them, so that the copies stay equal. Batch statistics are
those of a micro-batch, over all data ranks. Called by `parallelize`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.batch_tree import count_samples
from shoal.errors import PlanError
from shoal.parallel.comm.shm_p2p import ShmP2P
from shoal.parallel.comm.world import World, make_mesh
from shoal.parallel.deferred.weights import DeferredWeights, move_to_device
from shoal.parallel.layers.batch_norm import DataGroup, globalise_batch_norm
from shoal.parallel.layers.dropout import seed_dropout
from shoal.parallel.layers.precision import autocast
from shoal.parallel.loss import LOSS, StepCounts, invert_count, require_loss, split_mean
from shoal.parallel.loss_trace import LossReader, find_means
from shoal.parallel.model import (
    Observer,
    ParallelModel,
    TaskProtocol,
    compute_loss_and_metrics,
    copy_task,
    iter_chunks,
    split_micro_batches,
)
from shoal.parallel.pipeline.groups import PipelineGroups, receive_tensor, send_tensor
from shoal.parallel.pipeline.partition import StagePartition, partition_model
from shoal.parallel.pipeline.schedules import SPLIT_BACKWARD, check_schedule, get_stage_ranks
from shoal.parallel.pipeline.stage_forward import StageForward, build_stage_slices
from shoal.parallel.pipeline.stage_weights import (
    StageWeights,
    check_copied_weights,
    compile_blocks,
    find_gated_modules,
    shard_blocks,
)
from shoal.parallel.pipeline.stages import (
    ScheduleCache,
    StageClock,
    StageDropoutRng,
    StageModule,
    build_schedule,
    shape_key,
)
from shoal.parallel.spec import ParallelDims, ParallelSpec, Precision
from shoal.parallel.spmd.base import PlannedModel
from shoal.parallel.spmd.rank_consistency import BlockUsageCheck
from shoal.parallel.state import gradients
from shoal.parallel.state.module_snapshot import eval_mode
from shoal.parallel.tensor.apply import agree_on_tensor_plan, split_dropouts, split_layers
from shoal.parallel.tensor.plan import TensorPlan


def build_pipeline(
    model: nn.Module,
    learnable: TaskProtocol,
    spec: ParallelSpec,
    degrees: ParallelDims,
    world: World,
    example: Any,
    seed: int,
    deferred: DeferredWeights | None = None,
) -> ParallelModel:
    """This rank's stages of `model`. Collective. Raises PlanError, on every rank, when it cannot be split or run so."""
    num_micro_batches = spec.num_micro_batches(degrees)
    check_schedule(spec.schedule, degrees.pipeline, num_micro_batches, degrees.is_sharded)
    if spec.precision == "fp16":
        raise PlanError("parallel.precision", spec.precision, "does not go with a pipeline", "use bf16")
    if spec.compile and spec.schedule in SPLIT_BACKWARD:
        problem = f"the schedule {spec.schedule} splits the backward pass, which compiled modules do not allow"
        raise PlanError("parallel.compile", True, problem, "use compile=false, or schedule=1f1b")
    move_to_device(model, world.device)
    if degrees.data > 1:
        globalise_batch_norm(model, None)  # a micro-batch may be of one sample, which has no statistics of its own
    ranks = get_stage_ranks(spec.schedule, degrees.pipeline)
    batch = split_micro_batches(example, spec.accumulate * num_micro_batches)[0]
    context = partial(autocast, spec.precision, world.device)
    layout = partition_model(model, learnable, batch, len(ranks), world, context, deferred)
    with_parameters = {ranks[stage] for stages in layout.parameters.values() for stage in stages}
    for rank in range(degrees.pipeline):
        if rank not in with_parameters:
            split_points = [split_point.module for split_point in layout.split_points]
            raise PlanError("pipeline_cuts", split_points, f"leave rank {rank} without a parameter", "cut elsewhere")
    check_copied_weights(model, layout, ranks)
    mesh = make_mesh(degrees, world) if degrees.tensor > 1 or degrees.is_sharded else None
    plan = TensorPlan()
    if degrees.tensor > 1 and mesh is not None:
        plan = agree_on_tensor_plan(model, learnable, degrees.tensor, world, batch, deferred, world.device)
        split_layers(model, plan, mesh["tensor"])
    pipelined = PipelineModel(model, learnable, spec, degrees, world, layout, mesh, seed)
    if deferred is not None:
        deferred.fill(model, world.device, dict(pipelined.named_parameters()))
    if degrees.tensor > 1 and mesh is not None:
        split_dropouts(model, plan, mesh["tensor"])
        pipelined.sum_gradients_of(plan.summed, mesh.get_group("tensor"))
    return pipelined


class PipelineModel(PlannedModel):
    """The stages of this rank. The ranks of one pipeline get the same samples.

    layout: the contents of each stage
    clock:  this rank's computing time, and the time of its schedules
    """

    def __init__(
        self,
        model: nn.Module,
        learnable: TaskProtocol,
        spec: ParallelSpec,
        degrees: ParallelDims,
        world: World,
        layout: StagePartition,
        mesh: DeviceMesh | None,
        seed: int,
    ) -> None:
        self.partition = layout
        self.clock = StageClock()
        self.modules = [model]
        self.data_rank, self.num_data_ranks = degrees.coordinates(world.rank).data, degrees.data
        self._model = model
        self._learnable = learnable
        self._spec = spec
        self._degrees = degrees
        self._world = world
        self._groups = PipelineGroups(degrees, world.rank)
        self._rank = self._groups.coordinates.pipeline
        self._stage_ranks = get_stage_ranks(spec.schedule, degrees.pipeline)
        own = [stage for stage, rank in enumerate(self._stage_ranks) if rank == self._rank]
        self._has_last = len(self._stage_ranks) - 1 in own
        self._num_micro_batches = spec.num_micro_batches(degrees)
        self._shm_p2p: ShmP2P | None = None
        if self._groups.pipeline is not None and spec.uses_shared_memory(world.device.type):
            self._shm_p2p = ShmP2P.try_create(self._groups.pipeline)
        self._ranks = DataGroup(self._groups.data) if self._groups.data is not None else None
        if self._ranks is not None:
            globalise_batch_norm(model, self._ranks)
        splits = layout.calls, layout.split_points
        self._dropout_rng = StageDropoutRng(seed, self.data_rank, degrees.data, world.device, *splits)
        seed_dropout(model, self._dropout_rng)
        blocks = shard_blocks(model, layout, own, mesh, spec) if mesh is not None and degrees.is_sharded else []
        self._sharded = {f"{path}.{name}" for path, block in blocks for name, _ in block.named_parameters()}
        self._usage_check: BlockUsageCheck | None = None
        if blocks and self._ranks is not None:
            self._usage_check = BlockUsageCheck(blocks, self._ranks, spec.dynamic)
        self._weights = StageWeights(model, layout, self._stage_ranks, self._rank, world.device)
        ties = [(self._groups.make_group(ranks), names) for ranks, names in self._weights.tied_names.items()]
        kept = self._weights.local_parameters
        self._tied_groups = [(group, [kept[name] for name in names]) for group, names in ties if group is not None]
        begun = [name for name, stage in layout.blocks.items() if stage in own and spec.compile]
        compiled = compile_blocks(model, begun, build_stage_slices(*splits)) if begun else []
        self._stage_forward = StageForward(model, build_stage_slices(*splits, find_gated_modules(model, compiled)))
        self._stages = {
            each: StageModule(each, self._weights.get_stage_parameters(each), self._compute_stage) for each in own
        }
        self._schedules = ScheduleCache(self._ranks if degrees.is_sharded else None, world.device)
        self._stage_outputs: dict[int, Tensor] = {}  # by stage, a tensor like its outputs, without memory
        self._batches: list[Any] = []  # in flight
        self._step = 0
        self._first_index = 0
        self._reduced_s = 0.0
        self._metric_names: list[str] = []  # of an evaluation
        self.loss_reader, self._counts = LossReader(model, True), StepCounts({LOSS: layout.has_mean_loss})

    # -- a step

    def train_step(self, batch: Any, step: int, share: float = 1.0) -> Tensor:
        if share != 1.0:
            problem = "needs equally many samples on each rank, and this dataset divides them by `sample_sizes`"
            raise PlanError("parallel.pipeline", self._num_micro_batches, problem, "use ddp or fsdp")
        gradients.clear(self._weights.local_parameters.values())
        self._step, self.step_weight = step, 1.0
        self._counts.begin()
        batches = split_micro_batches(batch, self._spec.accumulate * self._num_micro_batches)
        losses: list[Tensor] = []
        for first in range(0, len(batches), self._num_micro_batches):
            self._first_index, self._batches = first, batches[first : first + self._num_micro_batches]
            losses += self._run_schedule(self._get_schedule(self._batches[0]))
        self._batches = []
        local = self._weights.local_parameters
        self._check_usage([(name, each) for name, each in local.items() if name in self._sharded])
        began_s = time.perf_counter()
        if self._groups.data is not None:
            others = [each for name, each in local.items() if name not in self._sharded]
            gradients.sum_over_ranks(_filter_trainable(others), self._groups.data, 1.0 / self.num_data_ranks)
        for group, tied in self._tied_groups:
            gradients.sum_over_ranks(_filter_trainable(tied), group)
        self._reduced_s += time.perf_counter() - began_s
        summed = torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self._world.device)
        if not self.partition.has_mean_loss:
            return summed
        # Loss and gradients of a `Mean` are divided by its count over all data ranks.
        mine = self._counts.take(lambda _: None).get(LOSS, torch.zeros((), device=self._world.device))
        self.step_weight = self.sum_over_data_ranks(mine.double()) / self.num_data_ranks
        factor = invert_count(self.step_weight)
        gradients.scale(local.values(), factor)
        return summed * factor

    def _run_schedule(self, schedule: Any) -> list[Tensor]:
        """Run one schedule; returns the losses on the rank of the last stage."""
        losses: list[Tensor] = []
        index = torch.arange(self._num_micro_batches)
        began_s = self.clock.now_s()
        try:
            schedule.step(index, target=index, losses=losses, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
                raise error.__cause__ from None  # the model's or the loss's own error
            raise
        self.clock.total_s += self.clock.now_s() - began_s
        return losses

    def _compute_stage(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        batch = self._batches[micro_batch]
        self._dropout_rng.begin_stage(stage, self._step, self._first_index + micro_batch, count_samples(batch))
        with autocast(self._spec.precision, self._world.device):
            handed: Tensor = self._stage_forward.run(stage, self._learnable.inputs(batch), received)
            if stage == len(self._stage_ranks) - 1:
                loss = require_loss(self.loss_reader.read(partial(self._learnable.loss, handed, batch)))
                weight = 1.0 / (self._spec.accumulate * self._num_micro_batches)
                return self._counts.weigh(LOSS, loss, weight, count_samples(batch))
        expected = self._stage_outputs[stage]
        if (handed.shape, handed.dtype) != (expected.shape, expected.dtype):
            problem = f"was handed {list(handed.shape)} {handed.dtype}, not {list(expected.shape)} {expected.dtype}"
            remedy = "a pipeline needs the same shapes in every pass over inputs of the same shapes"
            raise PlanError("parallel.pipeline", self.partition.split_points[stage].module, problem, remedy)
        # Schedules that split the backward pass detach a stage's output in place, which a view does not allow.
        is_view = handed._is_view()
        handed = handed.clone(memory_format=torch.contiguous_format) if is_view else handed.contiguous()
        return handed if handed.requires_grad else handed.detach().requires_grad_()

    def _get_schedule(self, batch: Any) -> Any:
        """The schedule for micro-batches of this form; a pass in evaluation mode finds the stages' outputs."""
        shapes = shape_key(batch)
        if self._schedules.is_missing(shapes):
            self._stage_outputs = {}
            with eval_mode(self._model):  # with gradients: fast paths may compute in other types
                self._run_forward(batch)
        if shapes not in self._schedules:
            group, num_stages = self._groups.pipeline, len(self._stage_ranks)
            assert group is not None
            stages = (self._stages, self._stage_outputs, num_stages, self._num_micro_batches)
            ways = (self._world.device, group, self.clock, self._shm_p2p)
            self._schedules.put(shapes, build_schedule(self._spec.schedule, *stages, *ways), self._stage_outputs)
        schedule, self._stage_outputs = self._schedules.get(shapes)
        return schedule

    def _check_usage(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        if self._usage_check is not None:
            self._usage_check.check(parameters, self._world.device)

    def sum_gradients_of(self, names: Collection[str], group: dist.ProcessGroup) -> None:
        """From now on, add up the gradients of these parameters over `group`: each rank has a part of them."""
        local = [each for name, each in self._weights.local_parameters.items() if name in names]
        self._tied_groups.append((group, local))

    # -- evaluation

    def evaluate(
        self, batch: Any, num_samples: int, observe: Observer | None = None, is_trial: bool = False
    ) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        precision = "fp32" if is_trial else self._spec.precision
        learnable = copy_task(self._learnable) if is_trial else self._learnable
        self._stage_outputs = {}
        try:
            # Data ranks that gather each other's parameters must do so equally often, however many samples they have.
            with eval_mode(self._model), torch.no_grad():
                is_whole = is_trial or self._degrees.is_sharded
                for part, share in iter_chunks(batch, 1 if is_whole else self._num_micro_batches):
                    outputs = self._run_forward(part, precision)
                    if self._has_last:
                        with autocast(precision, self._world.device):
                            means = find_means(partial(compute_loss_and_metrics, learnable, outputs, part))
                        if observe is not None and num_samples:
                            observe(outputs, part)
                        counted = num_samples * share
                        for name, mean in means.items():
                            sums[name] = split_mean(mean, counted) + sums.get(name, 0.0)
        finally:  # a trial goes on after an error of one rank's samples
            self._check_usage([])
        if is_trial:
            return sums
        last = self._degrees.rank(self._groups.coordinates._replace(pipeline=self._stage_ranks[-1]))
        if not self._metric_names:
            box = [list(sums)]
            dist.broadcast_object_list(box, last, self._groups.pipeline)
            [self._metric_names] = box
        blank = torch.zeros(len(self._metric_names), 2, dtype=torch.float64, device=self._world.device)
        values = torch.stack(list(sums.values())) if self._has_last else blank
        dist.broadcast(values, last, self._groups.pipeline)
        return dict(zip(self._metric_names, values.unbind(), strict=True))

    def measure_loss(self, batch: Any) -> dict[str, Tensor]:
        self._stage_outputs = {}
        learnable = copy_task(self._learnable)  # whose loss may remember something
        with eval_mode(self._model), torch.no_grad():
            outputs = self._run_forward(batch, "fp32")
        try:
            if not self._has_last:
                return {}
            size = count_samples(batch)
            with eval_mode(self._model), torch.no_grad():
                return self.loss_reader.measure_loss(lambda given: learnable.loss(given, batch), outputs, size)
        finally:
            self._check_usage([])

    def _run_forward(self, batch: Any, precision: Precision | None = None) -> Any:
        """The model's outputs, on the rank of the last stage; None elsewhere. `precision` None: that of the plan."""
        group = self._groups.pipeline
        inputs = self._learnable.inputs(batch)
        handed = None
        assert group is not None
        last = len(self._stage_ranks) - 1
        for stage in self._stages:
            before = self._stage_ranks[stage - 1] if stage else self._rank
            if before != self._rank:
                handed = receive_tensor(before, group, self._world.device)
            if handed is not None:
                self._stage_outputs[stage - 1] = _empty_like(handed)
            with autocast(precision or self._spec.precision, self._world.device):
                handed = self._stage_forward.run(stage, inputs, handed)
            if stage == last:
                return handed
            self._stage_outputs[stage] = _empty_like(handed)
            if self._stage_ranks[stage + 1] != self._rank:
                send_tensor(handed.detach(), self._stage_ranks[stage + 1], group)
                handed = None
        return None

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        counts = self._has_last and self._groups.coordinates.tensor == 0
        summed = values.clone() if counts else torch.zeros_like(values)
        dist.all_reduce(summed)
        return summed

    def clip_gradients(self, max_norm: float) -> Tensor:
        norm = gradients.global_norm(self._weights.owned_parameters, self._world.device, self._groups.pipeline)
        gradients.scale(self._weights.local_parameters.values(), float((max_norm / (norm + 1e-6)).clamp(max=1.0)))
        return norm

    # -- state

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._weights.local_parameters.items())

    def model_state(self) -> dict[str, Any]:
        return self._weights.state()

    def load_model_state(self, state: dict[str, Any]) -> None:
        self._weights.load(state)

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        is_first = (self.data_rank, self._groups.coordinates.tensor) == (0, 0)
        ranks = self._degrees.peers(self._world.rank, "pipeline") if is_first else None
        return self._weights.iter_full(self._rank, ranks)

    # -- time

    @property
    def busy_by_stage(self) -> dict[tuple[int, str], float]:
        forward = {(stage, "forward"): seconds for stage, seconds in self.clock.forward_s.items()}
        return forward | {(stage, "backward"): seconds for stage, seconds in self.clock.backward_s.items()}

    @property
    def scheduled_s(self) -> float:
        return self.clock.total_s

    @property
    def stage_output_bytes(self) -> dict[int, int]:
        """The output size of each of this rank's stages but the last, as last scheduled."""
        return {stage: self._stage_outputs[stage].nbytes for stage in self._stages if stage in self._stage_outputs}

    @property
    def communication_s(self) -> float:
        if self._world.device.type != "cpu":
            return float("nan")  # the host does not wait for the device
        return self.clock.total_s - self.clock.busy_s + self._reduced_s

    @property
    def shm_sent_bytes(self) -> float:
        return self._shm_p2p.sent_bytes if self._shm_p2p else 0.0

    def close(self) -> None:
        self._stage_forward.remove()
        self._schedules.clear()
        if self._shm_p2p:
            self._shm_p2p.close()


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=True)


def _filter_trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
