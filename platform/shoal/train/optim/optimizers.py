"""The optimiser of a run, and setting its learning rate by a schedule.

Called by the Trainer and the finders. `make_optimizer` chooses the fastest implementation for the parameters: the
fused one unless they mix devices, plain and distributed tensors, or distributed tensors of several meshes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from shoal.errors import ConfigError, needs_extra
from shoal.train.spec import OptimizerSpec
from shoal.train.task import Task

_OF_SPEC = "is_of_spec"  # marks a group that the spec describes
_FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})


class OptimizerGroup(Optimizer):
    """A Task's several optimisers, over parameters that they do not share, as one: for schedules and checkpoints.

    members: by the Task's names
    """

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        super().__init__([group for each in members.values() for group in each.param_groups], {})
        self.members = dict(members)
        for each in members.values():
            each.state = self.state  # by parameter

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loss is computed by its caller
        """Step the members with gradients."""
        for each in self.members.values():
            if any(parameter.grad is not None for parameter in list_parameters(each)):
                each.step()

    def get_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each member."""
        return {name: list_parameters(each) for name, each in self.members.items()}


def list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Of all groups of an optimiser, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def make_optimizer(
    task: Task, spec: OptimizerSpec, parameters: Iterable[nn.Parameter], model: nn.Module | None = None
) -> Optimizer:
    """The Task's own optimiser or optimisers, or the one of `spec`; each group has its `initial_lr`.

    model:      whose parameters they are, if this rank has the full one: a Task with several optimisers needs it
    parameters: this rank's trainable ones. If there are none (a pipeline stage that is frozen, or without weights), the
                Task's optimiser is not called: it may skip frozen ones, and no optimiser accepts an empty list

    Raises ConfigError when the Task returns anything but an optimiser, or one whose step needs a closure, and when it
    has one of its own while the spec describes another.
    """
    parameters = list(parameters)
    own: object = _make_optimizer_group(task, model) if model is not None else None
    if own is None and any(each.requires_grad for each in parameters):
        own = task.optimizer(iter(parameters))
    optimizer = make_spec_optimizer(spec, parameters) if own is None else own
    if not isinstance(optimizer, Optimizer):
        problem = f"{type(task).__name__}.optimizer gave a {type(own).__name__}"
        raise ConfigError("task", type(task).__name__, problem, "return a torch.optim.Optimizer, or None")
    for name, default in OptimizerSpec() if own is not None else ():
        if (value := getattr(spec, name)) != default:
            problem = f"{type(task).__name__} has an optimizer of its own, which ignores this field"
            remedy = "make it an argument of the Task, as in args.rate=..., or let its `optimizer` return None"
            raise ConfigError(f"optimizer.{name}", value, problem, remedy)
    for each in optimizer.members.values() if isinstance(optimizer, OptimizerGroup) else (optimizer,):
        closure = inspect.signature(each.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            problem = f"{type(each).__name__} computes the loss again by itself, several times a step"
            raise ConfigError("task", type(task).__name__, problem, "use an optimiser whose step needs no closure")
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
    return optimizer


def make_spec_optimizer(spec: OptimizerSpec, parameters: list[nn.Parameter]) -> Optimizer:
    """The optimiser that the spec describes, in the fastest implementation for these parameters."""
    floating = all(torch.is_floating_point(each) for each in parameters)
    fused = True if spec.fused and floating and can_fuse(parameters) else None
    groups: list[dict[str, Any]] = [{"params": parameters, _OF_SPEC: True}]  # an empty list alone would be rejected
    if spec.name in ("adam_8bit", "adamw_8bit"):
        return make_8bit_optimizer(spec.name, groups, _group_settings(spec))
    kinds: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    return kinds[spec.name](groups, **_group_settings(spec), fused=fused)


def _make_optimizer_group(task: Task, model: nn.Module) -> OptimizerGroup | None:
    """Raises ConfigError when members share parameters, or when parameters of the model have none."""
    members = task.optimizers(model)
    if members is None:
        return None
    name = type(task).__name__
    if task.train_step is None:
        problem = f"{name} has several optimizers and no train_step, which says whose turn it is"
        raise ConfigError("task", name, problem, "write train_step, and `yield name, loss` for each optimizer")
    if not members or not all(isinstance(each, Optimizer) for each in members.values()):
        raise ConfigError("task", name, f"{name}.optimizers gave {members!r}", "return {name: torch.optim.Optimizer}")
    try:
        group = OptimizerGroup(members)
    except ValueError as error:
        raise ConfigError("task", name, f"{name}.optimizers: {error}", "give each parameter one optimizer") from error
    trained = {id(each) for each in list_parameters(group)}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            problem = f"{name}.optimizers leaves out {path}"
            raise ConfigError("task", name, problem, "give it an optimizer, or set requires_grad=False in Task.model()")
    return group


def set_learning_rate(optimizer: Optimizer, factor: float, momentum: float | None = None) -> None:
    """Set each group's rate to `factor` times its `initial_lr`. Cheap when nothing changes.

    momentum: for groups that have one (sgd's momentum, the first of Adam's betas); None: unchanged
    """
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        elif group["lr"] != rate:
            group["lr"] = rate
        if momentum is not None and "betas" in group:
            if group["betas"][0] != momentum:
                group["betas"] = (momentum, *group["betas"][1:])
        elif momentum is not None and group.get("momentum"):  # 0 means none
            group["momentum"] = momentum


def is_task_optimizer(optimizer: Optimizer) -> bool:
    """Whether the Task created it: then a schedule of the Task may change its rates."""
    return not any(group.get(_OF_SPEC) for group in optimizer.param_groups)


def restore_spec_settings(optimizer: Optimizer, spec: OptimizerSpec) -> None:
    """After loading a checkpoint: restore the settings of the present spec. A Task's own stay unchanged."""
    for group in optimizer.param_groups:
        if group.get(_OF_SPEC):
            rate = group["lr"]
            group.update(_group_settings(spec))
            if isinstance(rate, Tensor):
                group["lr"] = rate.fill_(group["lr"])


def can_fuse(parameters: Iterable[Tensor]) -> bool:
    """Whether one fused kernel can update all of these together."""
    kinds = {(each.device.type, each.device_mesh if isinstance(each, DTensor) else None) for each in parameters}
    return len(kinds) == 1 and all(device in _FUSED_DEVICES for device, _ in kinds)


def _group_settings(spec: OptimizerSpec) -> dict[str, Any]:
    """One group's settings, by PyTorch's names."""
    own = {"momentum": spec.momentum} if spec.name == "sgd" else {"betas": spec.betas}
    return {"lr": spec.learning_rate, "weight_decay": spec.weight_decay, **own}


def make_8bit_optimizer(name: str, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> Optimizer:
    """`adam_8bit` or `adamw_8bit`, by torchao (arXiv:2110.02861): states of eight bits in blocks of 256 values,
    2 bytes a parameter in place of 8. Tensors of less than 4096 values on this rank keep states of their own type.

    torchao compiles a step for each shape of a parameter. On the CPU that takes longer than the steps it saves, so they
    run eagerly there. Raises MissingExtra without torchao.
    """
    log = logging.getLogger("torchao")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of each of its extensions that does not fit this torch
    try:
        with needs_extra("torchao"):
            from torchao.optim import Adam8bit, AdamW8bit
    finally:
        log.setLevel(level)
    kind: type[Optimizer] = AdamW8bit if name == "adamw_8bit" else Adam8bit
    if any(each.device.type != "cpu" for group in groups for each in group["params"]):
        return kind(groups, **settings)

    def step(self: Optimizer, closure: None = None) -> None:
        with torch.compiler.set_stance("force_eager"):
            kind.step(self)

    eager: type[Optimizer] = type(f"Eager{kind.__name__}", (kind,), {"step": step})
    return eager(groups, **settings)
