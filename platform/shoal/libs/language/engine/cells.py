"""Keys and values of slots, and the attention of one forward over them.

Owned by an engine, written by its forwards. A forward computes *packed* tokens: T tokens of several answers in one row,
without padding, so that linear layers see one matrix and weights are read once for prefill and decode. Attention is
computed for each segment over the cells of its own slot. Legend: S slots, L cells of a slot, T packed tokens, R rows
(segments of one token), H heads of queries, K heads of keys, D size of a head.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class TokenSegment(NamedTuple):
    """Tokens that follow the `start` filled cells of a slot. `wants_logits`: of the last one."""

    slot: int
    start: int
    tokens: Sequence[int]
    wants_logits: bool
    adapter: AdapterLayers | None = None


class AdapterLayers(Protocol):
    """Low-rank products by the name of a linear layer."""

    def add_to(self, name: str, x: Tensor, output: Tensor, rows: Tensor, fixed: bool) -> None:
        """Add the adapter's share of `rows` to a layer's output [T, out]; `fixed`: by products over all T."""


class CacheCells:
    """Keys and values [S + 1, L, K, D] of each layer, made when the layer first writes; the last slot takes padding."""

    def __init__(self, num_slots: int, length: int) -> None:
        self.num_slots, self.length = num_slots, length
        self._layers: dict[int, list[Tensor]] = {}

    def write(self, layer: int, cell_numbers: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys [K, T, D] and values of packed tokens into their cells, numbered over all slots; returns the layer's
        cells [S + 1, K, L, D]."""
        pair = key, value
        if layer not in self._layers:  # zeros: cells that a mask hides must be finite
            size = self.num_slots + 1, self.length
            self._layers[layer] = [_make_zeros(each, (*size, each.shape[0], each.shape[2])) for each in pair]
        keys, values = self._layers[layer]
        for cells, each in zip((keys, values), pair, strict=True):
            cells.view(-1, *cells.shape[2:]).index_copy_(0, cell_numbers, each.transpose(0, 1))
        return keys.transpose(1, 2), values.transpose(1, 2)

    @property
    def token_bytes(self) -> int:
        """What a token takes in all layers that have been written."""
        tensors = [cells for pair in self._layers.values() for cells in pair]
        return sum(each.shape[2] * each.shape[3] * each.element_size() for each in tensors)

    def copy(self, source: int, target: int, num_cells: int) -> None:
        """Copy the first cells of a slot to another."""
        for pair in self._layers.values():
            for cells in pair:
                cells[target, :num_cells] = cells[source, :num_cells]


def _make_zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of the type of `like`. On a processor they take memory once they are written: few texts are as long as a
    slot, and SmolLM2's context in sixteen slots would be 6 GB."""
    if like.device.type != "cpu":
        return like.new_zeros(*shape)
    memory = mmap.mmap(-1, math.prod(shape) * like.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(*shape)


class Work:
    """The packed tokens of one forward.

    ids, positions, slots, cell_numbers: int64 [T], `cell_numbers` over all slots; segments of one token come first
    wanted:                indices of the tokens that need logits, in the order of `segments`
    is_fixed:              each row attends alone, over its own cells only: its bits do not depend on other slots
    num_padded:            at least so many tokens; those that pad write into the last slot
    """

    def __init__(
        self,
        cells: CacheCells,
        segments: Sequence[TokenSegment],
        device: torch.device,
        is_fixed: bool = False,
        num_padded: int = 0,
    ) -> None:
        # Fixed logits are of all rows, so those that are wanted come first.
        self.segments = sorted(
            segments, key=lambda each: (len(each.tokens) > 1, is_fixed and not each.wants_logits, each.slot)
        )
        self.num_rows = sum(len(each.tokens) == 1 for each in self.segments)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for each in self.segments:
            ids += each.tokens
            positions += range(each.start, each.start + len(each.tokens))
            slots += [each.slot] * len(each.tokens)
        self.num_tokens, self.is_fixed = len(ids), is_fixed
        padding = max(0, num_padded - len(ids))
        padded = [ids + [0] * padding, positions + [0] * padding, slots + [cells.num_slots] * padding]
        padded.append([slot * cells.length + position for position, slot in zip(*padded[1:], strict=True)])
        self.ids, self.positions, self.slots, self.cell_numbers = torch.tensor(padded, device=device)
        self._has_padding = padding > 0
        ends, end = [], -1
        for each in self.segments:
            end += len(each.tokens)
            ends.append(end)
        self.ends = ends
        last = [at for at, each in zip(ends, self.segments, strict=True) if each.wants_logits]
        self.wanted = torch.tensor(last, dtype=torch.int64, device=device)
        self._cells, self._masks = cells, dict[tuple[int, int | None], Tensor]()
        top = 1 + max((each.slot for each in self.segments[: self.num_rows]), default=-1)
        self._span = 1 + max((each.start for each in self.segments[: self.num_rows]), default=-1)
        self._top = top if not is_fixed and 2 * self.num_rows > top else 0  # else most of such a batch would be holes
        self.adapters = self._group_adapters(device)

    def _group_adapters(self, device: torch.device) -> list[tuple[AdapterLayers, Tensor]]:
        rows: dict[int, tuple[AdapterLayers, list[int]]] = {}
        for end, each in zip(self.ends, self.segments, strict=True):
            if each.adapter is not None:
                known = rows.setdefault(id(each.adapter), (each.adapter, []))
                known[1].extend(range(end + 1 - len(each.tokens), end + 1))
        return [(adapter, torch.tensor(indices, device=device)) for adapter, indices in rows.values()]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Queries [H, T, D], and the keys and values [K, T, D] of the same tokens, to outputs [T, H, D].

        window: how many cells a token sees, itself included; None: all of its slot
        """
        keys, values = self._cells.write(layer, self.cell_numbers, key, value)
        first = self.num_rows if self._top else 0
        attended = self._attend_rows(query[:, :first], keys, values, scale, window) if first else None
        if attended is not None and first == query.shape[1]:
            return attended
        make = query.new_zeros if self._has_padding else query.new_empty
        mixed = make(query.shape[1], query.shape[0], value.shape[2])
        if attended is not None:
            mixed[:first] = attended
        for number in range(first, len(self.segments)):
            each, end = self.segments[number], self.ends[number] + 1
            begin, last = end - len(each.tokens), each.start + len(each.tokens)
            low = 0 if window is None else max(0, each.start + 1 - window)
            few = keys[each.slot, :, low:last], values[each.slot, :, low:last]
            groups = query.shape[0] // key.shape[0]
            mask = None if end - begin == 1 else self._mask_segment(number, low, groups, window, query.dtype)
            grouped = query[:, begin:end].unflatten(0, (-1, groups)).flatten(1, 2)  # [K, H / K * n, D]
            found = scaled_dot_product_attention(grouped[None], few[0][None], few[1][None], mask, scale=scale)[0]
            mixed[begin:end] = found.unflatten(1, (groups, -1)).flatten(0, 1).transpose(0, 1)
        return mixed

    def _attend_rows(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """All rows at once, over the first slots; a slot without a row attends to its first cell, for nothing."""
        top = self._top
        rows = self.slots[: self.num_rows]
        span = self._span
        if (mask := self._masks.get((-1, window))) is None:
            at = torch.zeros(top, dtype=torch.int64, device=rows.device)
            at[rows] = self.positions[: self.num_rows]
            cell = torch.arange(span, device=rows.device)
            mask = self._masks[-1, window] = _make_mask(cell, at[:, None], window, query.dtype)[:, None, None]
        spread = query.transpose(0, 1)
        if top > self.num_rows:
            spread = query.new_zeros(top, *spread.shape[1:]).index_copy_(0, rows, spread)
        grouped = spread.unflatten(1, (keys.shape[1], -1))  # [S, K, H / K, D]
        output = scaled_dot_product_attention(grouped, keys[:top, :, :span], values[:top, :, :span], mask, scale=scale)
        return output.flatten(1, 2)[rows] if top > self.num_rows else output.flatten(1, 2)

    def _mask_segment(self, number: int, low: int, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        if (mask := self._masks.get((number, window))) is None:
            each = self.segments[number]
            last = each.start + len(each.tokens)
            cell = torch.arange(low, last, device=self.ids.device)
            at = torch.arange(each.start, last, device=self.ids.device)[:, None]
            mask = self._masks[number, window] = _make_mask(cell, at, window, dtype).repeat(groups, 1)
        return mask


def _make_mask(cell: Tensor, at: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to scores of queries `at` [T, 1]; a mask of bools would be made into one in each layer."""
    hidden = cell > at
    if window is not None:
        hidden |= cell <= at - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


class _Active(threading.local):
    work: Work | None = None


ACTIVE = _Active()
"""The work of the forward that this thread computes: what attention inside of a foreign module asks for."""
