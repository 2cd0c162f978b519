"""Models without memory: torch's fake tensors, which have shapes and dtypes, and no values.

Owns the limit beyond which this process does not build a model, and the mode in which any code of a plan runs on fake
tensors. Called where a model is looked at before a run: by `predict`, by `shoal plan`, by the check of a run. Never
trains anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from shoal.batch_tree import map_tensors
from shoal.data import Batch
from shoal.parallel.state.skeleton import replace_registered

MAX_REAL_BYTES = 512 << 20  # of parameters: a model that has more is not built to be looked at
MAX_SHARE = 1 / 8  # ... or more than this share of the free memory
COUNTED_BYTES = 32 << 20  # one that has more is counted on fake tensors first: to draw weights takes 2 s a GB

T = TypeVar("T")
_aten = torch.ops.aten
_OUTPUT_SHAPES = "_propagate_tensor_meta_non_cached"  # of a DTensor's operator
_COMPARISONS = (_aten.equal.default, _aten.allclose.default)


class ModelTooLarge(Exception):
    """A model has more bytes of parameters than this process builds only to look at it."""


class _LimitReached(BaseException):
    """Leaves the construction of a model; no `except Exception` of the model's own code stops it."""


def build_small_model(build: Callable[[], nn.Module]) -> nn.Module:
    """The result of `build`. Raises ModelTooLarge as soon as it has registered more bytes of parameters than the
    limit."""
    limit = min(MAX_REAL_BYTES, int(MAX_SHARE * psutil.virtual_memory().available))
    try:
        return _build_within(min(limit, COUNTED_BYTES), build)
    except ModelTooLarge:
        if limit <= COUNTED_BYTES:
            raise
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _build_within(limit, build)
    except ModelTooLarge:
        raise
    except Exception:  # noqa: BLE001 - of tensors without values; if it is the model's own, it comes again
        pass
    return _build_within(limit, build)


def _build_within(limit: int, build: Callable[[], nn.Module]) -> nn.Module:
    sizes: dict[int, int] = {}

    def count(parameter: nn.Parameter) -> None:
        sizes[id(parameter)] = parameter.nbytes
        if sum(sizes.values()) > limit:
            raise _LimitReached

    try:
        with replace_registered(count):
            return build()
    except _LimitReached:
        raise ModelTooLarge from None


class FakeMode(FakeTensorMode):
    """Fake tensors whose values, where code asks for one, are 1 or True: two of them compare as equal.

    Such code is that of checks, as of finite losses and of equal weights. An operator whose output's *shape* depends on
    values raises DynamicOutputShapeException, of RuntimeError.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func in _COMPARISONS:
                return True
            if func is not _aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1

    def from_batch(self, batch: Batch) -> Batch:
        """A real batch as fake tensors."""
        return map_tensors(batch, self.from_tensor)


@contextmanager
def use_fake_tensors(mode: FakeMode | None = None) -> Iterator[FakeMode]:
    """Within, every tensor that is made is fake. Meshes of ranks, which have values, stay real.

    mode: that of fake tensors from before, which no other may use
    """
    from torch.distributed.device_mesh import DeviceMesh  # all load torch.distributed, which takes a second
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    from shoal.parallel.comm import world

    with ExitStack() as undo, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # as `deepcopy` does
        _patch(undo, nn.Module, "_apply", _make_apply())
        _patch(undo, world, "init_device_mesh", _make_real(vars(world)["init_device_mesh"]))
        _patch(undo, DeviceMesh, "__getitem__", _make_real(DeviceMesh.__getitem__))
        _patch(undo, DeviceMesh, "_concatenate", staticmethod(_make_real(DeviceMesh._concatenate)))
        _patch(undo, _fsdp_param, "_chunk_with_empty", _make_equal_chunks)
        mode = undo.enter_context(mode or FakeMode())
        output_shapes = vars(ShardingPropagator)[_OUTPUT_SHAPES]

        # DTensor runs an operator on whole tensors once, only for its output's shape: no counter is to see it.
        def find_output_shapes(*args: Any) -> Any:
            with _disable_current_modes(), mode:
                return output_shapes(*args)

        _patch(undo, ShardingPropagator, _OUTPUT_SHAPES, find_output_shapes)
        yield mode


def _patch(undo: ExitStack, owner: Any, name: str, replacement: Any) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, replacement)


def _make_equal_chunks(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    """The first of a parameter's shards, which is the largest, in place of each: rank 0 keeps no other."""
    return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // num_chunks))] * num_chunks


def _make_real(function: Callable[..., T]) -> Callable[..., T]:
    def call(*args: Any, **kwargs: Any) -> T:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _make_apply() -> Callable[..., nn.Module]:
    """`Module.to`, `half` and so on: torch swaps a parameter in place, which a fake one does not allow. A tied one
    stays tied."""
    replaced: dict[tuple[int, int], tuple[nn.Parameter, Any, nn.Parameter]] = {}  # which keeps the keys' objects alive

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter), id(function)
            if key not in replaced:
                with torch.no_grad():
                    changed = function(parameter)
                is_same = (changed.dtype, changed.device) == (parameter.dtype, parameter.device)
                new = parameter if is_same else nn.Parameter(changed, parameter.requires_grad)
                replaced[key] = parameter, function, new
            module._parameters[name] = replaced[key][2]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return apply
