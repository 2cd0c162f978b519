"""torch.compile of a module in place, with an error where it would silently run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.parallel.loss_trace import pause_trace

_code_ids = count()  # of compiled modules in this process


def compile_module(module: nn.Module) -> None:
    """torch.compile, in place. A module that cannot be compiled raises PlanError at its first call.

    Not by `module.compile()`, which silently skips PyTorch's own modules (such as a Sequential).
    """
    module._compiled_call_impl = _compile_function(module, lambda *args, **kwargs: module._call_impl(*args, **kwargs))


def compile_forward(module: nn.Module) -> None:
    """As `compile_module`, but hooks stay outside: those of FSDP and pipelines would break a block's graph."""
    forward = module.forward
    module.forward = _compile_function(module, lambda *args, **kwargs: forward(*args, **kwargs))


def _compile_function(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    kind = _share_code(function.__code__, f"{module} {shapes}")
    compiled = torch.compile(FunctionType(kind.code, function.__globals__, closure=function.__closure__))
    before = _count_graphs()

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with pause_trace(module):
                output = compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _compile_error(module, f"{type(error).__name__}: {error}") from error
        if not kind.has_graph and _count_graphs() == before:
            raise _compile_error(module, "no graph was made of it")
        kind.has_graph = True
        return output

    return call


@dataclass
class _SharedCode:
    """Shared code of equal modules, so that they are compiled once.

    torch.compile caches graphs by code object, at most 8 for each; beyond that it silently compiles no more. So modules
    that differ must not share one.
    """

    code: CodeType
    has_graph: bool = False


@cache
def _share_code(code: CodeType, description: str) -> _SharedCode:
    """The code of modules of this description, by a name of its own: torch remembers by it which sizes have changed."""
    return _SharedCode(code.replace(co_name=f"compiled_{next(_code_ids)}"))


def _count_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _compile_error(module: nn.Module, reason: str) -> PlanError:
    problem = f"{type(module).__name__} cannot be compiled ({reason})"
    return PlanError("parallel.compile", True, problem, "use compile=false")
