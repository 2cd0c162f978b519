"""DataLoaders of torch in a Task's data: dataset, order, sampler, collate function and batch size are theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import shoal
import shoal.runs
from shoal.data import Data, Loader
from shoal.data.loader import load_first_batch, make_loader
from shoal.errors import ConfigError, DataError, SpecMismatch
from shoal.train import TrainSpec
from shoal.train.launch.local import fit_locally
from shoal.train.run_facts import adopt_batch_size

NUMBERS = TensorDataset(torch.arange(22))


class Buckets(Sampler[list[int]]):
    """Batches of several sizes, drawn with a generator that only it has."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        order = self._random.permutation(22).tolist()
        return iter([order[:8], order[8:11], order[11:]])


def weighted() -> DataLoader[Any]:
    sampler = WeightedRandomSampler([1.0] * 22, 22, generator=torch.Generator().manual_seed(1))
    return DataLoader(NUMBERS, batch_size=8, sampler=sampler)


LOADERS = {
    "generator": lambda: DataLoader(NUMBERS, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "shuffled": lambda: DataLoader(NUMBERS, batch_size=8, shuffle=True),
    "weighted": weighted,
    "subset": lambda: DataLoader(NUMBERS, batch_size=8, sampler=SubsetRandomSampler(range(3, 17)), drop_last=True),
    "buckets": lambda: DataLoader(NUMBERS, batch_sampler=Buckets()),
}


def open_all(name: str, ranks: int = 1) -> list[Loader]:
    """The loader of each rank, each of data of its own, as in processes."""
    return [
        make_loader(Data(LOADERS[name]()), "train", batch_size=8, share=(rank, ranks), seed=2) for rank in range(ranks)
    ]


def read_epoch(loaders: list[Loader]) -> list[list[int]]:
    """The global batches of an epoch."""
    batches = zip(*([batch[0].tolist()[: each.num_samples] for batch in each] for each in loaders), strict=True)
    return [[index for part in parts for index in part] for parts in batches]


@pytest.mark.parametrize("name", LOADERS)
def test_ranks_share_the_batches_of_a_loader_and_a_resume_goes_on_with_them(name: str) -> None:
    (alone,), ranks = open_all(name), open_all(name, 2 if name == "subset" else 3)
    epochs = [read_epoch([alone]) for _ in range(3)]
    assert [read_epoch(ranks) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1]
    sizes = {"buckets": [8, 3, 11], "subset": [8]}.get(name, [8, 8, 6])
    assert [len(batch) for batch in epochs[0]] == sizes
    assert alone.num_batches == len(sizes)
    for seen in (0, 1):
        stopped, again = open_all(name)[0], open_all(name)[0]
        stopped.seek(1)
        for _ in range(seen):
            next(iter(stopped))
        again.load_state_dict(stopped.state_dict())
        assert read_epoch([again]) == epochs[1][seen:]
        assert read_epoch([again]) == epochs[2]


@pytest.mark.parametrize("name", ["generator", "weighted"])
def test_the_first_epoch_of_a_loader_with_a_generator_is_its_own(name: str) -> None:
    loader = LOADERS[name]()
    (ours,) = open_all(name)
    assert read_epoch([ours]) == [batch[0].tolist() for batch in loader]
    generator = getattr(loader.sampler, "generator")  # noqa: B009 - not of each sampler
    before = generator.get_state()
    read_epoch([make_loader(Data(loader), "train", batch_size=8)])
    assert torch.equal(generator.get_state(), before)


def test_a_loader_in_order_stays_in_order_and_its_settings_are_used() -> None:
    data = Data(DataLoader(NUMBERS, batch_size=5, collate_fn=lambda samples: torch.stack([x for (x,) in samples]) * 10))
    assert data.train is NUMBERS
    loader = make_loader(data, "train", batch_size=5)
    assert [len(batch) for batch in loader] == [5, 5, 5, 5, 2]
    assert next(iter(loader)).tolist() == [0, 10, 20, 30, 40]
    assert load_first_batch(data, 2).tolist() == [0, 10]
    assert load_first_batch(Data(DataLoader(NUMBERS, batch_size=5), collate=len), 2) == 2  # the loader says none
    assert [len(batch) for batch in make_loader(data, "train", batch_size=5, is_even=True)] == [5, 5, 5, 5]
    spread = DataLoader(NUMBERS, batch_size=5, sampler=DistributedSampler(NUMBERS, 2, 0, shuffle=False))
    assert make_loader(Data(spread), "train", batch_size=5).num_batches == 5  # the ranks are those of the run


def test_validation_data_is_what_its_sampler_gives_each_once() -> None:
    held_out = DataLoader(NUMBERS, batch_size=4, sampler=SubsetRandomSampler([3, 1, 20]), drop_last=True)
    loader = make_loader(Data(NUMBERS, held_out), "validation", batch_size=4)
    assert sorted(index for batch in loader for index in batch[0].tolist()) == [1, 3, 20]


def test_the_batch_size_is_the_loaders_unless_the_run_says_one() -> None:
    data = Data(weighted())
    assert adopt_batch_size(TrainSpec(), data).batch_size == 8
    assert adopt_batch_size(TrainSpec(batch_size=16), data).batch_size == 16
    buckets = Data(LOADERS["buckets"]())
    assert adopt_batch_size(TrainSpec(), buckets).batch_size == 7  # the mean
    with pytest.raises(
        ConfigError, match="batch_size = 16: has no effect: the batch sampler Buckets makes the batches"
    ):
        adopt_batch_size(TrainSpec(batch_size=16), buckets)


def test_what_does_not_fit_is_refused() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(22))

    with pytest.raises(DataError, match="'Endless': is a sampler without a length"):
        Data(DataLoader(NUMBERS, sampler=Endless()))
    with pytest.raises(ConfigError, match="'Buckets': is a batch sampler, and this run needs batches of one size"):
        make_loader(Data(LOADERS["buckets"]()), "train", batch_size=8, is_even=True)
    short = weighted().sampler
    assert isinstance(short, WeightedRandomSampler)
    short.__class__ = type("Short", (WeightedRandomSampler,), {"__iter__": lambda self: iter([1, 2])})
    with pytest.raises(DataError, match="'Short': yields 2 in epoch 1, less than its length of 22"):
        next(iter(make_loader(Data(DataLoader(NUMBERS, batch_size=8, sampler=short)), "train", batch_size=8)))
    other = make_loader(Data(NUMBERS), "train", batch_size=8).state_dict()
    with pytest.raises(SpecMismatch, match=r"data\.sampler"):
        open_all("weighted")[0].load_state_dict({**other, "shuffle": False, "seed": 2})


class Line(shoal.Task):
    """y = x, of 22 points in batches of 8, 8 and 6."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> Data:
        x = torch.arange(22.0)[:, None] / 22
        batch_sampler = BatchSampler(range(22), 8, drop_last=False)
        train = DataLoader(TensorDataset(x, x), batch_sampler=batch_sampler)
        return Data(train, DataLoader(TensorDataset(x, x), batch_size=10))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)


def test_a_run_takes_the_steps_of_the_loop_that_torch_would() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in DataLoader(Line().data().train, batch_size=8):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    spec = TrainSpec(task=f"{__name__}:Line", stop={"epochs": 2}, device="cpu", parallel={"accumulate": 4})
    result = fit_locally(spec, registers=False)
    assert result.steps == 6
    assert result.weights is not None
    trained = load_file(result.weights)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(trained[name], expected, msg=name)
    assert "batch_size: 8" in shoal.runs.load(result.run_id).spec


def test_a_batch_size_that_takes_the_place_of_the_loaders_is_told() -> None:
    said: list[str] = []
    result = fit_locally(
        TrainSpec(task=f"{__name__}:Shuffled", stop={"steps": 1}, batch_size=11), say=said.append, registers=False
    )
    assert said[0] == "batch_size=11 of the run is used, and not the 8 of its DataLoader"
    again = fit_locally(TrainSpec.from_record(shoal.runs.load(result.run_id).spec, ["stop.steps=2"]), registers=False)
    assert again.steps == 2


class Shuffled(Line):
    def data(self) -> Data:
        return Data(DataLoader(super().data().train, batch_size=8, shuffle=True))
