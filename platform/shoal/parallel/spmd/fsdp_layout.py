"""What FSDP2 is asked for: the blocks of a model that it gathers together, the type of gathered weights, and when they
are freed.

Called by `fsdp` and `pipeline`, by `validate`, and by `placement`. Loads none of torch's sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import PlanError
from shoal.parallel.spec import ParallelDims, ParallelSpec

PARAMS_DTYPE = torch.bfloat16  # of the gathered weights with precision=bf16_params


def make_fsdp_options(spec: ParallelSpec, is_root: bool) -> dict[str, Any]:
    """Arguments of `fully_shard` for one part of a model.

    is_root: whether the part is the model itself, whose outputs are in fp32 for the loss
    """
    # They take long to load, and `validate` has no need of them.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {}
    if spec.reshard_after_forward != "auto":
        options["reshard_after_forward"] = spec.reshard_after_forward
    if spec.offload == "all":
        options["offload_policy"] = CPUOffloadPolicy()
    if spec.precision == "bf16_params":
        outputs = torch.float32 if is_root else None
        options["mp_policy"] = MixedPrecisionPolicy(PARAMS_DTYPE, torch.float32, outputs)
    return options


def autocast_forward(part: nn.Module, device: str) -> None:
    """Let `part` compute under autocast in every call: its weights are in bf16, its buffers in their own type."""
    forward = part.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=PARAMS_DTYPE):
            return forward(*args, **kwargs)

    part.forward = call


def check_fsdp_options(model: nn.Module, spec: ParallelSpec, degrees: ParallelDims, device: str | None) -> None:
    """Raises PlanError when the plan shards nothing that an option is about, or model or device do not fit the option.

    device: `cpu` or `cuda`, if known
    """
    if spec.offload == "all" and (not degrees.is_sharded or degrees.pipeline > 1 or device == "cpu"):
        problem = f"is for shards of whole models, and {degrees.description} has none"
        if device == "cpu":
            problem = "moves shards to the host's memory, where a run on the CPU has them"
        raise PlanError("parallel.offload", spec.offload, problem, "use none")
    if spec.precision == "bf16_params":
        if not degrees.is_sharded or degrees.pipeline > 1:
            problem = f"gathers sharded weights in bf16, and {degrees.description} gathers none of a whole model"
            raise PlanError("parallel.precision", spec.precision, problem, "use precision=bf16, or parallel=fsdp")
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                problem = f"needs weights of the type of running statistics, which {name} has in fp32"
                raise PlanError("parallel.precision", spec.precision, problem, "use precision=bf16")
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                problem = f"is for models in fp32, and {name} is {parameter.dtype}"
                raise PlanError("parallel.precision", spec.precision, problem, "use precision=fp32")
    if spec.reshard_after_forward != "auto" and not degrees.is_sharded:
        problem = f"frees gathered weights, and {degrees.description} gathers none"
        raise PlanError("parallel.reshard_after_forward", spec.reshard_after_forward, problem, "leave it at auto")


MIN_SHARE = 0.01  # of all parameters: a smaller block is gathered with the rest of the model
MAX_SHARE = 0.5  # a larger block is divided further, if possible


def find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of lists and sequences whose parameters are gathered together, apart from other blocks'.

    A parameter that is also used outside its block (a tied weight) keeps the block in the model's own group. A module
    with `is_one_block` is not divided: ranks differ in how often it calls its layers, as one over trees does.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    holders = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    yield from _iter_blocks(model, "", total, holders)


def _iter_blocks(module: nn.Module, prefix: str, total: int, holders: Counter[int]) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        size = sum(parameter.numel() for parameter in child.parameters())
        is_one = getattr(child, "is_one_block", False)
        inner = [] if is_one else list(_iter_blocks(child, f"{path}.", total, holders))
        divides = size > MAX_SHARE * total and len(inner) > 1
        if not is_list or divides or (isinstance(child, (nn.ModuleList, nn.Sequential)) and inner):
            yield from inner
        elif size >= MIN_SHARE * total and not isinstance(child, nn.ModuleList):
            own = Counter(id(each) for _, each in child.named_parameters(remove_duplicate=False))
            if all(holders[each] == count for each, count in own.items()):
                yield path, child
