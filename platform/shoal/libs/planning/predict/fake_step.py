"""Steps of a plan on fake tensors: a model that this process does not hold, and how its steps grow with its depth.

Owns the model's equal blocks: a deep model is read from two short ones. Called by `fake_plan` and `shoal plan`. Times
are not read.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from shoal.batch_tree import tensors_of
from shoal.extend.cost import FakeMode, assume_cuda, bytes_of, use_fake_tensors
from shoal.extend.data import Data, load_first_batch
from shoal.extend.parallel import ParallelDims, ParallelSpec, TaskProtocol, TensorPlan, apply, fsdp_layout, plan
from shoal.extend.train import Task, TrainSpec
from shoal.libs.planning.predict.fake_process_group import SimulatedRanks
from shoal.libs.planning.predict.rank_step import RankStep, run_rank

NUM_BLOCKS = (4, 6)  # of the two short models: with fewer, FSDP has not all of its buffers at once
MIN_BLOCKS = 8  # of a model that is shortened


@dataclass(frozen=True)
class StepByDepth:
    """Steps of two short models, and so of any number of blocks."""

    small: RankStep
    large: RankStep

    def at(self, num_blocks: float) -> RankStep:
        return self.small.extrapolate(self.large, (num_blocks - NUM_BLOCKS[0]) / (NUM_BLOCKS[1] - NUM_BLOCKS[0]))


@dataclass(frozen=True)
class FakeTask:
    """A Task on fake tensors, under any plan.

    model:   all of it, on fake tensors of `mode`
    blocks:  those of its model that are repeated, if any
    is_cuda: whether the ranks have GPUs
    """

    task: Task
    spec: TrainSpec
    data: Data
    mode: FakeMode
    model: nn.Module
    blocks: RepeatedBlocks | None
    is_cuda: bool
    _tensor_plans: dict[int, TensorPlan] = field(default_factory=dict)  # of the larger short model, by ranks

    def read_step(self, parallel: ParallelSpec, degrees: ParallelDims, samples: int) -> RankStep:
        """The step of rank 0, of the full model.

        samples: of this rank

        Raises what the model raises on fake tensors, and PlanError as `parallelize` does.
        """
        if self.blocks is None:
            return self.run_step(parallel, degrees, samples)
        return self.read_depths(parallel, degrees, samples).at(len(self.blocks.names))

    def read_depths(self, parallel: ParallelSpec, degrees: ParallelDims, samples: int) -> StepByDepth:
        """As `read_step`, of a model with `blocks`, for any number of them."""
        few, many = NUM_BLOCKS
        large = self.run_step(parallel, degrees, samples, many)
        return StepByDepth(self.run_step(parallel, degrees, samples, few), large)

    def run_step(
        self, parallel: ParallelSpec, degrees: ParallelDims, samples: int, num_blocks: int | None = None
    ) -> RankStep:
        """As `read_step`, of a model with so many of its repeated blocks."""
        spec, cpu = self.spec.model_copy(update={"parallel": parallel}), torch.device("cpu")
        batch, handed = load_first_batch(self.data, samples, cpu, is_exact=True), list[float]()
        with _pause_garbage_collection(), assume_cuda(self.is_cuda), use_fake_tensors(self.mode):
            batch, model = self.mode.from_batch(batch), self._copy_model(num_blocks)
            if self.blocks is not None:
                block = model.get_submodule(".".join(filter(None, (self.blocks.path, self.blocks.names[0]))))
                block.register_forward_hook(lambda _, args, output: handed.append(bytes_of(tensors_of(output))))
            left, every = (sum(each.numel() for each in network.parameters()) for network in (model, self.model))
            play = SimulatedRanks()
            with scale_share_thresholds(left / every), self._reuse_tensor_plan():
                step = run_rank(self.task, spec, degrees, lambda: model, batch, cpu, play, is_fake=True)
        return replace(step, handed_bytes={0: float(handed[-1] if handed else 0.0)})

    def _copy_model(self, num_blocks: int | None) -> nn.Module:
        """Copy the model with so many blocks (None: all). One that cannot be copied, as with a lock, is built again."""
        blocks = self.blocks or RepeatedBlocks("", ())
        number = len(blocks.names) if num_blocks is None else num_blocks
        try:
            return blocks.copy(self.model, number)
        except Exception:  # noqa: BLE001 - of the user's own objects
            model = self.task.model()
            blocks.keep(model, number)
            return model

    @contextmanager
    def _reuse_tensor_plan(self) -> Iterator[None]:
        """Within, the layers to split are searched only the first time: no number of samples changes them, and a model
        with fewer blocks has those of the others."""
        find = vars(apply)["find_tensor_plan"]

        def reuse(model: nn.Module, learnable: TaskProtocol, size: int, example: object = None) -> TensorPlan:
            if size not in self._tensor_plans:
                self._tensor_plans[size] = find(model, learnable, size, example)
            return self._tensor_plans[size].for_layers_of(model)

        vars(apply)["find_tensor_plan"] = reuse
        try:
            yield
        finally:
            vars(apply)["find_tensor_plan"] = find


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Within, what cycles keep alive is counted, and not what the collector has found so far."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class RepeatedBlocks:
    """Equal children of one list or sequence, one after another.

    path:  of the list, in the model
    names: of the children in it
    """

    path: str
    names: tuple[str, ...]

    def keep(self, model: nn.Module, number: int) -> None:
        """Leave out all but the first `number` of them; other children keep their names."""
        for name in self.names[number:]:
            del model.get_submodule(self.path)._modules[name]

    def copy(self, model: nn.Module, number: int) -> nn.Module:
        """A copy of a fake model with the first `number` of them alone."""
        children = model.get_submodule(self.path)._modules
        every = dict(children)
        self.keep(model, number)
        try:
            return copy_model(model)
        finally:
            children.clear()
            children.update(every)


def find_repeated_blocks(model: nn.Module) -> RepeatedBlocks | None:
    """Find those with the most parameters; None where no eight blocks are alike."""

    def describe(child: tuple[str, nn.Module]) -> str:
        parameters = [(name, each.shape, each.dtype, each.requires_grad) for name, each in child[1].named_parameters()]
        return repr((child[1], parameters))

    candidates: list[tuple[int, RepeatedBlocks]] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for _, group in groupby(module.named_children(), key=describe):
            blocks = list(group)
            if len(blocks) >= MIN_BLOCKS and len({id(block) for _, block in blocks}) == len(blocks):
                size = sum(each.numel() for _, block in blocks for each in block.parameters())
                candidates.append((size, RepeatedBlocks(path, tuple(name for name, _ in blocks))))
    return max(candidates, key=lambda each: each[0])[1] if candidates else None


@contextmanager
def scale_share_thresholds(share: float) -> Iterator[None]:
    """Let a shortened model be divided as the deep one is.

    share: the part of its parameters that the model still has
    """
    before = fsdp_layout.MIN_SHARE, fsdp_layout.MAX_SHARE, plan.MIN_LAYER_SHARE
    fsdp_layout.MIN_SHARE, fsdp_layout.MAX_SHARE, plan.MIN_LAYER_SHARE = (each / share for each in before)
    try:
        yield
    finally:
        fsdp_layout.MIN_SHARE, fsdp_layout.MAX_SHARE, plan.MIN_LAYER_SHARE = before


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of a fake model, in the mode of its tensors."""
    copies: dict[int, Any] = {}  # `deepcopy` of a tensor would read its memory
    for each in [*model.parameters(), *model.buffers()]:
        new = torch.empty_like(each.detach())
        copies[id(each)] = nn.Parameter(new, each.requires_grad) if isinstance(each, nn.Parameter) else new
    return copy.deepcopy(model, copies)
