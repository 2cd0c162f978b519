"""The recipes' Tasks, on data small enough for unit tests: what they read, what they measure, and that they learn."""

import gzip
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.batch_tree import slice_samples
from shoal.data import Data, Loader, fingerprint
from shoal.libs.trees.syntax_tree import KIND_OF_TOKEN, KINDS, MASKED
from shoal.train.launch.overrides import load_recipe
from shoal.train.task import Task, load_task_file, make_task

ROOT = Path(__file__).parents[2]
RECIPES = ["lenet", "transformer", "forecaster", "trees"]


def recipe(name: str) -> Any:
    """The module of a recipe, loaded as the Trainer loads it."""
    return load_task_file(ROOT / "jobs" / f"{name}.py", name)


def task_of(name: str, **args: object) -> Task:
    return make_task(str(ROOT / "jobs" / f"{name}.py"), args)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), compresslevel=1))


def fashion(folder: Path) -> Task:
    """64 dark and bright images for each half."""
    random = np.random.default_rng(0)
    for part in ("train", "t10k"):
        labels = np.arange(64) % 2
        images = random.integers(0, 100, (64, 28, 28)) + 150 * labels[:, None, None]
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels)
    return task_of("lenet", folder=str(folder))


def text(folder: Path) -> Task:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return task_of("transformer", text=str(folder / "text.txt"), width=16, depth=1, heads=2, context=16)


def load(folder: Path) -> Task:
    return task_of("forecaster", num_hours=300, window=12, horizon=4, hidden=8)


MODULE = """
import {name}

LIMIT = {name}.limit({number}, [1, 2, 3]) or "none"

class Reader:
    size: int = {number}

    def read(self, path, *others):
        for each in [path, *others]:
            if each.startswith("x"):
                yield self.open(each, mode="r")[{number}]

def main(argument=None):
    while not done(argument):
        total = argument + sum(number * {number} for number in range(10) if number != 3)
    return {{"total": total, **{name}.defaults}}
"""


def syntax(folder: Path, **args: object) -> Task:
    """Ten files of three trees each, and what is none of them."""
    for number in range(10):
        (folder / f"m{number}.py").write_text(MODULE.format(name=f"package{number}", number=number))
    (folder / "m2_broken.py").write_text("def f(:")
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_it.py").write_text(MODULE.format(name="a", number=1))
    return task_of("trees", folder=str(folder), files=0, width=8, hidden=16, **args)


SMALL: dict[str, Callable[[Path], Task]] = {"lenet": fashion, "transformer": text, "forecaster": load, "trees": syntax}


def batch_of(source: Any, indices: np.ndarray) -> Any:
    if isinstance(source, TensorDataset):
        return tuple(tensor[torch.from_numpy(indices)] for tensor in source.tensors)
    if hasattr(source, "batch"):
        return source.batch(indices)
    np.random.seed(0)  # as a loader does for each sample
    return recipe("trees").plan_batch([source[index % len(source)] for index in indices.tolist()])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_it_is_trained(name: str) -> None:
    spec = load_recipe(str(ROOT / "jobs" / f"{name}.py"))
    assert not spec.stop.is_empty
    assert spec.name
    accepted = spec.override(["parallel=ddp", "workers=2", "seed=3"])
    assert accepted.resolve_dims().data == 2


@pytest.mark.parametrize("name", RECIPES)
def test_every_part_that_can_be_removed_makes_a_task_and_a_network(name: str) -> None:
    parts = task_of(name).parts
    assert len(parts) >= 3
    for args in parts.values():
        assert sum(each.numel() for each in task_of(name, **args).model().parameters()) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_few_steps_make_the_loss_smaller(name: str, tmp_path: Path) -> None:
    task = SMALL[name](tmp_path)
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = batch_of(data.train, np.arange(32))
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = task.loss(model(*task.inputs(batch)), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_and_every_metric_are_means_over_the_samples(name: str, tmp_path: Path) -> None:
    """What a plan relies on when it splits a batch: 24 samples weigh three times as much as 8."""
    task = SMALL[name](tmp_path)
    torch.manual_seed(1)
    model = task.model().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    batch = batch_of(task.data().validation, np.arange(3, 35) % len(task.data().validation))

    def measured(part: Any) -> dict[str, float]:
        outputs = model(*task.inputs(part))
        found = {"loss": task.loss(outputs, part), **task.metrics(outputs, part)}
        assert all(value.shape == () for value in found.values())
        return {key: value.item() for key, value in found.items()}

    parts = (slice(None), slice(8), slice(8, 32))
    whole, first, rest = (measured(slice_samples(batch, part)) for part in parts)
    for key, value in whole.items():
        assert value == pytest.approx((first[key] + 3 * rest[key]) / 4, rel=1e-4), key


def test_lenet_takes_bytes_from_files_and_normalises_them_where_the_batch_is(tmp_path: Path) -> None:
    task = fashion(tmp_path)
    images, labels = batch = batch_of(task.data().train, np.arange(4))
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0, 1, 0, 1]
    (inputs,) = task.inputs(batch)
    assert inputs.shape == (4, 1, 28, 28)
    assert torch.allclose(inputs[:, 0] * 90 + 73, images.float(), atol=1e-3)
    asked = {"input": images[:, None].numpy().astype(np.float32)}
    np.testing.assert_allclose(task.preprocess(asked)["input"], inputs.numpy(), atol=1e-5)  # an endpoint does the same


def test_without_normalisation_an_endpoint_normalises_nothing_either() -> None:
    pixels = {"input": np.full((1, 1, 28, 28), 255.0, np.float32)}
    assert task_of("lenet", normalise=False).preprocess(pixels) == pixels


def test_where_fashion_is_absent_images_are_generated_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = recipe("lenet")
    small = [module.GeneratedStandIn(300, seed=1), module.GeneratedStandIn(100, seed=2)]
    monkeypatch.setattr(module, "INSTALLED", "/nowhere/fashion-mnist")
    monkeypatch.setattr(module, "GeneratedStandIn", lambda num_images, seed: small[seed - 1])
    module.stand_ins.cache_clear()
    data = task_of("lenet", folder="/nowhere/fashion-mnist").data()
    module.stand_ins.cache_clear()
    assert "GENERATED" in capsys.readouterr().out
    images, labels = data.train.tensors
    assert fingerprint(data.train) != fingerprint(TensorDataset(images, labels))  # the class's name is in it
    assert images.dtype == torch.uint8
    assert images.shape == (300, 28, 28)
    assert sorted(set(labels.tolist())) == list(range(10))
    means = torch.stack([images[labels == label].float().mean(0) for label in range(10)]).flatten(1)
    others, known = data.validation.tensors
    nearest = torch.cdist(others.float().flatten(1), means).argmin(1)
    assert (nearest == known).float().mean() > 0.5  # they can be learned


def test_text_windows_follow_each_other_and_validation_is_text_never_trained_on(tmp_path: Path) -> None:
    data = text(tmp_path).data()
    written = (tmp_path / "text.txt").read_bytes()
    assert bytes(data.train[0].tolist()) == written[:17]
    assert bytes(data.train[1].tolist()) == written[8:25]
    assert len(data.train[len(data.train) - 1]) == 17
    first = written[len(written) * 9 // 10 :]
    assert bytes(data.validation[0].tolist()) == first[:17]
    with pytest.raises(IndexError):
        data.train[len(data.train)]


def test_the_perplexity_of_a_uniform_guess_is_the_number_of_bytes(tmp_path: Path) -> None:
    task = text(tmp_path)
    batch = batch_of(task.data().train, np.arange(4))
    found = task.metrics(torch.zeros(4, 16, 256), batch)
    assert found["window_perplexity"].item() == pytest.approx(256, rel=1e-4)
    assert found["bits_per_byte"].item() == pytest.approx(8, rel=1e-4)
    assert task.loss(torch.zeros(4, 16, 256), batch).item() == pytest.approx(math.log(256), rel=1e-5)


def test_forecasting_zero_is_the_forecast_of_yesterday() -> None:
    task, hours = load(Path()), recipe("forecaster").series(300)
    data: Data = task.data()
    assert len(data.train) == (300 - 24) * 4 // 5 - 12 - 4 + 1
    batch = batch_of(data.train, np.array([10]))
    begin = 24 + 10 + 12  # the first hour to forecast
    naive = np.abs(hours[begin : begin + 4] - hours[begin - 24 : begin - 20]).mean()
    found = task.metrics(torch.zeros(1, 4), batch)
    assert found["mae"].item() == found["mae_seasonal_naive"].item() == pytest.approx(naive, rel=1e-5)
    past = batch[0]
    assert np.allclose(past[0, :, 0], hours[34:46] - hours[10:22])
    assert np.allclose(past[0, :, 1], np.sin(2 * np.pi * np.arange(34, 46) / 24), atol=1e-6)


def test_trees_are_those_of_functions_and_statements_of_files_that_can_be_parsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = syntax(tmp_path)
    data = task.data()
    # Of 11 files the fifth and the tenth are held back, and one cannot be parsed.
    assert (len(data.train), len(data.validation)) == (8 * 3, 2 * 3)
    assert task.data().train.forest is data.train.forest  # read once
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in said] == ["training: 9 files", "validation: 2 files"]
    assert f"{len(data.train)} trees of {data.train.sample_sizes.sum():,} nodes" in said[0]
    small = task_of("trees", folder=str(tmp_path), files=0, max_nodes=30).data().train
    assert 0 < len(small) < len(data.train)
    assert small.sample_sizes.max() <= 30


def test_statistics_of_trees_are_right(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("f(a, b)\nx = -1\n")
    forest, nothing = recipe("trees").read_folder(str(tmp_path), 0, 1, 100)
    assert forest.sizes.tolist() == [5, 4]  # Expr, Call, three Names; Assign, Name, UnaryOp, Constant
    assert forest.compute_depths().tolist() == [2, 2]
    assert forest.count_children().tolist() == [1, 3, 0, 0, 0, 2, 0, 1, 0]
    assert forest.describe() == (
        "2 trees of 9 nodes, 56% of them leaves; nodes of a tree: mean 4.5, median 4, at most 5; "
        "depth: mean 2.0, median 2, at most 2; children of an inner node: mean 1.8, median 2, at most 3"
    )
    assert nothing.describe() == "no trees"


def test_hidden_nodes_are_inner_ones_and_their_kind_is_not_to_be_seen(tmp_path: Path) -> None:
    data = syntax(tmp_path, hidden_share=0.3).data()
    assert data.train.sample_sizes.tolist() == [len(data.train[index][0]) for index in range(len(data.train))]
    for index in range(len(data.train)):
        parents, seen, kinds, is_hidden, is_commonest = data.train[index]
        assert is_hidden.any()
        assert set(np.flatnonzero(is_hidden)) <= set(parents.tolist())
        assert (seen[is_hidden] == MASKED).all()
        assert (seen[~is_hidden] != MASKED).all()
        assert (KIND_OF_TOKEN[seen[~is_hidden]] == kinds[~is_hidden]).all()
        assert (is_commonest == (kinds == data.train.commonest)).all()


def test_each_epoch_hides_other_nodes_for_training_and_the_same_ones_for_validation(tmp_path: Path) -> None:
    data = syntax(tmp_path, hidden_share=0.3).data()
    for source, differs in ((data.train, True), (data.validation, False)):
        loader = Loader(source, batch_size=len(source), shuffle=False, collate=data.collate)
        first = next(iter(loader)).labels["is_hidden"]
        loader.seek(epoch=1)
        second = next(iter(loader)).labels["is_hidden"]
        assert torch.equal(first, second) != differs


def test_a_share_of_zero_hides_one_node_of_each_tree(tmp_path: Path) -> None:
    source = syntax(tmp_path, hidden_share=0.0).data().train
    assert all(source[index][3].sum() == 1 for index in range(len(source)))


def test_trees_count_alike_whatever_their_size(tmp_path: Path) -> None:
    task = syntax(tmp_path)
    batch = batch_of(task.data().train, np.arange(6))
    outputs = torch.nn.functional.one_hot(batch.labels["kind"].long(), len(KINDS)).float()
    first_tree = batch.arrange_outputs(np.repeat(np.arange(6), batch.sizes)) == 0
    outputs[first_tree] = 0.0
    outputs[first_tree, KINDS.index("other")] = 1.0
    assert task.metrics(outputs, batch)["accuracy"].item() == pytest.approx(5 / 6)
