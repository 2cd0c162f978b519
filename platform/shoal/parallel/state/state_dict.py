"""A model's and an optimiser's state by names that do not depend on the plan, and loading it.

Called by every plan. The states fit torch's distributed checkpoint (DCP): they contain the trained tensors themselves,
or DTensors of them, so that reading a checkpoint into them fills the model; `load` copies the rest.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer, SparseAdam

from shoal.errors import SpecMismatch

MAX_GROUP_BYTES = 64 << 20  # of parameters whose state is created at once
NamedParameters = Iterable[tuple[str, nn.Parameter]]


def sum_in_double(tensor: Tensor) -> float | complex:
    """The sum in double precision, with the imaginary part of a complex tensor."""
    total: float | complex = (
        tensor.detach().sum(dtype=torch.complex128 if tensor.is_complex() else torch.float64).item()
    )
    return total


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy `value` into `target`, which may be sharded while `value` is unsharded."""
    if value is target:
        return
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    with torch.no_grad():
        target.copy_(value)


def load_model_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raises SpecMismatch, naming the first tensor that is missing, unknown or of another shape."""
    copy_tensors(state, module.state_dict(), "the model")
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    if others:  # the results of modules' get_extra_state
        module.load_state_dict(others, strict=False)


def copy_tensors(state: Mapping[str, Any], mine: Mapping[str, Any], holder: str) -> None:
    """Copy the tensors of `state` into those of `mine`, which belong to `holder`. Raises SpecMismatch, before anything
    is copied, naming the first tensor that is missing, unknown or of another shape."""
    for name in [*mine, *state]:
        if name not in mine or name not in state:
            problem = f"is not in {holder}" if name not in mine else "is missing"
            raise SpecMismatch(f"model.{name}", "", problem, "load it into the model that it was saved from")
        if isinstance(state[name], Tensor) and state[name].shape != mine[name].shape:
            problem, remedy = f"the model has {list(mine[name].shape)}", "load it into the model of these weights"
            raise SpecMismatch(f"model.{name}", list(state[name].shape), problem, remedy)
    for name, value in state.items():
        if isinstance(value, Tensor):
            copy_into(mine[name], value)


def describe_weights(state: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Dtype and full shape of each tensor."""
    return {name: (value.dtype, value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def iter_weights(state: Mapping[str, Any], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Unsharded tensors on the CPU, one by one, if `keep`; nothing elsewhere. Collective if there are DTensors."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            full = gather_full_tensor(value) if isinstance(value, DTensor) else value
            if keep:
                yield name, full.detach().cpu()
            del full  # before the next one is gathered


def gather_full_tensor(value: DTensor) -> Tensor:
    """Unshard without the warning that a tensor which is split twice takes two collectives: it is done rarely."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return value.full_tensor()
    finally:
        logger.setLevel(level)


def optimizer_state(named: NamedParameters, optimizer: Optimizer, *, to_fill: bool = False) -> dict[str, Any]:
    """{parameter's name: {"state": {name: tensor}, "settings": the numbers of its group, sorted by name}}.

    Parameters without a step get the state that the optimiser's first step creates, without the step. The optimiser
    itself stays without it: some create other state from their first gradient.

    to_fill: leave the created state in the optimiser: a checkpoint is read into it

    States of a few bits look like fp32, and who writes them dequantises one by one; `to_fill` they are fp32, since
    another plan has other blocks.
    """
    undo = _initialise_state(optimizer)
    result: dict[str, Any] = {}
    for name, parameter, group in _iter_parameters(named, optimizer):
        kept = optimizer.state[parameter]
        state = {
            key: _convert_quantised(torch.as_tensor(value), to_fill) for key, value in kept.items() if value is not None
        }
        result[name] = {"state": state, "settings": torch.tensor(list(_iter_settings(group)), dtype=torch.float64)}
    if not to_fill:
        undo()
    return result


def _convert_quantised(value: Tensor, dequantizes: bool) -> Tensor:
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if type(local).dequantize is Tensor.dequantize:
        return value
    numbers: Tensor = local.dequantize() if dequantizes else local.float()  # its type alone
    if not isinstance(value, DTensor):
        return numbers
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(numbers, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def load_optimizer_state(named: NamedParameters, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raises SpecMismatch when a parameter's state is missing or has other entries than this optimiser's."""
    _initialise_state(optimizer)
    for name, parameter, group in _iter_parameters(named, optimizer):
        if name not in state:
            raise SpecMismatch(f"optimizer.{name}", "", "is missing", "resume with the model that was saved")
        mine, theirs = optimizer.state[parameter], state[name].get("state", {})
        for key in [key for key, value in mine.items() if value is not None]:
            if key not in theirs:
                problem = f"has no {key}, which {type(optimizer).__name__} keeps"
                raise SpecMismatch(f"optimizer.{name}", sorted(theirs), problem, "resume with the optimiser of the run")
            if isinstance(mine[key], Tensor):
                copy_into(mine[key], theirs[key])
            else:
                mine[key] = type(mine[key])(theirs[key].item())
        _restore_settings(group, state[name]["settings"].tolist())


def _iter_parameters(
    named: NamedParameters, optimizer: Optimizer
) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    names = {parameter: name for name, parameter in named}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield names[parameter], parameter, group


def _iter_settings(group: Mapping[str, Any]) -> Iterator[float]:
    """The numbers among a group's settings (rates, decays, betas): some optimisers change them during training."""
    for key in _numeric_keys(group):
        value = group[key]
        for each in value if isinstance(value, (tuple, list)) else [value]:
            if type(each) in (int, float) or (isinstance(each, Tensor) and each.ndim == 0):
                yield float(each)


def _restore_settings(group: dict[str, Any], values: list[float]) -> None:
    if len(values) != len(list(_iter_settings(group))):
        raise SpecMismatch("optimizer", len(values), "settings, not as many as were saved", "use the same optimiser")
    rest = iter(values)

    def restored(each: Any) -> Any:
        if type(each) in (int, float):
            return type(each)(next(rest))
        if isinstance(each, Tensor) and each.ndim == 0:
            each.fill_(next(rest))
        return each

    for key in _numeric_keys(group):
        value = group[key]
        if isinstance(value, (tuple, list)):
            group[key] = type(value)(restored(each) for each in value)
        else:
            group[key] = restored(value)


def _numeric_keys(group: Mapping[str, Any]) -> list[str]:
    """`initial_lr` belongs to a schedule, which may be created before or after."""
    return sorted(key for key in group if key not in ("params", "initial_lr"))


def _initialise_state(optimizer: Optimizer) -> Callable[[], None]:
    """Let the optimiser create the state of parameters without any, by a step that changes nothing; returns the undo.

    The step runs with zero gradients and a zero rate on those parameters alone, without hooks; counts and settings are
    restored afterwards.
    """
    new = [each for each in _all_parameters(optimizer) if each.requires_grad and not optimizer.state.get(each)]
    before = [set(group) for group in optimizer.param_groups]
    for some in _divide(new):
        with _freeze_parameters(optimizer, some), _disable_hooks(optimizer):
            type(optimizer).step(optimizer)  # not the instance's, which a schedule wraps to count steps
    for parameter in new:
        for key, entry in optimizer.state[parameter].items():
            if key == "step":
                optimizer.state[parameter][key] = torch.zeros_like(entry) if isinstance(entry, Tensor) else 0

    def undo() -> None:
        for parameter in new:
            optimizer.state.pop(parameter, None)
        for group, keys in zip(optimizer.param_groups, before, strict=True):
            for key in group.keys() - keys:
                del group[key]

    return undo


def _all_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _divide(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups of some size: their gradients, and what is kept of them meanwhile, take memory."""
    groups: list[list[nn.Parameter]] = []
    size_bytes = MAX_GROUP_BYTES
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if size_bytes >= MAX_GROUP_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(parameter)
        size_bytes += local.numel() * local.element_size()
    return groups


@contextmanager
def _freeze_parameters(optimizer: Optimizer, new: list[nn.Parameter]) -> Iterator[None]:
    """Within, the rate is 0, and only `new` have gradients, zeros; afterwards everything is restored."""
    everything = _all_parameters(optimizer)
    layout = torch.sparse_coo if isinstance(optimizer, SparseAdam) else torch.strided  # SparseAdam requires it
    grads = [parameter.grad for parameter in everything]
    kept = [parameter.detach().clone() for parameter in new]
    settings = [
        {key: (each, each.clone() if isinstance(each, Tensor) else each) for key, each in group.items()}
        for group in optimizer.param_groups
    ]
    try:
        for parameter in everything:
            parameter.grad = None
        for parameter in new:  # zeros, so that weight decay has no effect
            copy_into(parameter.data, torch.zeros_like(parameter))
            parameter.grad = torch.zeros_like(parameter, layout=layout)
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        yield
    finally:
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            for key, (each, value) in before.items():
                group[key] = each.copy_(value) if isinstance(each, Tensor) else each
        for parameter, grad in zip(everything, grads, strict=True):
            parameter.grad = grad
        for parameter, value in zip(new, kept, strict=True):
            copy_into(parameter.data, value)


@contextmanager
def _disable_hooks(optimizer: Optimizer) -> Iterator[None]:
    """A schedule may count the steps of its optimiser by them."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
