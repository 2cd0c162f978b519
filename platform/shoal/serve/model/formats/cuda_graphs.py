"""A module as CUDA graphs, one per batch size: the full forward is launched at once, without its kernels' overhead.

Called by `module`. A graph replays fixed addresses, so a version is copied into the parameters of a slot, which has its
own module, graphs and buffers. A slot is reused only once no reference to its version is left, a running batch's
included. So no batch sees a mixture, and live versions do not capture again.

All graphs of a module share one pool of memory: every thread replays on the device's default stream, one graph after
another, so that what one computes with is free for the next. Outputs keep their memory.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, summarize_error
from shoal.serve.model.formats.torch_forward import copy_to_host

NUM_CAPTURE_WARM_UPS = 3  # libraries allocate and choose their kernels in the first calls

_capturing = threading.Lock()  # a capture begins with a wait for the whole device, which would break another capture


class GraphedModule:
    """The slots of one module. `called` returns a module's callable: itself or its `predict`."""

    def __init__(self, module: nn.Module, called: Callable[[nn.Module], Callable[..., Any]]) -> None:
        self._module, self._get_callable = module, called
        self._free: list[_Slot] = []
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def bind(self, state: Mapping[str, Tensor]) -> Callable[..., Any]:
        """Bind the module to the weights of one version."""
        try:
            slot = self._free.pop()
        except IndexError:
            module = copy.deepcopy(self._module)
            slot = _Slot(module, self._get_callable(module), self._pool)
        slot.assign(state)

        def run(*args: Tensor, **inputs: Tensor) -> Any:
            return slot.run(args, inputs)

        weakref.finalize(run, self._free.append, slot)  # the version's claim to it is garbage then
        return run


class _Slot:
    """Parameters, and the graphs that read them."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], pool: Any) -> None:
        self._module = module
        self._call = call
        self._pool = pool
        self._graphs: dict[Hashable, _Graph] = {}
        self._lock = threading.Lock()  # the buffers are for one batch at a time

    def assign(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._module.state_dict().items():
                tensor.copy_(state[name])
        if torch.cuda.is_available():  # the copies are on this thread's stream, the replays maybe on another's
            torch.cuda.current_stream().synchronize()

    def run(self, args: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> Any:
        """Run a batch; returns outputs of its rows in their own memory."""
        tensors = args or tuple(inputs.values())
        num_rows = len(tensors[0])
        size = 1 << (num_rows - 1).bit_length()
        key = (size, *((tensor.shape[1:], tensor.dtype) for tensor in tensors))
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                buffers = [torch.zeros(size, *each.shape[1:], dtype=each.dtype, device=each.device) for each in tensors]
                graph = self._graphs[key] = _Graph(self._call, buffers, list(inputs), self._pool)
            return graph.replay(tensors, num_rows)


class _Graph:
    """The forward of one batch size. `names` are the inputs' when it is called by name."""

    def __init__(self, call: Callable[..., Any], buffers: list[Tensor], names: list[str], pool: Any) -> None:
        self._buffers = buffers
        named = dict(zip(names, buffers, strict=True)) if names else {}
        args = () if names else tuple(buffers)
        self._replay, self._outputs = capture_graph(lambda: call(*args, **named), pool)

    def replay(self, tensors: tuple[Tensor, ...], num_rows: int) -> Any:
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer[:num_rows].copy_(tensor)
        self._replay()
        outputs = self._outputs
        if isinstance(outputs, Mapping):
            return dict(zip(outputs, _copy_rows(outputs.values(), num_rows), strict=True))
        if isinstance(outputs, tuple | list):
            return _copy_rows(outputs, num_rows)
        return _copy_rows([outputs], num_rows)[0]


def capture_graph(compute: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """Capture `compute` with memory of the pool; returns a function that replays it on the same memory, and its
    outputs. Other threads may use the device meanwhile. Raises ConfigError for what cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    with _capturing, torch.cuda.stream(torch.cuda.current_stream()):  # also after a capture that fails
        for _ in range(NUM_CAPTURE_WARM_UPS):  # on the stream of the replays, whose libraries' workspaces they share
            compute()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = compute()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model, or of CUDA, on an operation that no graph can have
            problem = f"the model cannot be captured: {summarize_error(error)}"
            remedy = "leave it out, or let forward neither read values of the device nor wait for it"
            raise ConfigError("cuda_graphs", True, problem, remedy) from error
    return graph.replay, outputs


def _copy_rows(outputs: Iterable[Any], num_rows: int) -> list[Any]:
    """Copy the batch's rows out of the memory that the next batch overwrites; a value without rows is copied in full.

    The copy waits for the replay: both are on the calling thread's stream.
    """
    rows = (each[:num_rows] if isinstance(each, Tensor) and each.ndim else each for each in outputs)
    return copy_to_host(rows)
