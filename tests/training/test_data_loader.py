"""The order of samples is exact: for any number of ranks, and after a stop at any step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset

from shoal.data import Loader, LoaderSpec
from shoal.data.sampling.sampler import compute_permutation
from shoal.errors import ConfigError, DataError, SpecMismatch


class Numbers:
    """Sample i is (i, i squared)."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def flat(batches: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(batches))


def seen(loader: Loader) -> list[list[int]]:
    """The samples of each batch of an epoch."""
    return [batch[0].tolist()[: loader.num_samples] for batch in loader]


def test_an_order_is_a_permutation_that_seed_and_epoch_alone_decide() -> None:
    order = compute_permutation(1000, seed=3, epoch=1)
    assert sorted(order.tolist()) == list(range(1000))
    draws = np.random.Philox(key=np.array([3, 1], dtype=np.uint64)).random_raw(1000)
    assert order.tolist() == sorted(range(1000), key=lambda index: draws[index])
    others = [compute_permutation(1000, 3, 2), compute_permutation(1000, 4, 1)]
    assert all(other.tolist() != order.tolist() for other in others)
    assert compute_permutation(8, seed=7, epoch=0).tolist() == [
        4,
        1,
        6,
        3,
        2,
        7,
        5,
        0,
    ]  # for all time: resumes rely on it


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 24),
    num_ranks=st.integers(1, 5),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_ranks_share_each_global_batch_whole(
    num_samples: int, batch_size: int, num_ranks: int, drop_last: bool, shuffle: bool
) -> None:
    if drop_last:
        batch_size *= num_ranks
        num_samples += batch_size
    loaders = [
        Loader(
            Numbers(num_samples), batch_size=batch_size, share=(rank, num_ranks), shuffle=shuffle, drop_last=drop_last
        )
        for rank in range(num_ranks)
    ]
    order = compute_permutation(num_samples, 0, 0).tolist() if shuffle else list(range(num_samples))
    by_rank = [seen(loader) for loader in loaders]
    assert {len(batches) for batches in by_rank} == {loaders[0].num_batches}
    for step, parts in enumerate(zip(*by_rank, strict=True)):
        assert flat(parts) == order[step * batch_size : (step + 1) * batch_size]
        assert max(map(len, parts)) - min(map(len, parts)) <= (not drop_last)
    given_out = sum(len(part) for batches in by_rank for part in batches)
    assert given_out == (num_samples - num_samples % batch_size if drop_last else num_samples)


@given(
    stop=st.integers(0, 12),
    batch_size=st.sampled_from([4, 8, 12]),
    ranks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
)
def test_another_number_of_ranks_goes_on_exactly(stop: int, batch_size: int, ranks: tuple[int, int]) -> None:
    def group(num_ranks: int, size: int) -> list[Loader]:
        return [Loader(Numbers(50), batch_size=size, share=(rank, num_ranks), seed=5) for rank in range(num_ranks)]

    before = group(ranks[0], 4)
    iterators = [iter(loader) for loader in before]
    delivered = [index for _ in range(stop) for iterator in iterators for index in next(iterator)[0].tolist()]
    after = group(ranks[1], batch_size)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    rest = [flat(parts) for parts in zip(*map(seen, after), strict=True)]
    order = compute_permutation(50, 5, 0).tolist()
    left = (50 - 4 * stop) // batch_size * batch_size
    assert delivered + flat(rest) == order[: 4 * stop + left]
    assert after[0].epoch == 1


def test_each_epoch_has_an_order_of_its_own_and_a_break_is_no_loss() -> None:
    loader = Loader(Numbers(10), batch_size=2, seed=1)
    first = [next(iter(loader))[0].tolist()]  # left behind after one batch
    first += seen(loader)
    assert flat(first) == compute_permutation(10, 1, 0).tolist()
    assert (loader.epoch, loader.position) == (1, 0)
    assert flat(seen(loader)) == compute_permutation(10, 1, 1).tolist()


def test_a_state_of_the_last_step_ends_the_epoch() -> None:
    loader = Loader(Numbers(10), batch_size=4)
    states = [loader.state_dict() for _ in loader]
    again = Loader(Numbers(10), batch_size=4)
    again.load_state_dict(states[-1])
    assert seen(again) == []
    assert again.epoch == 1


def test_a_rank_without_a_share_takes_part_with_a_filler() -> None:
    loader = Loader(Numbers(5), batch_size=4, share=(1, 2), shuffle=False, drop_last=False)
    sizes = []
    for batch in loader:
        sizes.append((batch[0].tolist(), loader.num_samples, loader.num_global, loader.last_indices))
    assert sizes == [([2, 3], 2, 4, [2, 3]), ([4], 0, 1, [])]


def test_every_way_of_reading_gives_the_same_batch() -> None:
    class Whole(Numbers):
        def batch(self, indices: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
            return [indices, indices**2]

    class Items(Numbers):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
            return [(index, index * index) for index in indices]

    tensors = TensorDataset(torch.arange(20), torch.arange(20) ** 2)
    expected = [[part.tolist() for part in batch] for batch in Loader(Numbers(20), batch_size=4)]
    for source in (Whole(20), Items(20), tensors):
        assert [[part.tolist() for part in batch] for batch in Loader(source, batch_size=4)] == expected
    collated = Loader(Whole(20), batch_size=4, collate=lambda samples: {"sum": torch.tensor(samples).sum()})
    assert next(iter(collated))["sum"] == sum(expected[0][0]) + sum(expected[0][1])


class Negated(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(-tensor for tensor in super().__getitem__(index))


class Jittered(TensorDataset):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self.tensors[0][index] + torch.rand(()) for index in indices]


def test_a_tensor_dataset_that_makes_its_samples_itself_is_asked_for_them() -> None:
    values = torch.arange(8.0)
    assert [(-values[:4]).tolist(), (-values[4:]).tolist()] == [
        batch[0].tolist() for batch in Loader(Negated(values), batch_size=4, shuffle=False)
    ]
    state = torch.get_rng_state()
    first, second = ([batch.tolist() for batch in Loader(Jittered(values), batch_size=4)] for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert not set(flat(first)) & set(values.tolist())


class Foreign(Numbers):
    """Another library's dataset: its batches and its shards are made in its own way."""

    def batch(self, batch_size: int, drop_last_batch: bool = False) -> Any:
        raise AssertionError("asked for batches of its own")

    def shard(self, num_shards: int, index: int) -> Any:
        raise AssertionError("asked for shards of its own")


def test_methods_of_another_librarys_datasets_are_not_taken_for_those_of_shoal() -> None:
    expected = [[part.tolist() for part in batch] for batch in Loader(Numbers(20), batch_size=4)]
    assert [[part.tolist() for part in batch] for batch in Loader(Foreign(20), batch_size=4)] == expected


def noisy_collate(samples: list[Any]) -> torch.Tensor:
    return torch.rand(len(samples)) + random.random() + np.random.rand()


@pytest.mark.parametrize("source", [TensorDataset(torch.arange(8)), Numbers(8)], ids=["draws nothing", "may draw"])
def test_random_numbers_of_a_collate_function_are_of_its_batch(source: Any) -> None:
    def batches(share: tuple[int, int] = (0, 1)) -> list[list[float]]:
        with Loader(source, batch_size=4, share=share, collate=noisy_collate) as loader:
            return [batch.tolist() for batch in loader]

    state = torch.get_rng_state()
    found = batches()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert batches() == found
    assert len(set(flat(found))) == 8
    drawn = flat([*batches((0, 2)), *batches((1, 2))])
    assert len(set(drawn)) == 8


def test_random_numbers_of_a_dataset_follow_from_the_sample_and_leave_the_process_alone() -> None:
    class Noisy(Numbers):
        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(()), random.random(), np.random.rand()

    torch.manual_seed(0)
    undisturbed = torch.rand(1)
    torch.manual_seed(0)
    loader = Loader(Noisy(8), batch_size=2)
    batches = list(loader)
    assert torch.rand(1) == undisturbed
    assert len({float(value) for batch in batches for value in (*batch[1], *batch[2], *batch[3])}) == 24
    again = Loader(Noisy(8), batch_size=2)
    again.seek(0, position=4)
    assert all(torch.equal(one, other) for one, other in zip(next(iter(again)), batches[2], strict=True))
    drawn = {int(batch[0][row]): [float(each[row]) for each in batch[1:]] for batch in batches for row in range(2)}
    for rank in range(2):  # another batch, of which each rank has a half
        for source in (Noisy(8), Subset(Noisy(8), range(8)), Subset(Subset(Noisy(8), range(8)), range(8))):
            for batch in Loader(source, batch_size=8, share=(rank, 2)):
                for index, *values in zip(*batch, strict=True):
                    assert [float(value) for value in values] == drawn[int(index)]


def test_what_does_not_fit_is_refused_with_field_value_and_remedy() -> None:
    with pytest.raises(ConfigError, match=r"batch_size = 6: does not divide by 4 data ranks. for example 4 or 8"):
        Loader(Numbers(10), batch_size=6, share=(0, 4))
    for share in [(2, 2), (-1, 2), (0, 0), (1, 1)]:  # as by counting ranks from 1: others' samples, or none
        with pytest.raises(ConfigError, match=r"share = .*: is no rank of so many"):
            Loader(Numbers(10), batch_size=2, share=share)
    with pytest.raises(ConfigError, match=r"data = 'DataLoader': gives batches, and not samples\. give its dataset"):
        Loader(DataLoader(Numbers(10), batch_size=2), batch_size=2)  # type: ignore[arg-type]
    one_by_one = DataLoader(Numbers(10), batch_size=None, shuffle=False)  # type: ignore[arg-type]
    assert seen(Loader(one_by_one, batch_size=5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(DataError, match="Numbers': is empty"):
        Loader(Numbers(0), batch_size=2, drop_last=False)
    with pytest.raises(DataError, match=r"has 3 samples, not one whole batch of 4\. set batch_size to 3 or less"):
        Loader(Numbers(3), batch_size=4)
    with pytest.raises(ConfigError, match="neither a map-style nor an iterable"):
        Loader(7, batch_size=1)
    for columns in (pd.DataFrame({"x": [1.0, 2.0]}), {"x": torch.zeros(2)}):
        with pytest.raises(ConfigError, match=r"is read by names, and not by numbers .* torch's StackDataset\(name="):
            Loader(columns, batch_size=1)
    for numbered in (pd.Series([7, 8]), {0: 7, 1: 8}):
        batches = list(Loader(numbered, batch_size=1, shuffle=False))
        assert [batch.tolist() for batch in batches] == [[7], [8]]
    rows = StackDataset(x=torch.tensor([7, 8]))
    assert [batch["x"].tolist() for batch in Loader(rows, batch_size=1, shuffle=False)] == [[7], [8]]
    with pytest.raises(ConfigError, match=r"data = 'generator': is an iterator, which is spent after one epoch"):
        Loader((each for each in range(3)), batch_size=1)
    for lengthless in (torch.tensor(1.0), np.array(1.0), list):
        with pytest.raises(DataError, match=r"has no length\. give it a __len__"):
            Loader(lengthless, batch_size=1)
    for wrong in ({"batch_size": 2.5}, {"batch_size": "2"}, {"batch_size": 2, "seed": 1.5}):
        with pytest.raises(ConfigError, match=r"(batch_size|seed) = .*: is no whole number"):
            Loader(Numbers(10), **wrong)
    with pytest.raises(ConfigError, match="workers"):
        LoaderSpec.parse({"workers": -1})
    with pytest.raises(ConfigError, match=r"prefetch = 129: .* less than or equal to 128"):
        LoaderSpec.parse({"prefetch": 129})


def test_a_state_is_plain_numbers_whatever_the_batch_size_was() -> None:
    loader = Loader(Numbers(10), batch_size=np.int64(2), seed=np.int64(3))  # type: ignore[arg-type]
    next(iter(loader))
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()


def test_a_dataset_that_leaves_samples_out_of_a_batch_is_refused() -> None:
    class Choosy(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices if index != 3]

    loader = Loader(Choosy(10), batch_size=2, shuffle=False)
    batches = iter(loader)
    assert next(batches)[0].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"gives 1 samples where 2 are asked for \(in samples 2, 3\)"):
        next(batches)


def test_samples_that_cannot_be_read_are_named() -> None:
    class Bad(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise OSError("sector 5 is gone")
            return torch.zeros(1 + (index == 2))

    loader = Loader(Bad(6), batch_size=2, shuffle=False)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(DataError, match=r"in samples 2, 3\): RuntimeError: stack expects each tensor to be equal size"):
        next(iterator)
    loader.seek(0, 4)
    with pytest.raises(DataError, match=r"Bad': cannot be read \(in samples 4, 5\): OSError: sector 5 is gone"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (Loader(Numbers(12), batch_size=2), "num_samples"),
        (Loader(Numbers(10), batch_size=2, seed=1), "seed"),
        (Loader(Numbers(10), batch_size=2, shuffle=False), "shuffle"),
    ],
)
def test_a_state_of_another_order_is_refused(other: Loader, field: str) -> None:
    with pytest.raises(SpecMismatch, match=rf"data.{field} = .* samples would repeat or be missed"):
        Loader(Numbers(10), batch_size=2).load_state_dict(other.state_dict())
