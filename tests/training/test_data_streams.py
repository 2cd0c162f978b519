"""Iterables: the same batches for any number of ranks and workers, exact places, and what is refused."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.nodes import IterableWrapper, SamplerWrapper
from torchdata.nodes import Loader as NodesLoader

from data_sources import Shards, Stream
from shoal.data import Data, Loader, LoaderSpec, fingerprint
from shoal.data.loader import load_first_batch
from shoal.data.readers.map_reader import EpochEnd, ReadBatch, Reader
from shoal.data.sampling.sampler import Request
from shoal.errors import ConfigError, DataError, SpecMismatch
from shoal.random_state import preserve_rng


class OneProcessPool:
    """The pool's order of events, with readers in this process."""

    def __init__(self, reader: Reader, spec: LoaderSpec) -> None:
        payload = pickle.dumps(reader)
        self._readers: list[Reader] = [pickle.loads(payload) for _ in range(spec.workers)]

    def restart(self, plan: Iterator[Request], turn: int = 0) -> None:
        self._plan, self._turn = plan, turn

    def next(self) -> ReadBatch | EpochEnd:
        self._turn += 1
        return self._readers[(self._turn - 1) % len(self._readers)].read(next(self._plan))


@pytest.fixture(autouse=True)
def _workers_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.loader.WorkerPool", OneProcessPool)


def loaders(source: Any, ranks: int, workers: int, **options: Any) -> list[Loader]:
    spec = LoaderSpec(workers=workers)
    return [Loader(source, batch_size=4, share=(rank, ranks), spec=spec, **options) for rank in range(ranks)]


def global_batches(group: list[Loader], steps: int | None = None) -> list[list[int]]:
    """Each the ranks' parts in a row; to the end of the epoch, or so many."""
    found = []
    for parts in zip(*group, strict=steps is None):
        values = [part["inputs"] if isinstance(part, dict) else part for part in parts]
        found.append([int(n) for part, loader in zip(values, group, strict=True) for n in part[: loader.num_samples]])
        if len(found) == steps:
            break
    return found


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 3), (2, 2), (4, 1)])
def test_a_plain_stream_goes_on_exactly_under_another_division(stateful: bool, ranks: int, workers: int) -> None:
    source = Stream(30, stateful)
    expected = [list(range(4 * step, 4 * step + 4)) for step in range(7)]
    assert global_batches(loaders(source, 1, 0)) == expected
    before = loaders(source, ranks, workers)
    assert global_batches(before, 3) == expected[:3]
    after = loaders(source, 3 - min(ranks, 2), 2 - workers // 2)
    for loader in after:
        loader.load_state_dict(before[-1].state_dict())
        assert loader.position == 12
    assert global_batches(after) == expected[3:]
    assert global_batches(after, 2) == [[1000 + n for n in batch] for batch in expected[:2]]  # epoch 1


def test_evaluation_gives_every_item_of_a_stream_once() -> None:
    group = loaders(Stream(9, stateful=False), 3, 2, drop_last=False)
    assert global_batches(group) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [loader.num_samples for loader in group] == [1, 0, 0]
    sizes = [[len(batch["inputs"]) for batch in loader] for loader in group]
    assert sizes == [[2, 2, 1], [1, 1, 1], [1, 1, 1]]  # what a rank gets as a filler is one sample


def test_noise_in_a_stream_is_the_same_after_a_resume() -> None:
    source = Stream(20, stateful=False)
    loader = Loader(source, batch_size=4, seed=2)
    torch.manual_seed(0)
    batches = [(batch["noise"], loader.state_dict()) for batch in loader]
    assert torch.equal(torch.rand(3), torch.manual_seed(0) and torch.rand(3))
    again = Loader(source, batch_size=4, seed=2, spec=LoaderSpec(workers=2))
    again.load_state_dict(batches[1][1])
    for batch, (noise, _) in zip(again, batches[2:], strict=True):
        assert torch.equal(batch["noise"], noise)


class NoisyShares(Shards):
    """Divides an order that it has drawn itself; its samples come with noise."""

    def shard(self, index: int, count: int) -> Any:
        order = torch.randperm(self.num_samples).tolist()[index::count]
        return ({"inputs": number, "noise": torch.rand(())} for number in order)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (1, 2), (2, 2)])
def test_shares_are_of_one_order_and_have_noise_of_their_own(ranks: int, workers: int) -> None:
    found: list[dict[str, Any]] = []
    for loader in loaders(NoisyShares(32), ranks, workers):
        found += list(loader)
    assert sorted(int(number) for batch in found for number in batch["inputs"]) == list(range(32))
    assert len({float(value) for batch in found for value in batch["noise"]}) == 32


def test_each_ranks_collate_function_draws_its_own_numbers_of_a_stream_that_all_read() -> None:
    def drawn(deterministic: bool) -> list[float]:
        source = Stream(16, stateful=False)
        source.deterministic = deterministic  # type: ignore[attr-defined]
        group = loaders(source, 2, 0, collate=lambda samples: torch.rand(len(samples)))
        return [float(value) for loader in group for batch in loader for value in batch]

    for deterministic in (False, True):
        assert len(set(drawn(deterministic))) == 16
        torch.rand(1)
        assert drawn(deterministic) == drawn(deterministic)


class Live(Stream):
    """Its iterator hands out the very dict that it counts in, and takes up the one that it is given."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return LiveIterator()


class LiveIterator:
    def __init__(self) -> None:
        self.state = {"next": 0}

    def __iter__(self) -> LiveIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.state["next"] == 20:
            raise StopIteration
        self.state["next"] += 1
        return {"inputs": self.state["next"] - 1}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_a_state_stays_as_it_was_taken_whatever_the_dataset_does_with_its_own() -> None:
    loader = Loader(Live(20, stateful=True), batch_size=4)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert not loader.is_at_end()  # for which the next batch is read
    assert loader.state_dict()["states"] == [(4, {"next": 4})]
    for _ in range(2):  # the same state twice
        again = Loader(Live(20, stateful=True), batch_size=4)
        again.load_state_dict(state)
        assert [batch["inputs"][0] for batch in again] == [4, 8, 12, 16]
    assert state["states"] == [(4, {"next": 4})]


class Foreign(Stream):
    """Another library's stream, whose shares are numbered in another way, and whose length nobody knows."""

    def __len__(self) -> int:
        raise TypeError("Foreign instance doesn't have valid length")

    def shard(self, num_shards: int, index: int) -> Any:
        raise AssertionError("asked for shards of its own")


def test_another_librarys_stream_is_read_as_a_plain_one() -> None:
    source = Foreign(12, stateful=False)
    assert global_batches(loaders(source, 2, 0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(fingerprint(source)) == 16


class Constant(Stream):
    """A stream that draws nothing."""

    deterministic = True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"inputs": number} for number in range(self.num_samples)])


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), float(torch.rand(()))


def test_a_stream_that_draws_nothing_leaves_the_random_numbers_of_training_alone() -> None:
    with preserve_rng():
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        expected = [drawn() for _ in range(6)]
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        loader = Loader(Constant(12, stateful=False), batch_size=4)
        assert [drawn() for _ in range(2) for _ in loader] == expected  # what a loss draws while it is read from


def test_torchdatas_pipelines_keep_their_state() -> None:
    read: list[int] = []

    def source() -> NodesLoader[int]:
        return NodesLoader(IterableWrapper(each for each in range(12) if read.append(each) is None))

    loader = Loader(source(), batch_size=4)
    first = next(iter(loader)).tolist()
    assert loader.state_dict()["states"][0][0] == 4
    again = Loader(NodesLoader(IterableWrapper(range(12))), batch_size=4)
    again.load_state_dict(loader.state_dict())
    assert first + torch.cat(list(again)).tolist() == list(range(12))


class OtherEachEpoch(list[int]):
    """A sampler: in each epoch, which torchdata counts, an order of its own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = sorted(range(10))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_that_counts_its_epochs_itself_goes_on_between_two_of_them(workers: int) -> None:
    def loader(workers: int = workers) -> Loader:
        (made,) = loaders(NodesLoader(SamplerWrapper(OtherEachEpoch())), 1, workers)
        return made

    whole = loader()
    epochs, states = [], []
    for _ in range(3):
        epochs.append([batch.tolist() for batch in whole])
        states.append(whole.state_dict())
    assert epochs[0] != epochs[1] != epochs[2]
    for done, state in enumerate(states[:2], start=1):
        again = loader(2 - workers)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [[batch.tolist() for batch in again] for _ in range(3 - done)] == epochs[done:]


def test_shards_are_read_by_one_each_and_only_their_own_division_resumes_them() -> None:
    group = loaders(Shards(50), 2, 2)
    batches = global_batches(group)
    assert batches[:3] == [[0, 4, 2, 6], [1, 5, 3, 7], [8, 12, 10, 14]]
    assert len(batches) == 12  # each of four shares holds at least 12: six batches of two
    assert len({n for batch in batches for n in batch}) == 48
    global_batches(group, 5)
    states = [loader.state_dict() for loader in group]
    for loader, state in zip(group, states, strict=True):
        assert loader.state_is_per_rank
        loader.load_state_dict(state)
    assert global_batches(group) == batches[5:]
    with pytest.raises(
        SpecMismatch, match=r"data.data_ranks = 4: .* with data_ranks = 2: each rank and worker reads a"
    ):
        loaders(Shards(50), 4, 2)[0].load_state_dict(states[0])
    with pytest.raises(SpecMismatch, match=r"data.workers = 3: .*or give the dataset a plain __iter__"):
        loaders(Shards(50), 2, 3)[0].load_state_dict(states[0])
    with pytest.raises(SpecMismatch, match=r"data.rank = 1"):
        group[1].load_state_dict(states[0])
    evaluated = global_batches(loaders(Shards(10), 2, 2, drop_last=False))
    assert evaluated == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Titled:
    """Batches whose first part is no tensor."""

    def batches(self, batch_size: int, **options: Any) -> Iterator[dict[str, Any]]:
        for at in range(0, 8, batch_size):
            yield {"title": [f"no. {number}" for number in range(at, at + batch_size)], "x": torch.arange(batch_size)}


def test_samples_of_a_batch_are_counted_by_its_tensors() -> None:
    loader = Loader(Titled(), batch_size=4)
    assert [(batch["title"][0], loader.num_samples) for batch in loader] == [("no. 0", 4), ("no. 4", 4)]


class Torch(IterableDataset[int]):
    """An iterable in torch's own way, with a length that it does not keep."""

    def __init__(self, length: int, num_items: int) -> None:
        self.length, self.num_items = length, num_items

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_items))


class Spent(IterableDataset[int]):
    """Has made its iterator once and for all."""

    def __init__(self) -> None:
        self.numbers = iter(range(6))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


class NoLength:
    def shard(self, index: int, count: int) -> range:
        return range(10)


def test_streams_that_yield_too_little() -> None:
    with pytest.raises(DataError, match="Stream': is empty: it has yielded nothing"):
        next(iter(Loader(Stream(0, stateful=False), batch_size=2)))
    once = Loader(Spent(), batch_size=2)
    assert len(list(once)) == 3
    with pytest.raises(
        DataError, match=r"nothing after its first epoch: its iterator is spent. let its __iter__ begin"
    ):
        next(iter(once))
    with pytest.raises(DataError, match=r"yields 3 samples, too few for one batch of 4. lower batch_size"):
        next(iter(Loader(Stream(3, stateful=False), batch_size=4)))
    with pytest.raises(DataError, match="has yielded 9 samples, and says that it has 12"):
        list(Loader(Torch(12, 9), batch_size=4))
    with pytest.raises(DataError, match="one of its shares has less than 25"):
        global_batches(loaders(Shards(50, short=3), 2, 0))
    with pytest.raises(DataError, match="yields 6 samples, too few"):
        global_batches(loaders(Shards(6), 2, 2))
    with pytest.raises(ConfigError, match=r"NoLength': has shard\(\), but no length"):
        Loader(NoLength(), batch_size=2)
    assert len(list(Loader(Torch(9, 9), batch_size=4))) == 2
    with pytest.raises(ConfigError, match=r"torchdata.nodes.Loader"):
        Loader(IterableWrapper(range(3)), batch_size=1)


def test_an_example_is_a_first_batch_of_whatever_it_is() -> None:
    nodes = NodesLoader(IterableWrapper(range(12)))
    for source in (range(12), Shards(12), NoLength(), nodes, nodes, Stream(12, stateful=True)):
        batch = load_first_batch(Data(source), 3)
        assert (batch["inputs"] if isinstance(batch, dict) else batch).tolist() == [0, 1, 2]
    assert load_first_batch(Data(range(2), collate=list), 3) == [0, 1]


def test_a_batch_ahead_on_a_device_does_not_count_before_it_is_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        ahead = 1
        events: list[str] = []  # noqa: RUF012

        def begin(self, batch: Any) -> Any:
            self.events.append(f"begin {batch['inputs'][0]}")
            return batch

        def finish(self, moving: Any) -> Any:
            self.events.append(f"finish {moving['inputs'][0]}")
            return moving

    monkeypatch.setattr("shoal.data.loader.make_transfer", lambda device, pin: Device())
    loader = Loader(Stream(12, stateful=True), batch_size=4)
    batches = iter(loader)
    next(batches)
    assert Device.events == ["begin 0", "begin 4", "finish 0"]
    assert loader.state_dict()["states"] == [(4, {"next": 4})]
    assert [batch["inputs"][0] for batch in batches] == [4, 8]
    assert [batch["inputs"][0] for batch in loader] == [1000, 1004, 1008]


class Held(IterableDataset[int]):
    """A stream that must be told when nobody reads on."""

    def __init__(self) -> None:
        self.ended = 0

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            self.ended += 1


def test_a_stream_that_is_left_half_way_ends_with_its_loader() -> None:
    source = Held()
    kept = Loader(source, batch_size=4)
    iterator = iter(kept)
    next(iterator)
    assert source.ended == 0
    kept.close()
    assert source.ended == 1  # while there is still somebody to end: Ray, say
    load_first_batch(Data(source), 2)
    assert source.ended == 2
