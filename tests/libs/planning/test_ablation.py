"""Ablations: which variants there are, differences seed by seed, failures as results, and the whole as typed."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import ConfigError, NotFinite
from shoal.libs.planning.ablate import PARAMETERS, AblationRun, build_variants, summarise_variants, train_variants
from shoal.train.launch.validate import choose_metric
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from typed import typed

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from shoal.data import Data
from shoal.train import Task


class Line(Task):
    parts = {"depth": {"depth": 0}, "bias": {"bias": False}}

    def __init__(self, *, depth: int = 1, bias: bool = True) -> None:
        self.depth, self.bias = depth, bias

    def model(self):
        hidden = [nn.Linear(4, 4, bias=self.bias) for _ in range(self.depth)]
        return nn.Sequential(*hidden, nn.Linear(4, 1, bias=self.bias))

    def data(self):
        inputs = torch.arange(64.0).reshape(16, 4) / 64
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + 1)
        return Data(data, data)

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()

    def metrics(self, outputs, batch):
        return {"mean_error": (outputs - batch[1]).abs().mean()}


class Loud(Line):
    def data(self):
        print("reading data")
        return super().data()
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSpec:
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the folder of a task is added
    path = tmp_path / f"ablated_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(TASK)
    stop = {"task": f"{path}:Line", "threads": 1, "batch_size": 8, "seed": 5, "stop": {"steps": 3}}
    return TrainSpec.parse(stop)


def test_the_variants_are_the_whole_and_each_part_or_what_is_named(spec: TrainSpec) -> None:
    every = build_variants(spec, [], [])
    assert [(each.name, each.spec.args) for each in every] == [
        ("whole", {}),
        ("depth", {"depth": 0}),
        ("bias", {"bias": False}),
    ]
    named = build_variants(spec, ["bias"], ["sgd=optimizer.name=sgd", "sgd=args.depth=2"])
    assert [each.name for each in named] == ["whole", "bias", "sgd"]
    assert (named[2].spec.optimizer.name, named[2].spec.args) == ("sgd", {"depth": 2})
    assert [each.name for each in build_variants(spec, [], ["small=args.depth=0"])] == ["whole", "small"]


@pytest.mark.parametrize(
    ("parts", "changes", "message"),
    [
        (["dept"], [], "no part of the task.*depth, bias"),
        ([], ["small"], "NAME=a.b=c"),
        ([], ["small=args.depth"], "NAME=a.b=c"),
        (["bias"], ["bias=args.depth=0"], "the name of two variants"),
        ([], ["x=optimiser.name=sgd"], "no such field"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    spec: TrainSpec, parts: list[str], changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_variants(spec, parts, changes)


def test_a_variant_that_cannot_be_trained_is_named_before_anything_is(spec: TrainSpec) -> None:
    def never(spec: TrainSpec) -> TrainResult:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"takes no such argument.*in 'deep'"):
        train_variants(build_variants(spec, [], ["deep=args={wide: 3}"]), 1, never)


def test_every_variant_has_every_seed_and_what_diverges_is_a_result(spec: TrainSpec) -> None:
    seen: list[tuple[int, object]] = []

    def train(each: TrainSpec) -> TrainResult:
        seen.append((each.seed, each.args.get("bias", True)))
        if not each.args.get("bias", True) and each.seed == 6:
            raise NotFinite("the loss", 3, None, None)
        return TrainResult("none", "steps", "", 0, 0, 1.0, {"accuracy": 0.5 + each.seed / 10})

    measured = train_variants(build_variants(spec, ["bias"], []), 2, train_recorded(train))
    assert seen == [(5, True), (5, False), (6, True), (6, False)]
    assert measured[3].failure.startswith("NotFinite: the loss is not finite in step 3")
    whole, without = summarise_variants(measured)
    assert whole.values["accuracy"].num == 2
    assert without.differences["accuracy"].num == 1
    assert without.failures == (measured[3].failure,)
    assert (whole.values[PARAMETERS].mean, without.differences[PARAMETERS].mean) == (25.0, -5.0)


def train_recorded(train: object) -> object:
    """With a run record of its own for each, as `train_variants` looks the times up there."""
    import shoal.runs

    def recorded(spec: TrainSpec) -> TrainResult:
        outcome: TrainResult = train(spec)  # type: ignore[operator]
        with shoal.runs.create("ablate", "{}") as recorder:
            return TrainResult(recorder.id, outcome.reason, "", 0, 0, 1.0, outcome.metrics)

    return recorded


def test_differences_are_taken_between_runs_of_one_seed() -> None:
    accuracy = {"whole": [0.9, 0.7, 0.8], "part": [0.85, 0.66, 0.74]}
    measured = [
        AblationRun(name, seed, {"accuracy": value})
        for name, values in accuracy.items()
        for seed, value in enumerate(values)
    ]
    whole, part = summarise_variants(measured)
    pairs = np.subtract(accuracy["part"], accuracy["whole"])
    assert part.differences["accuracy"].mean == pytest.approx(pairs.mean())
    assert part.differences["accuracy"].deviation == pytest.approx(pairs.std(ddof=1))
    assert part.differences["accuracy"].deviation < whole.values["accuracy"].deviation / 5  # the seed is no part of it
    assert whole.differences == {}


def test_the_metric_that_is_judged_by(spec: TrainSpec) -> None:
    names = ["loss", "f1", "accuracy"]
    assert choose_metric(names, spec) == "f1"
    assert choose_metric(names, spec.override(["stop.target=accuracy>=1"])) == "accuracy"
    assert choose_metric(names, spec, "loss") == "loss"
    with pytest.raises(ConfigError, match="there is loss, f1, accuracy"):
        choose_metric(names, spec, "recall")
    with pytest.raises(ConfigError, match=r"give Data\(validation="):
        choose_metric([], spec)


def test_a_metric_that_there_is_not_is_refused_before_anything_is_trained(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> TrainResult:
        raise AssertionError

    monkeypatch.setattr("shoal.libs.planning.ablate.fit_locally", never)
    done = typed("ablate", spec.task, "batch_size=8", "stop.steps=3", "--metric", "mean_eror")
    assert isinstance(done.exception, ConfigError)
    assert (done.exception.field, done.exception.remedy) == ("--metric", "there is loss, mean_error")


def test_runs_that_all_fail_are_written_and_shown(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(spec: TrainSpec, job: str, *, registers: bool, renews: bool) -> TrainResult:
        raise NotFinite("the loss", 3, None, None)

    monkeypatch.setattr("shoal.libs.planning.ablate.fit_locally", diverge)
    words = [spec.task, "threads=1", "batch_size=8", "stop.steps=3", "--part", "bias", "--seeds", "1"]
    done = typed("ablate", *words, "--out", str(tmp_path / "out"), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "bias did not end: NotFinite: the loss is not finite in step 3" in done.output
    files = {path.suffix: path for path in (tmp_path / "out").iterdir()}
    rows = list(csv.DictReader(files[".csv"].read_text().splitlines()))
    assert [row["failure"][:9] for row in rows] == ["NotFinite", "NotFinite"]
    assert json.loads(files[".json"].read_text())["runs"][1]["variant"] == "bias"


def test_shoal_ablate_trains_every_variant_and_writes_what_it_found(spec: TrainSpec, tmp_path: Path) -> None:
    words = [spec.task, "threads=1", "batch_size=8", "stop.steps=3", "--part", "depth", "--seeds", "1"]
    done = typed("ablate", *words, "--out", str(tmp_path / "out"), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "mean_error" in done.output
    begins = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert begins[:3] == ["variant", "whole", "depth"]
    assert "…" not in done.stdout
    assert "±" not in done.stdout  # of one seed
    files = {path.suffix: path for path in (tmp_path / "out").iterdir()}
    rows = list(csv.DictReader(files[".csv"].read_text().splitlines()))
    assert [(row["variant"], row["seed"], row["steps"], row["reason"]) for row in rows] == [
        ("whole", "0", "3", "steps"),
        ("depth", "0", "3", "steps"),
    ]
    assert all(float(row["step_s"]) > 0 and float(row["memory_bytes"]) > 0 and row["run"] for row in rows)
    whole, depth = json.loads(files[".json"].read_text())["variants"]
    assert (whole["is_whole"], depth["is_whole"]) == (True, False)
    assert depth["differences"]["parameters"]["mean"] == -20.0
    assert depth["differences"]["loss"]["num"] == 1


def test_what_is_found_is_printed_before_files_are_written(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(spec: TrainSpec, job: str, *, registers: bool, renews: bool) -> TrainResult:
        if (tmp_path / "out").is_dir():
            (tmp_path / "out").rmdir()
        (tmp_path / "out").touch()  # in the place of the folder
        raise NotFinite("the loss", 3, None, None)

    monkeypatch.setattr("shoal.libs.planning.ablate.fit_locally", diverge)
    task = spec.task.replace(":Line", ":Loud")
    words = [task, "threads=1", "batch_size=8", "stop.steps=3", "--part", "bias", "--seeds", "1", "--json"]
    done = typed("ablate", *words, "--out", str(tmp_path / "out"))
    assert "reading data" in done.stderr  # what a Task prints is no part of the JSON
    assert isinstance(done.exception, ConfigError)
    assert done.exception.field == "--out"
    assert len(json.loads(done.stdout)["runs"]) == 2
