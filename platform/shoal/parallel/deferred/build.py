"""Build a model without memory for its parameters: they are on the meta device, and how they get values is recorded.

Buffers are real. Each parameter leaves real memory when it is registered; what is done to it from then on is run on
the meta device alone, and goes to a tape. While the model is built such a tensor says that it is on the CPU, since
code that sees the meta device leaves weights out. Called where a run builds the model of a sharded plan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.parallel.deferred.tape import Call, CannotDefer, Region, Tape
from shoal.parallel.deferred.weights import DeferredWeights
from shoal.parallel.state.module_snapshot import has_hooks
from shoal.parallel.state.skeleton import is_meta, is_used_elsewhere, replace_registered

_META, _CPU = torch.device("meta"), torch.device("cpu")
_TRUNCATED = "_no_grad_trunc_normal_"
_OF_INDEXING = ("aten::scalar_tensor",)  # `parameter[1] = 0.0`
_FRESH = ("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like")


def build_deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredWeights]:
    """Call `make`; the parameters of its model are on the meta device, and the second result has their values.

    Raises CannotDefer, with the reason, when a value is needed while the model is built; and whatever `make` raises,
    which may have the same cause. Random numbers are as before then.
    """
    state = torch.get_rng_state()
    disguise = _Disguise()
    recorder = _Recorder(disguise)
    try:
        with disguise, recorder, replace_registered(recorder.defer), _record_truncation(recorder):
            model = make()
        recorder.finish()
        _require_inside(model, recorder)
        return model, DeferredWeights(model, recorder.tape, recorder.find_region)
    except BaseException:
        torch.set_rng_state(state)
        raise


def copy_when_filled(target: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Copy `values[name]` into a tensor of a model; of one without memory, when it is filled: it is read then."""
    recorder = _find_recorder()
    if recorder is not None and is_meta(target):
        recorder.record_reading(target, values, name)
    else:
        target.copy_(values[name])


@contextmanager
def pause_recording() -> Iterator[None]:
    """Within, code that `build_deferred` has called builds other models in memory, as outside of it.

    The generator is afterwards as it was before.
    """
    recorder = _find_recorder()
    with torch.random.fork_rng(devices=()):
        if recorder is None:
            yield
            return
        with torch.utils._python_dispatch._disable_current_modes(), recorder.disguise.pause():
            yield


def _find_recorder() -> _Recorder | None:
    """Of this thread."""
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return next((each for each in stack if isinstance(each, _Recorder)), None)


class _Recorder(TorchDispatchMode):
    """Runs operations on meta tensors on the meta device, and records them."""

    def __init__(self, disguise: _Disguise) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self.disguise = Tape(), disguise
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # of meta tensors, kept so that none is reused
        self._fresh: dict[int, torch.UntypedStorage] = {}  # of real tensors that nothing has been written to
        self._unwritten: dict[int, StorageWeakRef] = {}  # of parameters that had no value yet
        self._undrawn = 0  # the first call whose random numbers the generator has not given yet
        self._follows = False  # whether no real operation has drawn since then
        self._known: Tensor | None = None  # the generator's state, as it was left
        self._problem: CannotDefer | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with self.disguise.pause():
                return self._run(func, args, kwargs or {})
        except CannotDefer as error:  # the model's code may go on in another way
            self._problem = self._problem or error
            raise

    def _run(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if kwargs.get("device") == _META and func._schema.name not in _OF_INDEXING:
            raise CannotDefer("the model's own code builds on the meta device")
        if kwargs.get("device") == _META or any(is_meta(each) for each in tensors):
            return self._record(func, args, kwargs)
        for number in [] if func.is_view else [each.untyped_storage()._cdata for each in tensors]:
            self._fresh.pop(number, None)
            if number in self._unwritten and not self._unwritten.pop(number).expired():
                raise CannotDefer("a tensor in the memory of a parameter was changed after the parameter was made")
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            if self._follows:  # the generator gives the numbers of the recorded calls before it gives the next ones
                with torch.utils._python_dispatch._disable_current_modes():
                    self._require_generator()
                    self.tape.draw(self._undrawn)
            self._follows = False
        result = func(*args, **kwargs)
        if func._schema.name in _FRESH:
            storage = result.untyped_storage()
            self._fresh[storage._cdata] = storage
        return result

    def defer(self, parameter: nn.Parameter) -> None:
        """Move a real parameter to the meta device, as the object that it is; its value so far goes to the tape."""
        if _find_recorder() is None:  # paused
            return
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            raise CannotDefer(f"a parameter is a {type(parameter).__name__} on {parameter.layout}")
        if has_hooks(parameter):
            raise CannotDefer("a parameter has a hook")
        with torch.utils._python_dispatch._disable_current_modes(), self.disguise.pause():
            other = nn.Parameter(torch.empty_like(parameter, device=_META), parameter.requires_grad)
        other.__dict__.update(parameter.__dict__)
        index, number = self._add(other), parameter.untyped_storage()._cdata
        is_fresh = self._fresh.pop(number, None) is not None
        if is_fresh:
            self._unwritten[number] = StorageWeakRef(parameter.untyped_storage())
        try:
            torch.utils.swap_tensors(parameter, other)
        except RuntimeError as error:
            raise CannotDefer(f"a parameter is used elsewhere, too ({error})") from error
        if not is_fresh:
            with torch.utils._python_dispatch._disable_current_modes():
                self.tape.constants[index] = self.tape.record_version(other)

    def find_region(self, tensor: Tensor) -> Region | None:
        """The region of a meta tensor; None for one that no operation has given a value."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else _describe(tensor, known[1])

    def _add(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        index = self.tape.add_storage(storage.nbytes())
        self._storages[storage._cdata] = (storage, index)
        return index

    def _record(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        for value in _iter_written(func, args, kwargs):
            if isinstance(value, Tensor) and not is_meta(value):
                raise CannotDefer(f"{func} writes a parameter's value into another tensor")
        if kwargs.get("generator") is not None:
            raise CannotDefer(f"{func} draws from a generator of its own")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        try:
            result = func(*tree_map_only(Tensor, _to_meta, args), **tree_map_only(Tensor, _to_meta, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            raise CannotDefer(f"{func} needs a parameter's value, or does not fit it ({error})") from error
        if not all(isinstance(each, Tensor) for each in _as_tuple(result)):
            raise CannotDefer(f"{func} needs a parameter's value")
        if not func.is_view:
            self._append(func, args, kwargs, result)
        return result

    def record_function(self, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Record a function that overwrites `tensor` by random numbers, as one call."""
        region = self.find_region(tensor)
        if region is None or region.num_bytes != self.tape.sizes[region.storage] or kwargs.get("generator") is not None:
            raise CannotDefer(f"{func.__name__} fills a part of a parameter, or draws from a generator of its own")
        self._add_call(func, (region, *args), kwargs, set(), {region.storage}, [], is_random=True)

    def record_reading(self, target: Tensor, values: Mapping[str, Tensor], name: str) -> None:
        """Record that `target` becomes `values[name]`, which is read at the replay."""
        region = self.find_region(target)
        assert region is not None

        def read(part: Tensor, name: str) -> None:
            part.copy_(self.tape.read(values, name))

        storages = {region.storage}
        is_full = region.num_bytes == self.tape.sizes[region.storage]
        self._add_call(read, (region, name), {}, set() if is_full else storages, storages, [], is_random=False)

    def _append(self, func: OpOverload, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        reads, writes = set[int](), set[int]()

        def locate(tensor: Tensor) -> Region | Tensor:
            if not is_meta(tensor):
                return self.tape.record_version(tensor)
            region = self.find_region(tensor)
            if region is None:
                raise CannotDefer(f"{func} reads a tensor without a value")
            reads.add(region.storage)
            return region

        args = tree_map_only(Tensor, locate, args)
        kwargs = {name: _CPU if name == "device" else value for name, value in kwargs.items()}
        kwargs = tree_map_only(Tensor, locate, kwargs)
        for value in _iter_written(func, args, kwargs):
            if isinstance(value, Region):
                writes.add(value.storage)
                regions = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Region)]
                is_alone = all(each is value or each.storage != value.storage for each in regions)
                if self.tape.overwrites(func, value) and is_alone:
                    reads.discard(value.storage)
        new = []
        for index, output in enumerate(_as_tuple(found)):
            if isinstance(output, Tensor) and self.find_region(output) is None:
                new.append((index, _describe(output, self._add(output))))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self._add_call(func, args, kwargs, reads, writes, new, is_random=is_random)

    def _add_call(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        reads: set[int],
        writes: set[int],
        new: list[tuple[int, Region]],
        *,
        is_random: bool,
    ) -> None:
        state = None
        if is_random and self._follows:
            self._require_generator()
        elif is_random:
            with torch.utils._python_dispatch._disable_current_modes():
                state = torch.get_rng_state()
                self._follows = True
                self._undrawn = len(self.tape.calls)
                torch.rand(1)  # so that a seed shows, even the same one
                self._known = torch.get_rng_state()
        call = Call(func, tuple(args), kwargs, frozenset(reads), frozenset(writes), tuple(new), is_random, state)
        self.tape.calls.append(call)

    def finish(self) -> None:
        """Raises CannotDefer for what the record does not have. The generator is where the replay begins."""
        if self._problem is not None:
            raise self._problem
        self.tape.require_constants()
        if self._follows:
            self._require_generator()
            first = self.tape.calls[self._undrawn].state
            assert first is not None
            torch.set_rng_state(first)
        else:
            self.tape.end_state = torch.get_rng_state()

    def _require_generator(self) -> None:
        """Raises CannotDefer when the generator was seeded, or set, since the calls that it has not drawn for."""
        if self._known is None or not torch.equal(torch.get_rng_state(), self._known):
            raise CannotDefer("the generator was seeded while the model was built")

    def is_known(self, tensor: Tensor) -> bool:
        """Whether it has a value on the tape."""
        return tensor.untyped_storage()._cdata in self._storages


@contextmanager
def _record_truncation(recorder: _Recorder) -> Iterator[None]:
    """`trunc_normal_` draws again until all numbers are in range: recorded as one call."""
    plain = getattr(nn.init, _TRUNCATED, None)

    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert plain is not None
        if not is_meta(tensor):
            return plain(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        recorder.record_function(plain, tensor, *args, **kwargs)
        return tensor

    if plain is not None:
        setattr(nn.init, _TRUNCATED, draw)
    try:
        yield
    finally:
        if plain is not None:
            setattr(nn.init, _TRUNCATED, plain)


_get_device = torch._C.TensorBase.device.__get__


class _Disguise:
    """Within, a tensor on the meta device says that it is on the CPU: `nn.init` leaves out what says that it is not."""

    def __init__(self) -> None:
        self._is_on = True

    def __enter__(self) -> None:
        def get_device(tensor: Tensor) -> torch.device:
            if self._is_on and is_meta(tensor):
                return _CPU
            result: torch.device = _get_device(tensor)
            return result

        Tensor.device = property(get_device)  # type: ignore[assignment]
        Tensor.is_meta = property(lambda tensor: get_device(tensor) == _META)  # type: ignore[assignment]
        Tensor.is_cpu = property(lambda tensor: get_device(tensor) == _CPU)  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        for name in ("device", "is_meta", "is_cpu"):
            delattr(Tensor, name)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within, for torch's own code, it says where it is."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before


def _require_inside(model: nn.Module, recorder: _Recorder) -> None:
    """Raises CannotDefer when a tensor without memory is used outside the model: nothing would ever fill it."""
    own = {id(each) for each in [*model.parameters(), *model.buffers()]}

    def is_stray(each: object) -> bool:
        is_tensor = type(each) in (Tensor, nn.Parameter)
        return is_tensor and id(each) not in own and is_meta(each) and recorder.is_known(each)  # type: ignore[arg-type]

    if any(map(is_stray, gc.get_objects())):
        gc.collect()  # what is left of modules that were given up
        if any(map(is_stray, gc.get_objects())):
            raise CannotDefer("a tensor of the model is used outside of it")
    if is_used_elsewhere(model):
        raise CannotDefer("a parameter is in a list or an object, too")


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor if is_meta(tensor) else tensor.to(_META)


def _describe(tensor: Tensor, storage: int) -> Region:
    return Region(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _iter_written(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation changes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)
