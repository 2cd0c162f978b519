"""When a function with a backward of its own must let autograd see each operation, and its gradients with a graph.

Called by what has a torch.autograd.Function. Such a function gives first derivatives alone, and torch notices a second
one only where the loss is not linear in the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_each_operation_needed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def has_saved_tensor_hooks() -> bool:
    """Whether torch.utils.checkpoint or the like decides what becomes of tensors that a backward needs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_plain_backward_needed(grad_outputs: Tensor) -> bool:
    """In a backward: whether its gradients are differentiated (`create_graph`), or a batch (`is_grads_batched`)."""
    is_batch = torch._C._functorch.is_legacy_batchedtensor(grad_outputs)
    return torch.is_grad_enabled() or is_batch or is_each_operation_needed()


def differentiate_plainly(
    compute: Callable[..., Tensor], inputs: Sequence[Tensor], is_needed: Sequence[bool], grad_outputs: Tensor
) -> tuple[Tensor | None, ...]:
    """For a backward: the gradients of the inputs by `compute`, plain torch, so that they can be differentiated again.

    Autocast is off: a forward under autocast turns it on in `compute` (`ForwardState`).
    """
    with torch.enable_grad(), _set_autocast(grad_outputs.device, None):
        own = [each.view_as(each) for each in inputs]  # one input may be computed from another
        outputs = compute(*own)
    wanted = [each for each, is_wanted in zip(own, is_needed, strict=True) if is_wanted]
    has_graph = torch.is_grad_enabled()
    result = iter(torch.autograd.grad(outputs, wanted, grad_outputs, create_graph=has_graph, allow_unused=True))
    return tuple(next(result) if is_wanted else None for is_wanted in is_needed)


class ForwardState:
    """What a user's forward depends on besides its inputs: autocast and random numbers, so that it can run again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._autocast = _read_autocast(device)
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def restore(self) -> Iterator[None]:
        devices = [] if self._cuda is None else [self._device]
        with torch.random.fork_rng(devices), _set_autocast(self._device, self._autocast):
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            yield


def _read_autocast(device: torch.device) -> torch.dtype | None:
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _set_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """dtype: None turns it off."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
