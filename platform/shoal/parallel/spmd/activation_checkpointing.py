"""Layers that keep less for the backward pass, and recompute the rest in it.

Owns which layers those are, and what `selective` keeps. PyTorch's non-reentrant checkpoint does the work, in the
layers' own `forward`: names of parameters stay. Called by `SpmdModel`, and by `validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from shoal.errors import PlanError
from shoal.parallel.spec import ActivationCheckpointing, ParallelDims, ParallelSpec
from shoal.parallel.spmd.fsdp_layout import find_blocks
from shoal.parallel.state.module_snapshot import snapshot_module

FIELD = "parallel.activation_checkpointing"
_KEPT = (  # operators whose results cost more to compute than to keep
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_KEPT_OPERATORS = [getattr(torch.ops.aten, name).default for name in _KEPT]


def checkpoint_activations(model: nn.Module, kind: ActivationCheckpointing) -> None:
    """Let the blocks of `model` recompute their forward pass, in place. Compilation comes afterwards."""
    if kind == "none":
        return
    for _, block in find_blocks(model):
        # A partial, since a copy of the model then has one of its own block.
        block.forward = partial(_recompute, block, block.forward, kind == "selective")


def check_activation_checkpointing(model: nn.Module, spec: ParallelSpec, degrees: ParallelDims) -> None:
    """Raises PlanError when nothing would be recomputed, or not what the forward pass computed."""
    kind = spec.activation_checkpointing
    if kind == "none":
        return
    if degrees.pipeline > 1:
        problem = "recomputes whole layers, and a pipeline's stage may begin within one"
        raise PlanError(FIELD, kind, problem, "use more parallel.micro_batches, or a plan without stages")
    blocks = list(find_blocks(model))
    if not blocks:
        problem = f"finds no layer of a list or a sequence with weights of its own in {type(model).__name__}"
        raise PlanError(FIELD, kind, problem, "put the layers into an nn.ModuleList, or use none")
    for path, block in blocks:
        for name, module in block.named_modules() if spec.compile else ():
            if isinstance(module, _BatchNorm):
                where = f"{path}.{name}".removesuffix(".")
                problem = f"would update the running statistics of {where} twice in compiled layers"
                raise PlanError(FIELD, kind, problem, "use compile=false")


def _recompute(block: nn.Module, forward: Callable[..., Any], is_selective: bool, /, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of `block`, which the backward pass runs again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    selective = partial(create_selective_checkpoint_contexts, _KEPT_OPERATORS)
    if torch.compiler.is_compiling():  # contexts of others would break the graph
        context_fn = selective if is_selective else noop_context_fn
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    def make_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = selective() if is_selective else (nullcontext(), nullcontext())
        return first, _preserve_buffers(block, again, snapshot_module(block))

    return checkpoint(forward, *args, use_reentrant=False, context_fn=make_contexts, **kwargs)


@contextmanager
def _preserve_buffers(
    block: nn.Module, within: AbstractContextManager[Any], rewind: Callable[[], None]
) -> Iterator[None]:
    """The recomputation begins with the buffers of the forward pass, and leaves them as they are now.

    Running statistics, say, have seen the samples once already; and a spectral norm reads the vectors that it updates.
    """
    restore = snapshot_module(block)
    rewind()
    try:
        with within:
            yield
    finally:
        restore()
