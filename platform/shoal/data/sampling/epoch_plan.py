"""The two ways to iterate a dataset: the requests to its reader, and the compatibility of saved states.

Called by the loader. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from shoal.data.readers.iterable_reader import PlainReader, StreamReader
from shoal.data.readers.map_reader import EpochEnd, ReadBatch
from shoal.data.sampling.sampler import PREVIOUS_EPOCH, MapOrder, MapRequest, StreamRequest
from shoal.errors import DataError, SpecMismatch

State = dict[str, Any]
_RESUME_REMEDY = "resume with what the run began with"


class EpochPlan(Protocol):
    """A way through a dataset, epoch after epoch."""

    is_per_rank: bool  # whether each rank has its own state
    num_batches: int | None

    def is_over(self, position: int) -> bool:
        """Whether the epoch is known beforehand to have no batch at this position."""
        ...

    def iter_requests(self, epoch: int, position: int) -> Iterator[Any]:
        """The requests from there on, without end."""
        ...

    def advance(self, position: int, num_global: int) -> int:
        """The position after a batch of so many samples."""
        ...

    def worker_index(self, position: int) -> int:
        """The index of the first worker."""
        ...

    def on_batch_delivered(self, batch: ReadBatch, position: int) -> None:
        """Called when the batch at `position` was yielded."""
        ...

    def on_epoch_end(self, end: EpochEnd, position: int) -> None:
        """Called when the epoch ended at `position`. Raises DataError when that is too early."""
        ...

    def reset(self) -> None:
        """Called when the position changes: drop stored states."""
        ...

    def state_dict(self) -> State:
        """The state, in addition to epoch and position, for a resume."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore `state`. Raises SpecMismatch."""
        ...


class MapEpochPlan:
    """Through a map-style dataset: the position is the whole state."""

    is_per_rank = False

    def __init__(self, order: MapOrder) -> None:
        self._order = order
        self.num_batches: int | None = order.num_batches

    def is_over(self, position: int) -> bool:
        return not self._order.num_global(position)

    def iter_requests(self, epoch: int, position: int) -> Iterator[MapRequest]:
        """Continues into the next epochs, so that workers prefetch across their borders too."""
        while True:
            request = self._order.make_request(epoch, position)
            if request is None:
                epoch, position = epoch + 1, 0
            else:
                yield request
                position = self.advance(position, request.num_global)

    def advance(self, position: int, num_global: int) -> int:
        order = self._order.order
        return position + (num_global if order is None or not order.gives_batches else self._order.batch_size)

    def worker_index(self, position: int) -> int:
        return 0

    def on_batch_delivered(self, batch: ReadBatch, position: int) -> None:
        """Nothing to store."""

    def on_epoch_end(self, end: EpochEnd, position: int) -> None:
        """Known beforehand."""

    def reset(self) -> None:
        """Nothing is stored."""

    def state_dict(self) -> State:
        order = self._order
        state = {"kind": "map", "num_samples": order.num_samples, "shuffle": order.shuffle, "seed": order.seed}
        return state if order.order is None else {**state, "sampler": order.order.name}

    def load_state_dict(self, state: State) -> None:
        check_equal(self.state_dict(), state, "samples would repeat or be missed")


class StreamEpochPlan:
    """Through an iterable, which may have its own state."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self.is_per_rank = not reader.is_replicated
        self.num_batches: int | None = None
        self._states: list[Any] = self._make_empty_states()
        self._has_finished = False  # an epoch with batches
        self._end_states: list[Any] = []  # at the end of the previous epoch; until the next one's first batch

    def _make_empty_states(self) -> list[Any]:
        return [None] * (1 if self._reader.is_replicated else self._reader.stride)

    def is_over(self, position: int) -> bool:
        return False

    def iter_requests(self, epoch: int, position: int) -> Iterator[StreamRequest]:
        reader = self._reader
        for step in range(reader.stride):
            at = position + step * reader.batch_size
            state = self._states[self._get_state_index(at)]
            yield StreamRequest(epoch, at, True, None if state is None else tuple(state))
        position += reader.stride * reader.batch_size
        while True:
            yield StreamRequest(epoch, position, False, None)
            position += reader.batch_size

    def advance(self, position: int, num_global: int) -> int:
        return position + num_global

    def worker_index(self, position: int) -> int:
        return position // self._reader.batch_size

    def _get_state_index(self, position: int) -> int:
        return self.worker_index(position) % len(self._states)

    def on_batch_delivered(self, batch: ReadBatch, position: int) -> None:
        self._states[self._get_state_index(position)] = batch.state
        self._end_states = []

    def on_epoch_end(self, end: EpochEnd, position: int) -> None:
        if not position:
            name, size = type(self._reader.source).__name__, self._reader.batch_size
            if not end.num_items and self._has_finished:
                remedy = "let its __iter__ begin anew each time"
                raise DataError("data", name, "yields nothing after its first epoch: its iterator is spent", remedy)
            if not end.num_items:
                raise DataError("data", name, "is empty: it has yielded nothing")
            problem = f"yields {end.num_items} samples, too few for one batch of {size}"
            raise DataError("data", name, problem, "lower batch_size")
        states = self._states
        self._has_finished = True
        self.reset()
        if self._reader.has_epoch_state and states[0] is not None:
            self._end_states = [(PREVIOUS_EPOCH, state) for _, state in states]

    def reset(self) -> None:
        self._states, self._end_states = self._make_empty_states(), []

    def state_dict(self) -> State:
        reader = self._reader
        state: State = {"kind": type(reader).__name__, "seed": reader.seed}
        if self.is_per_rank:
            divided = {"batch_size": reader.batch_size, "data_ranks": reader.share.size, "workers": reader.stride}
            state |= {**divided, "rank": reader.share.rank}
        return {**state, "states": list(self._end_states or self._states)}

    def load_state_dict(self, state: State) -> None:
        mine = {name: value for name, value in self.state_dict().items() if name != "states"}
        why = "each rank and worker reads a part of its own, whose place says nothing of another division"
        check_equal(mine, state, why if self.is_per_rank else "samples would repeat or be missed")
        self._states, self._end_states = list(state["states"]), []


def check_equal(mine: State, state: State, why: str) -> None:
    """Raises SpecMismatch for the first value that differs from that of `state`."""
    for name, value in mine.items():
        if state.get(name) != value:
            problem = f"the place in the data was taken with {name} = {state.get(name)!r}: {why}"
            remedy = _RESUME_REMEDY
            if name in ("data_ranks", "workers", "rank") and mine["kind"] != PlainReader.__name__:
                remedy += "; or begin an epoch; or give the dataset a plain __iter__, which any division can resume"
            raise SpecMismatch(f"data.{name}", value, problem, remedy)
