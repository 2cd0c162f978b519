"""The two ways through a dataset: what to ask its reader for, and which state of an earlier run fits.

Called by the loader. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from shoal.data.readers.iterable_reader import PlainReader, StreamReader
from shoal.data.readers.map_reader import Ended, Made
from shoal.data.sampling.sampler import EPOCH_BEFORE, MapOrder, MapRequest, StreamRequest
from shoal.errors import DataError, SpecMismatch

State = dict[str, Any]
_AS_BEGUN = "resume with what the run began with"


class Course(Protocol):
    """A way through a dataset, epoch after epoch."""

    is_per_rank: bool  # whether each rank's state is its own
    num_batches: int | None

    def is_over(self, position: int) -> bool:
        """Whether the epoch has no batch at this position, as far as that is known beforehand."""
        ...

    def plan(self, epoch: int, position: int) -> Iterator[Any]:
        """The requests from there on, without end."""
        ...

    def turn(self, position: int) -> int:
        """The number of the worker that begins."""
        ...

    def delivered(self, made: Made, position: int) -> None:
        """The batch at `position` has been given to the user."""
        ...

    def ended(self, ended: Ended, position: int) -> None:
        """The epoch ended at `position`, and the next one begins. Raises DataError when that is too early."""
        ...

    def forget(self) -> None:
        """What was kept belongs to another place than the one where it will go on."""
        ...

    def state(self) -> State:
        """What is needed besides epoch and position to go on there."""
        ...

    def load(self, state: State) -> None:
        """Take up what `state` gave. Raises SpecMismatch."""
        ...


class MapCourse:
    """Through a map-style dataset: the position alone says everything."""

    is_per_rank = False

    def __init__(self, order: MapOrder) -> None:
        self._order = order
        self.num_batches: int | None = order.num_batches

    def is_over(self, position: int) -> bool:
        return not self._order.num_global(position)

    def plan(self, epoch: int, position: int) -> Iterator[MapRequest]:
        """Goes on into the next epochs, so that workers are ahead across their borders too."""
        while True:
            request = self._order.request(epoch, position)
            if request is None:
                epoch, position = epoch + 1, 0
            else:
                yield request
                position += request.num_global

    def turn(self, position: int) -> int:
        return 0

    def delivered(self, made: Made, position: int) -> None:
        """Nothing to keep."""

    def ended(self, ended: Ended, position: int) -> None:
        """Known beforehand."""

    def forget(self) -> None:
        """Nothing is kept."""

    def state(self) -> State:
        order = self._order
        return {"kind": "map", "num_samples": order.num_samples, "shuffle": order.shuffle, "seed": order.seed}

    def load(self, state: State) -> None:
        refuse_unequal(self.state(), state, "samples would repeat or be missed")


class StreamCourse:
    """Through an iterable, which may have a state of its own."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self.is_per_rank = not reader.is_alike
        self.num_batches: int | None = None
        self._states: list[Any] = self._no_states()
        self._has_ended = False  # an epoch, with batches in it
        self._ended: list[Any] = []  # at the end of the epoch before; until the next one's first batch

    def _no_states(self) -> list[Any]:
        return [None] * (1 if self._reader.is_alike else self._reader.stride)

    def is_over(self, position: int) -> bool:
        return False

    def plan(self, epoch: int, position: int) -> Iterator[StreamRequest]:
        reader = self._reader
        for step in range(reader.stride):
            at = position + step * reader.batch_size
            state = self._states[self._holder_of(at)]
            yield StreamRequest(epoch, at, True, None if state is None else tuple(state))
        position += reader.stride * reader.batch_size
        while True:
            yield StreamRequest(epoch, position, False, None)
            position += reader.batch_size

    def turn(self, position: int) -> int:
        return position // self._reader.batch_size

    def _holder_of(self, position: int) -> int:
        return self.turn(position) % len(self._states)

    def delivered(self, made: Made, position: int) -> None:
        self._states[self._holder_of(position)] = made.state
        self._ended = []

    def ended(self, ended: Ended, position: int) -> None:
        if not position:
            name, size = type(self._reader.source).__name__, self._reader.batch_size
            if not ended.num_items and self._has_ended:
                remedy = "let its __iter__ begin anew each time"
                raise DataError("data", name, "yields nothing after its first epoch: its iterator is spent", remedy)
            if not ended.num_items:
                raise DataError("data", name, "is empty: it has yielded nothing")
            problem = f"yields {ended.num_items} samples, too few for one batch of {size}"
            raise DataError("data", name, problem, "lower batch_size")
        states = self._states
        self._has_ended = True
        self.forget()
        if self._reader.counts_epochs and states[0] is not None:
            self._ended = [(EPOCH_BEFORE, state) for _, state in states]

    def forget(self) -> None:
        self._states, self._ended = self._no_states(), []

    def state(self) -> State:
        reader = self._reader
        state: State = {"kind": type(reader).__name__, "seed": reader.seed}
        if self.is_per_rank:
            divided = {"batch_size": reader.batch_size, "data_ranks": reader.share.size, "workers": reader.stride}
            state |= {**divided, "rank": reader.share.rank}
        return {**state, "states": list(self._ended or self._states)}

    def load(self, state: State) -> None:
        mine = {name: value for name, value in self.state().items() if name != "states"}
        why = "each rank and worker reads a part of its own, whose place says nothing of another division"
        refuse_unequal(mine, state, why if self.is_per_rank else "samples would repeat or be missed")
        self._states, self._ended = list(state["states"]), []


def refuse_unequal(mine: State, state: State, why: str) -> None:
    """Raises SpecMismatch for the first value with which `state` was not taken."""
    for name, value in mine.items():
        if state.get(name) != value:
            problem = f"the place in the data was taken with {name} = {state.get(name)!r}: {why}"
            remedy = _AS_BEGUN
            if name in ("data_ranks", "workers", "rank") and mine["kind"] != PlainReader.__name__:
                remedy += "; or begin an epoch; or give the dataset a plain __iter__, which any division can resume"
            raise SpecMismatch(f"data.{name}", value, problem, remedy)
