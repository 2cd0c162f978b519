"""Says which layer an input does not fit, and the shapes of the batch, where a model or its loss raises.

Called by the check of a run, and after a step that raised. Runs the model again to find the layer, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.errors import ConfigError, ShoalError, summarize_error
from shoal.parallel.state.module_snapshot import eval_mode
from shoal.train.task import Task

_SHAPES = {  # by the attribute that has the size of an input
    "in_features": "[.., {}]",
    "input_size": "[.., {}]",
    "in_channels": "[N, {}, ..]",
    "num_features": "[N, {}, ..]",
}
_ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
_OF_SAMPLES = {  # what they give of targets are targets still
    *(*_ELEMENTWISE, "float", "double", "to", "long", "log", "log1p", "detach"),
    *("__getitem__", "view", "reshape", "flatten", "squeeze", "unsqueeze"),
}
_RAISED = (RuntimeError, ValueError, IndexError, TypeError)


@contextmanager
def explain_shapes(task: Task, model: nn.Module, batch: Any) -> Iterator[None]:
    """Raise a layer's error, one of `loss`, or a missing key of a batch as a ConfigError with the shapes."""
    try:
        yield
    except ShoalError:
        raise
    except KeyError as error:
        if not isinstance(batch, Mapping) or (key := error.args[0]) in batch:
            raise
        problem, remedy = f"reads {key!r}, which the batch does not have", f"it is {describe_shapes(batch)}"
        raise ConfigError("task", type(task).__name__, problem, remedy) from error
    except _RAISED as error:
        better = explain_mismatch(task, model, batch, error)
        if better is None:
            raise
        raise better from error


def explain_mismatch(task: Task, model: nn.Module, batch: Any, error: Exception) -> ConfigError | None:
    """None where no layer of torch raises again, nor the loss."""
    entered: list[tuple[str, nn.Module, tuple[Any, ...]]] = []
    hooks = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            entered.append((name, module, args))

        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(lambda *_: entered.pop() and None))
    has_outputs, outputs = False, None
    try:
        with eval_mode(model), torch.no_grad():
            if task.train_step is not None:
                task.train_step(model, batch)
                return None
            outputs = model(*task.inputs(batch))
            has_outputs = True
            task.loss(outputs, batch)
    except _RAISED:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    shapes = f"the batch is {describe_shapes(batch)}"
    if has_outputs:
        problem = f"raised {type(error).__name__} ({summarize_error(error)}), of outputs {describe_shapes(outputs)}"
        return ConfigError("task", f"{type(task).__name__}.loss", problem, shapes)
    if not entered or not type(entered[-1][1]).__module__.startswith("torch.nn."):
        return None
    name, module, args = entered[-1]
    given = describe_shapes(args[0] if len(args) == 1 else args)
    taken = _describe_input(module)
    problem = f"takes {taken}, and got {given}" if taken else f"got {given} ({summarize_error(error)})"
    return ConfigError(f"model.{name}" if name else "model", str(module).partition("\n")[0], problem, shapes)


class BroadcastTrap(TorchFunctionMode):
    """Raises ConfigError where outputs [n, 1] meet targets [n], or the other way round: torch would compare each output
    with each target. Outputs are known by their gradient, and targets as tensors of the batch, or casts and views."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._of_batch = {id(each): each for each in tree_leaves(batch)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pair = [each for each in args if isinstance(each, Tensor)]
        if func.__name__ in _ELEMENTWISE and len(pair) == 2 and pair[0].requires_grad != pair[1].requires_grad:
            short, long = sorted((list(each.shape) for each in pair), key=len)
            is_target = id(pair[pair[0].requires_grad]) in self._of_batch
            if is_target and len(short) == 1 < short[0] and long == [*short, 1]:
                problem = f"compares each of {long} with each of {short}"
                raise ConfigError("Task.loss", func.__name__, problem, "give both one shape, as outputs.squeeze(1)")
        found = func(*args, **(kwargs or {}))
        if func.__name__ in _OF_SAMPLES and pair and id(pair[0]) in self._of_batch:
            self._of_batch[id(found)] = found
        return found


def describe_shapes(batch: Any) -> str:
    """As `float32 [32, 784], int64 [32]`, with the names of a dict."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{name} {describe_shapes(each)}" for name, each in batch.items())
    if isinstance(batch, tuple | list):
        return ", ".join(map(describe_shapes, batch))
    return type(batch).__name__


def _describe_input(module: nn.Module) -> str:
    """What a layer of torch takes, "" where that is not one shape."""
    dtype = next((f"{str(each.dtype).removeprefix('torch.')} " for each in module.parameters()), "")
    for name, shape in _SHAPES.items():
        if isinstance(size := getattr(module, name, None), int):
            return dtype + shape.format(size)
    return ""
