"""Traces a model on a few samples: which linear layers it calls, in which order, and with which tensors.

It runs twice, in this process alone, and is left unchanged: in evaluation mode without gradients, and in training mode,
with a graph that shows the flow of gradients. Called by `plan`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.parallel.layers.dropout import SeededDropout
from shoal.parallel.state.module_snapshot import eval_mode, hook_modules, preserve_module
from shoal.random_state import preserve_rng

# Layers whose masks do not come from the generators that all parts share.
DROPOUT_TYPES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, SeededDropout)
# Exceptions of a model's code for tensors of an unexpected shape.
SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative to the largest value; otherwise 1e-4


@dataclass(eq=False)
class LinearCall:
    """The first call of a linear layer."""

    name: str
    module: nn.Linear
    input: Tensor


@dataclass
class TrainedCall:
    """One call of a linear layer in training.

    read, gave:    the graph nodes of the input and of the output; None without gradients
    drawn_before:  the number of random draws before the call
    drawn_after:   ... and after it
    has_gradients: whether autograd was recording
    """

    name: str
    input_node: Node | None
    output_node: Node | None
    drawn_before: int
    drawn_after: int
    has_gradients: bool


@dataclass
class ModelTrace:
    """A model's actions on a few samples.

    loss:     for the model's outputs on these samples
    linears:  in order of their first calls
    trained:  every call of a linear layer, in training
    written:  linear layers and embeddings whose outputs are changed in place there
    entered:  the arguments of each module's first call, for those that hold several linear layers
    dropouts: the first input shape of each dropout layer
    called:   the number of calls of each module
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], Tensor]
    linears: list[LinearCall] = field(default_factory=list)
    training_calls: list[TrainedCall] = field(default_factory=list)
    modified_in_place: set[str] = field(default_factory=set)
    first_arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    dropouts: dict[str, torch.Size] = field(default_factory=dict)
    call_counts: Counter[str] = field(default_factory=Counter)
    output: Any = None


@dataclass(frozen=True)
class Pair:
    """Layers split by columns, and the following layer, split by rows."""

    columns: tuple[LinearCall, ...]
    row: LinearCall

    @property
    def names(self) -> list[str]:
        return [*(call.name for call in self.columns), self.row.name]


def trace_model(model: nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], Tensor]) -> ModelTrace:
    """Run `model` once in each mode, and record its calls, their order and arguments."""
    trace = ModelTrace(model, inputs, loss)
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names[module]
        holds = sum(type(each) is nn.Linear for each in module.modules())
        if holds > 1 and name not in trace.first_arguments:
            trace.first_arguments[name] = copy.deepcopy((args, kwargs))

    def leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = names[module]
        trace.call_counts[name] += 1
        if trace.call_counts[name] > 1:
            return
        if type(module) is nn.Linear and args:
            trace.linears.append(LinearCall(name, module, args[0]))
        elif type(module) in DROPOUT_TYPES:
            trace.dropouts[name] = output.shape

    with eval_trace_mode(model), hook_modules(model, entering, leaving):
        trace.output = model(*inputs)
    _trace_training(trace)
    return trace


def _trace_training(trace: ModelTrace) -> None:
    """Record every call of a linear layer in training mode."""
    model, calls = trace.model, trace.training_calls
    outputs: list[tuple[str, Tensor]] = []
    drawn = _RngWatch(next(model.parameters()).device)

    def entering(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read = _grad_node(*args, *kwargs.values())
            calls.append(TrainedCall(name, read, None, drawn.count_draws(), 0, torch.is_grad_enabled()))

        return note

    def leaving(name: str) -> Callable[..., Tensor]:
        def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            copied = output.clone()  # stays in the graph, even if the model changes the output in place
            outputs.append((name, copied))
            if type(module) is nn.Linear:
                calls[-1].output_node = _grad_node(copied)
                calls[-1].drawn_after = drawn.count_draws()
            return copied

        return note

    with train_trace_mode(model), ExitStack() as hooks:
        for name, module in model.named_modules():
            if type(module) is nn.Linear:
                hooks.callback(module.register_forward_pre_hook(entering(name), with_kwargs=True).remove)
            if type(module) in (nn.Linear, nn.Embedding):
                hooks.callback(module.register_forward_hook(leaving(name), prepend=True).remove)
        model(*trace.inputs)
    trace.modified_in_place = {name for name, output in outputs if output._version}


def _grad_node(tensor: Tensor) -> Node | None:
    return get_gradient_edge(tensor).node if tensor.requires_grad else None


class _RngWatch:
    """Detects random draws by the states of the generators that all ranks of a group share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_draws = 0
        self._last = self._state()

    def count_draws(self) -> int:
        """A number that grows when there were draws since the last call."""
        state = self._state()
        self._num_draws += not torch.equal(state, self._last)
        self._last = state
        return self._num_draws

    def _state(self) -> Tensor:
        state = torch.random.get_rng_state()
        if self._device.type != "cuda":
            return state
        return torch.cat([state, torch.cuda.get_rng_state(self._device)])


def max_magnitude(tensor: Tensor) -> float:
    """The largest finite absolute value; 0 without any."""
    return float(tensor.abs().masked_fill(~tensor.isfinite(), 0).max()) if tensor.numel() else 0.0


def is_close(found: Tensor, expected: Tensor, scale: float) -> bool:
    """Whether both have the same numbers, within the precision at `scale`, and NaN at the same places."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (found.is_floating_point() or found.is_complex()):
        return torch.equal(found, expected)
    atol = TOLERANCE.get(found.dtype, 1e-4) * scale
    return torch.allclose(found, expected, rtol=0.0, atol=atol, equal_nan=True)


@contextmanager
def eval_trace_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation, without gradients, through the layers' own forward methods."""
    with preserve_rng(), _disable_fast_path(), eval_mode(model), torch.no_grad():
        yield


@contextmanager
def train_trace_mode(model: nn.Module) -> Iterator[None]:
    """As it is trained, with gradients; but for dropout layers, which are seeded, and statistics of so few samples."""
    with preserve_module(model), preserve_rng(), _disable_fast_path(), ExitStack() as modes, torch.enable_grad():
        for module in model.modules():
            if type(module) in DROPOUT_TYPES or isinstance(module, _BatchNorm):
                modes.enter_context(eval_mode(module))
        yield


@contextmanager
def _disable_fast_path() -> Iterator[None]:
    """Within, no fast path of attention passes a layer by."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
