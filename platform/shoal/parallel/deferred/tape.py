"""The operations that give parameters on the meta device their values: recorded, and replayed one tensor at a time.

A tensor is known by its storage and its region there, so that views, `.data` and deep copies need no record of their
own. Recorded by `build`, replayed by `weights`. Knows no module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from shoal.parallel.state.state_dict import sum_in_double

NUM_SAMPLED = 1024
Sink = Callable[[Tensor], None]
_DRAWN = ("normal", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal", "bernoulli")
_OVERWRITING = frozenset(
    f"aten::{name}_" for name in (*_DRAWN, "zero", "fill", "copy")
)  # they do not read their tensor


class CannotDefer(RuntimeError):
    """The construction needs a value that does not exist yet."""


@dataclass(frozen=True)
class Region:
    """A tensor within a storage of the tape."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor here, in a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def allocate(self) -> Tensor:
        """A tensor of its geometry, with a storage of its own."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.size).numel()


@dataclass
class Call:
    """One operation. Its tensors are Regions, or real ones as they were when it was recorded.

    reads, writes: storages; a fully overwritten one is not read
    new:    (index among the outputs, region): outputs with a storage of their own
    state:  of the generator, where it does not follow from the earlier calls
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    new: tuple[tuple[int, Region], ...]
    is_random: bool
    state: Tensor | None = None

    @property
    def only_draws(self) -> bool:
        """Whether it can be run for its random numbers alone: it writes one tensor, and reads none."""
        return self.is_random and not self.reads and len(self.writes) == 1


@dataclass
class Tape:
    """All calls, and the number of bytes of each storage.

    constants: the real values that storages began with
    end_state: of the generator after the construction, unless the last call leads there
    sampled:   by name, the sum of some numbers of each value that a replay has read instead of drawn
    """

    calls: list[Call] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    end_state: Tensor | None = None
    sampled: dict[str, str] = field(default_factory=dict)
    _spare: torch.UntypedStorage | None = None
    _versions: list[tuple[Tensor, str]] = field(default_factory=list)  # real tensors, and what they were like

    def add_storage(self, num_bytes: int) -> int:
        self.sizes.append(num_bytes)
        return len(self.sizes) - 1

    def record_version(self, tensor: Tensor) -> Tensor:
        """A real tensor, for the replay."""
        self._versions.append((tensor, _fingerprint(tensor)))
        return tensor

    def require_constants(self) -> None:
        """Raises CannotDefer when a real tensor has changed after its use."""
        if any(_fingerprint(tensor) != before for tensor, before in self._versions):
            raise CannotDefer("a tensor that parameters were filled from was changed afterwards")

    def read(self, values: Mapping[str, Tensor], name: str) -> Tensor:
        """A value that is read, which is sampled."""
        value = values[name]
        some = value.reshape(-1)[:: max(1, value.numel() // NUM_SAMPLED)]
        self.sampled[name] = repr(sum_in_double(some))
        return value

    def overwrites(self, func: OpOverload, region: Region) -> bool:
        """Whether the in-place operation leaves nothing of the storage's earlier content."""
        return func._schema.name in _OVERWRITING and region.num_bytes == self.sizes[region.storage]

    # -- replay

    def replay(self, targets: Mapping[int, Sink], *, keeps_rng: bool = True) -> None:
        """Compute the storages `targets`, and give each to its sink as bytes as soon as it is final, then free it.

        Random numbers are those of the recorded construction, and the generator is left as it would have left it;
        without `keeps_rng`, numbers that no target needs are not drawn.
        """
        plan = self._plan(targets, keeps_rng)
        last_use = dict.fromkeys(targets, -1)
        for index, (call, is_live) in enumerate(zip(self.calls, plan, strict=True)):
            if is_live:
                used = call.reads | call.writes | {region.storage for _, region in call.new}
                last_use |= dict.fromkeys(used, index)
        due: dict[int, list[int]] = {}
        for storage, at in last_use.items():
            due.setdefault(at, []).append(storage)
        live: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            self._release(due.get(-1, ()), live, targets)
            for index, (call, is_live) in enumerate(zip(self.calls, plan, strict=True)):
                if is_live is not None:
                    self._run(call, live, is_live)
                    self._release(due.get(index, ()), live, targets)
        self._spare = None
        if keeps_rng and self.end_state is not None:
            torch.set_rng_state(self.end_state)

    def _plan(self, targets: Iterable[int], keeps_rng: bool) -> list[bool | None]:
        """For each call: True to run it, False to draw its random numbers only, None to skip it."""
        plan: list[bool | None] = [None] * len(self.calls)
        needed, draws = set(targets), keeps_rng
        for index in range(len(self.calls) - 1, -1, -1):
            call = self.calls[index]
            created = {region.storage for _, region in call.new}
            is_live = bool((call.writes | created) & needed)
            if is_live or (call.is_random and draws and not call.only_draws):
                plan[index] = True
                needed -= created
                needed -= call.writes - call.reads
                needed |= call.reads
            elif call.is_random and draws:
                plan[index] = False
            draws = (draws or (is_live and call.is_random)) and (keeps_rng or call.state is None)
        return plan

    def _release(
        self, storages: Iterable[int], live: dict[int, torch.UntypedStorage], targets: Mapping[int, Sink]
    ) -> None:
        for storage in storages:
            if storage in targets:
                targets[storage](torch.empty(0, dtype=torch.uint8).set_(self._find(storage, live)))
            self._spare = live.pop(storage, None)

    def _find(self, storage: int, live: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if storage not in live:
            constant = self.constants.get(storage)
            if constant is None:
                live[storage] = self._allocate(self.sizes[storage])
            else:  # laid out as `empty_like` has done it on the meta device
                live[storage] = torch.empty_like(constant).copy_(constant).untyped_storage()
        return live[storage]

    def _allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Memory without a value: that of the last freed storage, if it fits, since fresh pages take time."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and spare.nbytes() == num_bytes else torch.UntypedStorage(num_bytes)

    def _run(self, call: Call, live: dict[int, torch.UntypedStorage], is_live: bool) -> None:
        if call.state is not None:
            torch.set_rng_state(call.state)

        def locate(region: Region) -> Tensor:
            if is_live:
                return region.view(self._find(region.storage, live))
            self._spare = self._allocate(self.sizes[region.storage])  # for random numbers that are overwritten later
            return region.view(self._spare)

        args, kwargs = tree_map_only(Region, locate, (call.args, call.kwargs))
        result = call.func(*args, **kwargs)
        for index, region in call.new if is_live else ():
            output: Tensor = result[index] if isinstance(result, (tuple, list)) else result
            if output.stride() != region.stride:  # the meta device may lay it out otherwise
                output = region.allocate().copy_(output)
            live[region.storage] = output.untyped_storage()

    def draw(self, first: int) -> None:
        """Run the random calls from `first` on for their random numbers alone."""
        for call in self.calls[first:]:
            if call.is_random:
                if not call.only_draws:
                    raise CannotDefer(f"{call.func} draws numbers that depend on a parameter")
                self._run(call, {}, is_live=False)

    # -- comparison

    def digest(self) -> Iterator[str]:
        """A hash of the tape up to each call, equal where the values are."""
        state = hashlib.sha256()
        for call in self.calls:
            described = tree_map_only(
                Tensor,
                lambda each: (each.dtype, tuple(each.shape), repr(sum_in_double(each))),
                (call.args, call.kwargs, call.state),
            )
            state.update(repr((call.func.__name__, described)).encode())
            yield state.hexdigest()


def _fingerprint(tensor: Tensor) -> str:
    """The version alone would miss what is written through `.data` or NumPy."""
    return f"{tensor._version} {sum_in_double(tensor)!r}"
