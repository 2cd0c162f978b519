"""The numbers of many members of one architecture: one row a member in a few flat buffers.

Owns the layout: which columns of a row belong to which parameter, and views of them by name. An update is then a
handful of kernels over all members, and one member's numbers over another's is a copy of rows. Called by Population,
its engines and the row optimizer. Never computes anything.
Legend: K members, P numbers in a member's parameters, Q in its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, SpecMismatch

CUDA_ALIGNMENT_BYTES = 64  # kernels of convolutions read 16 bytes at once, and fail where a tensor begins between them


class RowLayout:
    """Where each tensor of a model lies in a row.

    Parameters with four dimensions lie as channels last, the order that convolutions on a CPU prefer. Tensors that do
    not train lie among the buffers. Two names of one tensor (tied weights) share their columns. On a CUDA device each
    tensor begins at a multiple of CUDA_ALIGNMENT_BYTES; the columns between them are zeros. Raises ConfigError for a
    model without parameters, of more than one floating type, or with buffers that are neither floats nor int64.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        others = {**frozen, **dict(model.named_buffers())}
        if not trained:
            raise ConfigError("model", type(model).__name__, "has no parameters to train")
        self.dtype = next(iter(trained.values())).dtype
        counters = {name: each for name, each in others.items() if each.dtype == torch.int64}
        floats = {name: each for name, each in others.items() if name not in counters}
        for name, each in {**trained, **floats}.items():
            if each.dtype != self.dtype or not each.is_floating_point():
                problem = f"{name} is {each.dtype}, other tensors are {self.dtype}"
                raise ConfigError("model", type(model).__name__, problem, "members are rows of one type: convert it")
        self.parameters = {name: each.shape for name, each in trained.items()}
        self.buffers = {name: each.shape for name, each in floats.items()}
        self.counters = {name: each.shape for name, each in counters.items()}
        alignment = 1
        if device is not None and device.type == "cuda":
            alignment = CUDA_ALIGNMENT_BYTES // self.dtype.itemsize
        self.weight_columns = _Columns(self.parameters, alignment)
        self.buffer_columns = _Columns(self.buffers, alignment)
        self.counter_columns = _Columns(self.counters, alignment)
        firsts = {id(each): name for name, each in [*model.named_parameters(), *model.named_buffers()]}
        tensors = model.state_dict(keep_vars=True)
        self.saved = {name: firsts[id(each)] for name, each in tensors.items() if isinstance(each, Tensor)}

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.weight_columns.count

    def row_bytes(self, num_slots: int) -> int:
        """The memory of one member with its gradients and the optimizer's slots."""
        floats = self.num_parameters * (2 + num_slots) + self.buffer_columns.count
        return floats * self.dtype.itemsize + self.counter_columns.count * 8 + 4


class _Columns:
    """Where tensors of some shapes lie in a row of `count` numbers: each begins at a multiple of `alignment`."""

    def __init__(self, shapes: Mapping[str, torch.Size], alignment: int) -> None:
        self._starts: dict[str, int] = {}
        self._shapes, self.count = shapes, 0
        for name, shape in shapes.items():
            self._starts[name] = self.count
            self.count += -(-shape.numel() // alignment) * alignment
        self.num_packed = sum(shape.numel() for shape in shapes.values())

    def view(self, rows: Tensor) -> dict[str, Tensor]:
        """Views [K, *shape] of the columns of [K, count], by name."""
        views = {}
        for name, shape in self._shapes.items():
            columns = rows[:, self._starts[name] : self._starts[name] + shape.numel()]
            if len(shape) == 4:
                channels_last = (shape[0], shape[2], shape[3], shape[1])
                views[name] = columns.unflatten(1, channels_last).permute(0, 1, 4, 2, 3)
            else:
                views[name] = columns.view(len(rows), *shape)
        return views

    def pack(self, rows: Tensor) -> Tensor:
        """The rows without the columns between tensors, in host memory; `rows` itself where there are none."""
        if self.count == self.num_packed:
            return rows
        parts = [rows[:, start : start + self._shapes[name].numel()].cpu() for name, start in self._starts.items()]
        return torch.cat(parts, dim=1)

    def unpack(self, packed: Tensor, rows: Tensor) -> None:
        """Copy what `pack` returned into rows."""
        at = 0
        for name, start in self._starts.items():
            size = self._shapes[name].numel()
            rows[:, start : start + size].copy_(packed[:, at : at + size])
            at += size


class MemberRows:
    """Weights, gradients, optimizer slots, buffers and counters of K members.

    weights, gradients:     [K, P]
    slots:                  {name: [K, P]} of the optimizer
    has_gradients:          False for rows that are only stored: their gradients take no memory
    steps:                  [K], the updates that each member has taken, as the optimizer counts them
    buffer_rows:            [K, Q] floats that are not trained, such as the running means of batch normalisation
    counter_rows:           int64 [K, *]
    parameters, gradient_views, buffers: {name: [K, *shape]}, views of these; `buffers` has the counters too
    """

    def __init__(
        self,
        layout: RowLayout,
        num_members: int,
        slots: Iterable[str] = (),
        device: torch.device | str = "cpu",
        *,
        has_gradients: bool = True,
        is_pinned: bool = False,
    ) -> None:
        def zeros(columns: int, dtype: torch.dtype = layout.dtype) -> Tensor:
            return torch.zeros(num_members, columns, dtype=dtype, device=device, pin_memory=is_pinned)

        size = layout.num_parameters
        gradients = zeros(size) if has_gradients else torch.zeros(1, 1, dtype=layout.dtype).expand(num_members, size)
        named = {name: zeros(size) for name in slots}
        steps = zeros(1, torch.float32).squeeze(1)
        buffers, counters = zeros(layout.buffer_columns.count), zeros(layout.counter_columns.count, torch.int64)
        self._set(layout, zeros(size), gradients, named, steps, buffers, counters)

    def _set(
        self,
        layout: RowLayout,
        weights: Tensor,
        gradients: Tensor,
        slots: dict[str, Tensor],
        steps: Tensor,
        buffer_rows: Tensor,
        counter_rows: Tensor,
    ) -> None:
        self.layout = layout
        self.weights = weights
        self.gradients = gradients
        self.slots = slots
        self.steps = steps
        self.buffer_rows, self.counter_rows = buffer_rows, counter_rows
        self.parameters = layout.weight_columns.view(weights)
        self.gradient_views = layout.weight_columns.view(gradients)
        self.buffers = layout.buffer_columns.view(buffer_rows) | layout.counter_columns.view(counter_rows)
        copied = [each for each in self.state().values() if each.numel()]  # a copy of nothing costs microseconds
        self._copied: list[Any] = copied
        if weights.device.type == "cpu":
            # Of torch's threads one may wait for a core: 44 ms instead of 0.04 on a busy machine. NumPy has one thread.
            self._copied = [each.view(len(each), -1).view(torch.uint8).numpy() for each in copied]

    def __len__(self) -> int:
        return len(self.weights)

    def narrow(self, start: int, length: int) -> Self:
        """The rows from `start`, in the same memory. Autograd does not see changes of other rows."""
        # views of `.data` have a version counter of their own
        return self._map(lambda tensor: tensor.data[start : start + length])

    def clone(self, device: torch.device | None = None) -> Self:
        """The same numbers in memory of their own, on a device."""
        return self._map(lambda tensor: tensor.to(device or tensor.device, copy=True))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Rows of each tensor changed."""
        rows = type(self).__new__(type(self))
        slots = {name: change(slot) for name, slot in self.slots.items()}
        tensors = (change(self.buffer_rows), change(self.counter_rows))
        rows._set(self.layout, change(self.weights), change(self.gradients), slots, change(self.steps), *tensors)
        return rows

    def packed_state(self) -> dict[str, Tensor]:
        """`state`, the same on every device: without the columns between tensors. In the same memory where there are
        none."""
        return {
            name: self._columns_of(name).pack(rows) if rows.ndim == 2 else rows for name, rows in self.state().items()
        }

    def load_packed_state(self, state: Mapping[str, Tensor]) -> None:
        """Everything from what `packed_state` returned. Raises SpecMismatch for rows of other shapes."""
        for name, rows in self.state().items():
            saved = state.get(name)
            shape = [len(rows), self._columns_of(name).num_packed] if rows.ndim == 2 else list(rows.shape)
            if saved is None or list(saved.shape) != shape:
                saved_shape = None if saved is None else list(saved.shape)
                raise SpecMismatch(f"population.{name}", saved_shape, f"the population has {shape}")
        for name, rows in self.state().items():
            self._columns_of(name).unpack(state[name], rows) if rows.ndim == 2 else rows.copy_(state[name])

    def _columns_of(self, name: str) -> _Columns:
        others = {"buffers": self.layout.buffer_columns, "counters": self.layout.counter_columns}
        return others.get(name, self.layout.weight_columns)

    def state(self) -> dict[str, Tensor]:
        """Every tensor but the gradients, in the same memory: what a member is copied and moved as."""
        others = {"steps": self.steps, "buffers": self.buffer_rows, "counters": self.counter_rows}
        return {"weights": self.weights, **{f"slot.{name}": slot for name, slot in self.slots.items()}, **others}

    def copy(self, source: int, destination: int) -> None:
        """Everything of one member but its gradients over another's."""
        for rows in self._copied:
            rows[destination] = rows[source]

    def copy_from(self, other: MemberRows) -> None:
        """Everything of as many members of other rows but their gradients."""
        for rows, source in zip(self.state().values(), other.state().values(), strict=True):
            rows.copy_(source)

    def swap(self, one: int, other: int) -> None:
        """Two members exchange their rows, but for gradients."""
        for rows in self.state().values():
            rows[[one, other]] = rows[[other, one]]

    def state_dict(self, row: int) -> dict[str, Tensor]:
        """A member as an ordinary state dict of the model: copies, on the rows' device."""
        tensors = self.parameters | self.buffers
        saved = self.layout.saved.items()
        return {name: tensors[first][row].clone(memory_format=torch.contiguous_format) for name, first in saved}

    def load_state_dict(self, row: int, state: Mapping[str, Tensor]) -> None:
        """Weights and buffers of a member from a state dict of the model. The optimizer starts afresh.

        Raises SpecMismatch for other names or shapes.
        """
        saved = self.layout.saved
        if state.keys() != saved.keys():
            problem = f"missing {sorted(saved.keys() - state.keys())}, unexpected {sorted(state.keys() - saved.keys())}"
            raise SpecMismatch("state_dict", sorted(state), problem)
        tensors = self.parameters | self.buffers
        for name, first in saved.items():
            if state[name].shape != tensors[first].shape[1:]:
                problem = f"{name} is {list(state[name].shape)}, the member's is {list(tensors[first].shape[1:])}"
                raise SpecMismatch("state_dict", name, problem)
        with torch.no_grad():
            for name, first in saved.items():
                tensors[first][row].copy_(state[name])
        for slot in (*self.slots.values(), self.steps):
            slot[row].zero_()

    def load_model(self, row: int, model: nn.Module) -> None:
        """A member from a model, buffers that are not saved included. The optimizer starts afresh."""
        self.load_state_dict(row, model.state_dict())
        with torch.no_grad():
            for name, value in model.named_buffers():
                self.buffers[name][row].copy_(value)
