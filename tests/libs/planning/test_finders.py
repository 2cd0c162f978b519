"""The finders: on curves and limits that are known, on tasks whose answer is known, and as the user types them."""

import errno
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, OutOfMemory
from shoal.libs.planning import finders
from shoal.libs.planning.find import parse_bytes
from shoal.libs.planning.finders import (
    analyse_rates,
    find_batch_size,
    find_learning_rate,
    measure_footprint,
    search_largest,
)
from shoal.train.spec import TrainSpec
from typed import said, typed

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
from shoal.data import Data
from shoal.libs.trees.syntax_tree import TreeLSTM
from shoal.train import Task
from shoal.libs.trees import TreeBatch


class Parabola(Task):
    """loss = curvature / 2 * weight ** 2: gradient descent diverges at rates above 2 / curvature."""

    def __init__(self, *, curvature: float = 100.0) -> None:
        self.curvature = curvature

    def model(self):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        return layer

    def data(self):
        return Data(TensorDataset(torch.ones(64, 1), torch.zeros(64, 1)))

    def loss(self, outputs, batch):
        return self.curvature / 2 * outputs.square().mean()


def collate(samples):
    parents, tokens = zip(*samples)
    return TreeBatch.from_parents(parents, inputs={"token": list(tokens)})


class Trees(Task):
    """Trees of 32 nodes, with 64 units."""

    def model(self):
        return TreeLSTM(width=8, hidden=64)

    def data(self):
        parents = [-1, *(node // 2 for node in range(31))]
        tokens = [0] * 32
        return Data([(parents, tokens)] * 64, collate=collate)

    def inputs(self, batch):
        return (batch,)

    def loss(self, outputs, batch):
        return outputs.square().mean()


class _Wide(nn.Module):
    """Holds 64 KiB of activations a sample; refuses more than `most` samples."""

    def __init__(self, most):
        super().__init__()
        self.most, self.scale, self.seen = most, nn.Parameter(torch.ones(16384)), []

    def forward(self, inputs):
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("tried to allocate")
        return (inputs * self.scale).sum(1, keepdim=True)


class Wide(Task):
    def __init__(self, *, most: int = 10**9) -> None:
        self.most = most

    def model(self):
        return _Wide(self.most)

    def data(self):
        return Data(TensorDataset(torch.ones(300, 1), torch.zeros(300, 1)))

    def loss(self, outputs, batch):
        return outputs.mean()


class _Flowing:
    def __iter__(self):
        return ((torch.ones(1), torch.zeros(1)) for _ in range(50))


class Flow(Wide):
    """50 samples that do not say how many they are."""

    def data(self):
        return Data(_Flowing())


class Loud(Wide):
    def data(self):
        print("reading data")
        return super().data()
'''


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(finders, "NUM_TIMED", 1)  # how long a step takes decides nothing in these tests
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the folder of a task is added
    path = tmp_path / f"found_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(TASK)
    return str(path)


def _spec(task: str, name: str, **values: Any) -> TrainSpec:
    return TrainSpec.parse({"task": f"{task}:{name}", "threads": 1, "batch_size": 8, **values})


@given(limit=st.integers(0, 5000), up_to=st.integers(1, 4000))
def test_the_search_comes_within_a_32nd_of_the_largest(limit: int, up_to: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = search_largest(fits, up_to)
    largest = min(limit, up_to)
    assert largest - max(1, largest // 32) < found <= largest or found == largest
    assert max(tried) <= up_to
    assert len(tried) <= 20


def test_the_search_ends_where_it_is_enough() -> None:
    tried: list[int] = []
    assert search_largest(lambda size: not tried.append(size), 4096, lambda: tried[-1] >= 64) == 64


@given(steepest=st.floats(-4, -2), depth=st.floats(0.1, 10), width=st.floats(0.2, 0.5))
def test_the_suggestion_is_where_a_known_curve_falls_steepest(steepest: float, depth: float, width: float) -> None:
    exponents = np.linspace(-7, 1, 200)
    falling = 1 + depth / (1 + np.exp((exponents - steepest) / width))
    losses = np.where(exponents < steepest + 2, falling, 1 + depth + 10 ** (exponents - steepest - 2))
    noisy = losses + 0.01 * depth * np.random.default_rng(0).standard_normal(200)
    found = analyse_rates((10**exponents).tolist(), noisy.tolist(), diverged=True)
    assert found.suggestion is not None
    assert math.log10(found.suggestion) == pytest.approx(steepest, abs=0.3)  # a tenth of a decade, and the noise
    assert found.suggestion < found.lowest


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    rates = np.geomspace(1e-5, 1, 50).tolist()
    rising = analyse_rates(rates, np.linspace(1, 2, 50).tolist(), diverged=False)
    assert rising.suggestion is None
    at_once = analyse_rates(rates, [1.0, math.nan], diverged=True)
    assert (at_once.suggestion, at_once.losses) == (None, [1.0])


@pytest.mark.parametrize("seed", range(20))
def test_a_fall_that_may_be_chance_suggests_nothing(seed: int) -> None:
    rates = np.geomspace(1e-7, 10, 100).tolist()
    noise = 0.7 + 0.02 * np.random.default_rng(seed).standard_normal(100)
    assert analyse_rates(rates, noise.tolist(), diverged=False).suggestion is None
    falling = noise - 0.1 / (1 + np.exp(-2 * (np.log10(rates) + 2)))
    assert analyse_rates(rates, falling.tolist(), diverged=False).suggestion is not None


@pytest.mark.parametrize("curvature", [1.0, 100.0])
def test_on_a_parabola_it_stops_soon_after_the_rate_at_which_descent_diverges(task: str, curvature: float) -> None:
    sgd = {"name": "sgd", "momentum": 0.0, "learning_rate": 0.3}
    before = torch.get_rng_state()
    found = find_learning_rate(_spec(task, "Parabola", optimizer=sgd, args={"curvature": curvature}), highest=1e3)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.diverged
    assert found.suggestion is not None
    assert 0.02 / curvature < found.suggestion < 2 / curvature
    assert found.lowest < 10 * 2 / curvature
    assert found.losses[-1] < 1e6 * found.losses[0]  # long before it overflows
    assert found.losses[0] == pytest.approx(curvature / 2)  # the network is fresh each time


def test_a_first_loss_that_is_not_finite_is_said(task: str) -> None:
    done = typed("find rate", f"{task}:Parabola", "args.curvature=.inf", "threads=1")
    assert isinstance(done.exception, ConfigError)  # of which the program prints one line
    assert "its first loss, of fresh weights, is not finite but inf" in str(done.exception)


def test_the_largest_batch_follows_from_the_memory_and_nothing_too_large_is_tried(task: str) -> None:
    limit = 8 << 20
    found = find_batch_size(_spec(task, "Wide", parallel={"data": 1, "accumulate": 4}), limit_bytes=limit)
    assert found.is_limited
    by_size = {each.batch_size: each for each in found.tried}
    a_sample = (by_size[64].memory_bytes - by_size[32].memory_bytes) / 32
    assert a_sample >= 64 * 1024
    assert by_size[found.largest].memory_bytes <= limit < by_size[found.largest].memory_bytes + a_sample * 5
    refused = [each for each in found.tried if not each.fits]
    assert refused
    assert not any(each.was_run for each in refused)
    assert all(each.samples_per_s > 0 for each in found.tried if each.fits)
    num_parameters, memory_bytes = measure_footprint(_spec(task, "Wide"))
    assert num_parameters == 16384
    assert memory_bytes == by_size[8].memory_bytes


def test_the_memory_of_a_function_in_numpy_is_counted(task: str) -> None:
    """The gates and states of a Tree-LSTM, which torch's allocator does not see."""
    some, more = (measure_footprint(_spec(task, "Trees", batch_size=size))[1] for size in (8, 16))
    states_bytes = 4 * 32 * 6 * 64  # of a tree
    assert more - some > 8 * states_bytes


def test_an_allocation_that_fails_ends_the_doubling_and_the_samples_do_too(task: str) -> None:
    assert find_batch_size(_spec(task, "Wide", args={"most": 40})).largest in (39, 40)
    whole = find_batch_size(_spec(task, "Parabola"))
    assert (whole.largest, whole.is_limited) == (64, False)
    with pytest.raises(OutOfMemory, match="not even one sample"):
        find_batch_size(_spec(task, "Wide", args={"most": 0}))


@pytest.mark.soak
def test_an_iterable_ends_the_search_where_its_samples_end(task: str) -> None:
    found = find_batch_size(_spec(task, "Flow"))
    assert (found.largest in (49, 50), found.is_limited) == (True, False)
    assert max(each.batch_size for each in found.tried) == found.largest
    assert find_batch_size(_spec(task, "Flow", args={"most": 20})).is_limited


def test_shoal_find_writes_a_picture_and_json_and_says_where(task: str, tmp_path: Path) -> None:
    for words in (["rate", f"{task}:Parabola"], ["batch", f"{task}:Wide", "--memory", "2M", "--up-to", "20"]):
        printed = said("find", *words, "threads=1", "--out", str(tmp_path / words[0]))
        picture, text = sorted((tmp_path / words[0]).iterdir(), key=lambda path: path.suffix, reverse=True)
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert json.loads(text.read_text())["task"] == words[1]
        assert str(picture) in printed
        assert "learning_rate=" in printed or "batch_size=20" in printed


@pytest.mark.parametrize(
    ("words", "out"),
    [(["find", "rate"], "a_file"), (["find", "batch"], "a_file/below"), (["ablate"], "/proc"), (["ablate"], "a_file")],
)
def test_a_folder_that_takes_no_files_is_said_before_the_work(
    words: list[str], out: str, task: str, tmp_path: Path
) -> None:
    (tmp_path / "a_file").touch()
    done = typed("", *words, f"{task}:Loud", "--out", str(tmp_path / out))
    assert isinstance(done.exception, ConfigError)
    assert (done.exception.field, done.exception.value) == ("--out", str(tmp_path / out))
    assert "reading data" not in done.output


@pytest.mark.parametrize("words", [["rate"], ["batch", "--json"]])
def test_what_is_found_is_printed_before_files_are_written(
    words: list[str], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    few = ["--up-to", "2"] if words[0] == "batch" else []
    words = [*words, *few, f"{task}:{'Loud' if few else 'Parabola'}", "threads=1", "batch_size=8"]
    done = typed("find", *words, "--out", str(tmp_path))
    assert isinstance(done.exception, ConfigError)
    assert "No space left on device" in str(done.exception)
    assert words[0] in done.stdout  # in a heading, or in a name of the JSON
    if few:
        assert "tried" in json.loads(done.stdout)
        assert "reading data" in done.stderr  # what a Task prints is no part of the JSON


def test_amounts_of_memory_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("4096", "512M", "2g", "1.5GiB")] == [4096, 512 << 20, 2 << 30, 3 << 29]
    for wrong in ("much", "0", "-1G", "2T"):
        with pytest.raises(ConfigError, match="512M or 2G"):
            parse_bytes(wrong)
