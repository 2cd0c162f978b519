"""Checks of a plan before any process starts. Called by launchers, and again by `parallelize`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from shoal.errors import PlanError
from shoal.parallel.layers.batch_norm import check_batch_norm
from shoal.parallel.layers.precision import check_channels_last, check_precision
from shoal.parallel.model import TaskProtocol
from shoal.parallel.spec import ParallelDims, ParallelSpec
from shoal.parallel.spmd.activation_checkpointing import check_activation_checkpointing
from shoal.parallel.spmd.fsdp_layout import check_fsdp_options
from shoal.parallel.state.module_snapshot import has_hooks
from shoal.parallel.task_step import get_train_step


def check_plan(
    model: nn.Module,
    learnable: TaskProtocol,
    spec: ParallelSpec,
    degrees: ParallelDims,
    example: Any = None,
    device: str | None = None,
) -> None:
    """Raises PlanError, naming layer and remedy, when `model` does not fit the plan. Needs no process group.

    example: a batch, for finding layers that can be split; without it only a user's own plan is checked
    device:  `cpu` or `cuda`, if known
    """
    if device is not None:
        check_precision(spec.precision, device)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            remedy = "run one batch through the model in Task.model()"
            raise PlanError("model", name, "is a parameter whose shape is not known yet", remedy)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PlanError("model", type(model).__name__, "has no parameter to train", "set requires_grad on some")
    if get_train_step(learnable) is not None:
        # A Task's own step calls the model, and takes losses, as it likes.
        if degrees.shard or degrees.tensor > 1 or degrees.pipeline > 1:
            problem = "the Task has a train_step of its own, which needs the full model on each rank"
            raise PlanError("parallel", degrees.description, problem, "use parallel=ddp, or write `loss` instead")
        if spec.precision == "fp16":
            problem = "scales one loss, and the Task has a train_step of its own"
            raise PlanError("parallel.precision", spec.precision, problem, "use bf16")
    if spec.channels_last:
        check_channels_last(model)
    if degrees.pipeline > 1:
        from shoal.parallel.pipeline.schedules import check_schedule

        check_schedule(spec.schedule, degrees.pipeline, spec.num_micro_batches(degrees), degrees.is_sharded)
    if degrees.data > 1:
        check_batch_norm(model)
        _check_embeddings(model)
    if degrees.shard and degrees.data > 1:
        _check_shardable(model)
    check_fsdp_options(model, spec, degrees, device)
    check_activation_checkpointing(model, spec, degrees)
    if degrees.data > 1 and (degrees.shard or degrees.tensor > 1):
        for name, parameter in model.named_parameters():
            if has_hooks(parameter):
                problem = "has a hook, which shards of its gradient would pass by"
                raise PlanError("model", name, problem, "change the gradient in the forward pass, or use parallel=ddp")
    if degrees.tensor > 1:
        from shoal.parallel.tensor.plan import find_tensor_plan

        find_tensor_plan(model, learnable, degrees.tensor, example)


def _check_embeddings(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            problem = "has a max_norm: each data rank would shorten the rows that its own samples use"
            raise PlanError("model", name, problem, "normalise what it gives in the forward pass, or use one data rank")
        if module.scale_grad_by_freq:
            problem = "has scale_grad_by_freq: each data rank would count its own samples alone"
            raise PlanError("model", name, problem, "weigh the loss instead, or use one data rank")


def _check_shardable(model: nn.Module) -> None:
    dtypes: dict[object, str] = {}
    for name, parameter in model.named_parameters():
        dtypes.setdefault(parameter.dtype, name)
        if parameter.ndim == 0:
            problem = "is a parameter without a dimension, which cannot be sharded"
            raise PlanError("parallel.shard", name, problem, "give it the shape [1], or use ddp")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise PlanError("parallel.shard", name, "has sparse gradients, which cannot be sharded", "use sparse=False")
    if len(dtypes) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise PlanError("parallel.shard", True, f"parameters of several types: {listed}", "use one dtype, or ddp")
