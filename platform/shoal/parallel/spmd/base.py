"""The full model in one process; and the common part of plans whose forward pass is one call.

`DdpModel` and `FsdpModel` change the calls and the time of exchanging gradients. Called by `parallelize`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.batch_tree import count_samples
from shoal.errors import PlanError
from shoal.parallel.comm.collective_timer import CollectiveTimer
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.comm.world import World
from shoal.parallel.layers.batch_norm import DataGroup, globalise_batch_norm
from shoal.parallel.layers.compile import compile_module
from shoal.parallel.layers.dropout import DropoutRng, seed_dropout
from shoal.parallel.layers.precision import LossScale, autocast
from shoal.parallel.loss import LOSS, Loss, StepCounts, get_value, invert_count, require_loss, split_mean
from shoal.parallel.loss_trace import LossReader, find_means, measure
from shoal.parallel.model import (
    Observer,
    ParallelModel,
    TaskProtocol,
    compute_loss_and_metrics,
    copy_task,
    split_micro_batches,
)
from shoal.parallel.spec import ParallelSpec
from shoal.parallel.spmd.activation_checkpointing import checkpoint_activations
from shoal.parallel.spmd.rank_consistency import check_buffers
from shoal.parallel.state import gradients
from shoal.parallel.state import state_dict as state
from shoal.parallel.state.module_snapshot import eval_mode, get_trainable_parameters, snapshot_module
from shoal.parallel.task_step import (
    EvalStep,
    begin_phases,
    get_phase_parameters,
    get_train_step,
    next_phase,
    split_losses,
)


class PlannedModel(ParallelModel):
    """What all plans have in common."""

    _ranks: DataGroup | None  # data ranks; one process has none

    def optimizer_state(self, optimizer: Optimizer, *, to_fill: bool = False) -> dict[str, Any]:
        return state.optimizer_state(self.named_parameters(), optimizer, to_fill=to_fill)

    def load_optimizer_state(self, optimizer: Optimizer, values: dict[str, Any]) -> None:
        state.load_optimizer_state(self.named_parameters(), optimizer, values)

    def describe_full_weights(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        return state.describe_weights(self.modules[0].state_dict())

    def check_buffers(self) -> None:
        if self._ranks is not None:
            saved = self.model_state()
            buffers = self.modules[0].named_buffers()
            check_buffers({name: each for name, each in buffers if name in saved}, self._ranks)


class SpmdModel(PlannedModel):
    """A model that each rank calls as a whole; alone, or (with `data_group`) in parallel with ranks of other
    samples."""

    def __init__(
        self,
        model: nn.Module,
        learnable: TaskProtocol,
        spec: ParallelSpec,
        world: World,
        seed: int,
        data_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.module = model
        self.modules = [model]
        self.data_rank = dist.get_rank(data_group) if data_group else 0
        self.num_data_ranks = dist.get_world_size(data_group) if data_group else 1
        self._learnable = learnable
        self._spec = spec
        self._world = world
        self._data_group = data_group
        self._shm_all_reduce: ShmAllReduce | None = None
        if data_group is not None and spec.uses_shared_memory(world.device.type):
            self._shm_all_reduce = ShmAllReduce.try_create(data_group)
        self._ranks = DataGroup(data_group, self._shm_all_reduce) if data_group else None
        if self._ranks:
            globalise_batch_norm(model, self._ranks)
        self._dropout_rng = DropoutRng(seed, self.data_rank, self.num_data_ranks, world.device)
        seed_dropout(model, self._dropout_rng)
        checkpoint_activations(model, spec.activation_checkpointing)
        self._forward: nn.Module = model
        self._train_step = get_train_step(learnable)
        self._eval_step: EvalStep | None = getattr(learnable, "eval_step", None)
        self._phase_parameters: Mapping[str, list[nn.Parameter]] = {}
        self._loss_scale = LossScale() if spec.precision == "fp16" else None
        self._counts = StepCounts()
        self.loss_reader = LossReader(model, spec.accumulate > 1 or self.num_data_ranks > 1)
        self._summed: list[nn.Parameter] = []
        self._summing_group: dist.ProcessGroup | None = None
        self.collect_parameters()

    # -- a step

    def train_step(self, batch: Any, step: int, share: float = 1.0) -> Tensor:
        if self._loss_scale is None:
            return self._compute_gradients(batch, step, share)
        take_back = snapshot_module(self.module)
        while True:
            loss = self._compute_gradients(batch, step, share)
            gradients.scale(self._trainable, 1.0 / self._loss_scale.value)
            if self._loss_scale.update(bool(gradients.global_norm(self._trainable, self._world.device).isfinite())):
                return loss
            take_back()  # running statistics must count this batch only once

    def collect_parameters(self) -> None:
        """Note the parameters to train, which a plan may have replaced."""
        self._trainable = get_trainable_parameters(self.module)
        self._frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]

    def _compute_gradients(self, batch: Any, step: int, share: float) -> Tensor:
        if any(parameter.requires_grad for parameter in self._frozen):
            frozen = {id(parameter) for parameter in self._frozen}
            name = next(name for name, each in self.named_parameters() if id(each) in frozen and each.requires_grad)
            raise PlanError("model", name, "was frozen when the run began, and is not now", "thaw it in Task.model()")
        for parameter in self._trainable:
            parameter.grad = None
        self.step_losses, self.step_weight = {}, 1.0
        self._counts.begin()
        micro_batches = self._split_weighted(batch, share)
        if self._phase_parameters:
            return self._run_phases(micro_batches, step)
        losses = []
        for index, (part, weight) in enumerate(micro_batches):
            num_samples = count_samples(part)
            with self._gradient_sync_context(index == len(micro_batches) - 1):
                self._dropout_rng.begin_micro_step(step, index, num_samples)
                with autocast(self._spec.precision, self._world.device):
                    loss = self._compute_loss(part, weight)
                weighted = self._counts.weigh(LOSS, loss, weight, num_samples)
                self._backward(weighted if self._loss_scale is None else weighted * self._loss_scale.value)
            losses.append(weighted.detach())
        return self._finish_losses(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), LOSS)

    def _split_weighted(self, batch: Any, share: float) -> list[tuple[Any, float]]:
        """The micro-batches of a step, and the weight of each one's mean loss."""
        accumulate = self._spec.accumulate
        if accumulate == 1:
            return [(batch, share)]
        size = count_samples(batch)
        is_even = share == 1.0 and size % accumulate == 0  # not the last batch of an epoch with drop_last=False
        parts = split_micro_batches(batch, accumulate if is_even else min(accumulate, size), is_even=is_even)
        weighted = [(part, share * count_samples(part) / size) for part in parts]
        return weighted + [(parts[-1], 0.0)] * (accumulate - len(parts))  # because micro-steps may be collective

    def use_optimizers(self, parameters: Mapping[str, list[nn.Parameter]], take_step: Callable[[str], None]) -> None:
        """Let the Task's steps yield (name, loss) for several optimisers.

        parameters: of each optimiser, by its name
        take_step:  the step of one of them, once it has its gradients
        """
        self._phase_parameters, self._take_step = parameters, take_step

    def _run_phases(self, micro_batches: list[tuple[Any, float]], step: int) -> Tensor:
        """One optimiser's step after another; all micro-batches have a part in each."""
        assert self._train_step is not None
        steps = [begin_phases(self._train_step(self.module, part)) for part, _ in micro_batches]
        total = torch.zeros((), device=self._world.device)
        for index in itertools.count(0, len(steps)):
            gradients.clear(self._trainable)
            name: str | None = None
            summed = torch.zeros_like(total)
            for micro_step, (each, (part, weight)) in enumerate(zip(steps, micro_batches, strict=True), index):
                self._dropout_rng.begin_micro_step(step, micro_step, count_samples(part))
                with autocast(self._spec.precision, self._world.device):
                    phase = self.loss_reader.read(partial(next_phase, each, name))
                if phase is None:
                    return total
                name, loss = phase
                if is_record := name not in self._phase_parameters and not get_value(loss).requires_grad:
                    summed += weight * get_value(loss).detach()
                    continue
                weighted = self._counts.weigh(f"{name}_loss", loss, weight, count_samples(part))
                weighted.backward(inputs=get_phase_parameters(self._phase_parameters, name))
                summed += weighted.detach()
            assert name is not None
            if is_record:
                if name == LOSS:
                    total += summed
                else:
                    self._add_losses({name: summed})
                continue
            summed = self._finish_losses(summed, f"{name}_loss")
            total += summed
            self._add_losses({f"{name}_loss": summed})
            self._take_step(name)
        raise AssertionError

    def _compute_loss(self, batch: Any, weight: float) -> Loss:
        if self._train_step is None:
            outputs = self.loss_reader.read_outputs(lambda: self._forward(*self._learnable.inputs(batch)))
            return require_loss(self.loss_reader.read(partial(self._learnable.loss, outputs, batch)))
        loss, named = split_losses(self.loss_reader.read(partial(self._train_step, self.module, batch)))
        size = count_samples(batch)
        parts = {name: self._counts.weigh(name, value, weight, size).detach() for name, value in named.items()}
        self._add_losses(parts)
        return loss

    def _finish_losses(self, summed: Tensor, name: str) -> Tensor:
        """Exchange gradients, and divide the sums of this step's `Mean`s by their counts over all ranks: gradients,
        loss and further losses. Collective.

        summed: the sum of the loss `name`, which has the gradients
        """
        if self._ranks is not None and self.loss_reader.is_active:
            self._counts.agree(name, self._world.device, self._average_over_ranks)
        counts = self._counts.take(self._exchange_gradients)
        for each, count in counts.items():
            if each != name and each in self.step_losses:  # an earlier phase's of this name is divided already
                self.step_losses = {**self.step_losses, each: self.step_losses[each] * invert_count(count)}
        if name not in counts:
            return summed
        if name == LOSS:
            self.step_weight = counts[name]
        if counts[name].is_cpu and counts[name].item() == 1.0:  # as where each label counts
            return summed
        factor = invert_count(counts[name])
        gradients.scale(self._trainable, factor)
        return summed * factor

    def _average_over_ranks(self, values: Tensor) -> Tensor:
        return values if self._ranks is None else self._ranks.sum(values) / self._ranks.size

    def _add_losses(self, named: Mapping[str, Tensor]) -> None:
        before = self.step_losses
        self.step_losses = {**before, **{name: value + before.get(name, 0.0) for name, value in named.items()}}

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _exchange_gradients(self, counts: Tensor | None) -> None:
        """Called after the last backward pass of a step or a phase: average over the data ranks, in place. Collective.

        counts: [n], averaged too
        """
        if self._summed and self._summing_group is not None:
            gradients.sum_over_ranks(self._summed, self._summing_group)
        if counts is not None and self._ranks is not None:
            self._ranks.sum(counts).div_(self._ranks.size)

    def sum_gradients_of(self, names: Collection[str], group: dist.ProcessGroup) -> None:
        """From now on, add up the gradients of these parameters over `group`: each rank has a part of them."""
        self._summed = [each for name, each in self.named_parameters() if name in names]
        self._summing_group = group

    def _gradient_sync_context(self, last: bool) -> AbstractContextManager[object]:
        """The context of a micro-step: gradients are exchanged only in the last one."""
        return nullcontext()

    # -- evaluation

    def evaluate(
        self, batch: Any, num_samples: int, observe: Observer | None = None, is_trial: bool = False
    ) -> dict[str, Tensor]:
        precision = "fp32" if is_trial else self._spec.precision
        learnable = copy_task(self._learnable) if is_trial else self._learnable
        with eval_mode(self.module), torch.no_grad(), autocast(precision, self._world.device):
            if self._eval_step is None:
                outputs = self.loss_reader.read_outputs(lambda: self.module(*learnable.inputs(batch)))
                means = find_means(partial(compute_loss_and_metrics, learnable, outputs, batch))
            else:  # which may count in the module: not what has no sample
                module = self.module if num_samples else copy.deepcopy(self.module)
                outputs, means = None, find_means(partial(self._eval_step, module, batch))
        if observe is not None and num_samples:
            observe(outputs, batch)
        return {name: split_mean(mean, num_samples) for name, mean in means.items()}

    def measure_loss(self, batch: Any) -> dict[str, Tensor]:
        size = count_samples(batch)
        with eval_mode(self.module):
            if self._train_step is None:
                learnable = copy_task(self._learnable)  # whose loss may remember something
                with torch.no_grad():
                    outputs = self.loss_reader.read_outputs(lambda: self.module(*learnable.inputs(batch)))
                return self.loss_reader.measure_loss(lambda given: learnable.loss(given, batch), outputs, size)
            restore = snapshot_module(self.module)  # such a step may fill a queue, say
            try:
                return measure(partial(self._train_step, self.module, batch), self._trainable, size)
            finally:
                restore()

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        if self._data_group is None:
            return values
        summed = values.clone()
        dist.all_reduce(summed, group=self._data_group)
        return summed

    def clip_gradients(self, max_norm: float) -> Tensor:
        return gradients.clip(self._trainable, max_norm, self._world.device)

    @property
    def shm_sent_bytes(self) -> float:
        return self._shm_all_reduce.sent_bytes if self._shm_all_reduce else 0.0

    @property
    def shared_memory(self) -> list[Tensor]:
        return [self._shm_all_reduce.memory, self._shm_all_reduce.gathered] if self._shm_all_reduce else []

    def close(self) -> None:
        if self._shm_all_reduce:
            self._shm_all_reduce.close()

    # -- state

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def model_state(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_model_state(self, values: dict[str, Any]) -> None:
        state.load_model_state(self.module, values)

    def loss_scale_state(self) -> dict[str, float]:
        return {} if self._loss_scale is None else self._loss_scale.state_dict()

    def load_loss_scale_state(self, state: dict[str, float]) -> None:
        if self._loss_scale is not None and state:
            self._loss_scale.load_state_dict(state)

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        return state.iter_weights(self.model_state(), keep=self._world.is_first)


class TimedCollectivesMixin(SpmdModel):
    """For plans whose collectives torch's own code calls: they are timed from outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._collective_timer = CollectiveTimer(self._world.device)

    def train_step(self, batch: Any, step: int, share: float = 1.0) -> Tensor:
        with self._collective_timer.time_collectives():
            return super().train_step(batch, step, share)

    @property
    def communication_s(self) -> float:
        return self._collective_timer.waited_s + (self._shm_all_reduce.waited_s if self._shm_all_reduce else 0.0)


class SingleProcessModel(SpmdModel):
    """One process alone."""

    def __init__(self, model: nn.Module, learnable: TaskProtocol, spec: ParallelSpec, world: World, seed: int) -> None:
        super().__init__(model.to(world.device), learnable, spec, world, seed)
        if spec.compile:
            compile_module(self.module)

    @property
    def communication_s(self) -> float:
        return 0.0
