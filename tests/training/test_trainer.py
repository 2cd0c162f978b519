"""The training loop in one process: what it measures, when it stops, what it keeps, and how it goes on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shoal.atomic_file import move_synced
from shoal.checkpoint import Checkpointer
from shoal.checkpoint.staging_buffer import StagingBuffer
from shoal.data import Data
from shoal.errors import ConfigError, NotFinite, SpecMismatch
from shoal.parallel import World
from shoal.train.loop.checkpointing import find_not_finite
from shoal.train.loop.step_reports import find_remedy
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from train_task import Points, Toy, seen

STEPS_PER_EPOCH = 8


class Notes:
    """A journal that keeps everything."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.histograms: list[tuple[int, str]] = []

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self.metrics.setdefault(step, {}).update(values)

    def record_event(self, kind: str, /, **details: object) -> None:
        json.dumps(details)
        self.events.append((kind, details))

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self.histograms.append((step, name))

    def flush(self) -> None:
        pass

    @property
    def losses(self) -> dict[int, float]:
        return {step: values["train/loss"] for step, values in self.metrics.items() if "train/loss" in values}


def spec_of(**changes: Any) -> TrainSpec:
    base = {
        "task": "Toy",
        "batch_size": 32,
        "stop": {"epochs": 2},
        "log_every_steps": 1,
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"asynchronous": False},
    }
    return TrainSpec.parse({**base, **changes})


def train(folder: Path, spec: TrainSpec, journal: Notes | None = None, **args: Any) -> TrainResult:
    should_stop: Callable[[], bool] = args.pop("should_stop", lambda: False)
    folder.mkdir(exist_ok=True)
    world = World.single("cpu")
    return Trainer(spec, Toy(**args), world, folder, run_id="r", journal=journal, should_stop=should_stop).run()


def weights_of(outcome: TrainResult) -> dict[str, torch.Tensor]:
    assert outcome.weights is not None
    return safetensors.torch.load_file(outcome.weights)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


def test_the_optimizer_waits_until_its_moments_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StagingBuffer.finish_copy
    monkeypatch.setattr(StagingBuffer, "finish_copy", lambda staging: (time.sleep(0.05), real(staging)))  # many steps
    shards = []
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        spec = spec_of(
            average=0.9, stop={"steps": 6}, checkpoint={"every_steps": 2, "asynchronous": asynchronous, "keep": 3}
        )
        train(folder, spec)
        shards.append([path.read_bytes() for path in sorted(folder.rglob("shard-*"))])
    assert len(shards[0]) == 3
    assert shards[0] == shards[1]


def test_it_learns_and_says_how_it_went(tmp_path: Path) -> None:
    notes = Notes()
    outcome = train(tmp_path, spec_of(stop={"epochs": 4}), notes)
    assert (outcome.reason, outcome.steps, outcome.selected_step) == ("epochs", 32, 32)
    assert outcome.metrics["accuracy"] > 0.9
    assert sorted(notes.losses) == list(range(1, 33))
    assert notes.losses[32] < notes.losses[1] / 3
    evaluated = [step for step, values in notes.metrics.items() if "validation/accuracy" in values]
    assert evaluated == [8, 16, 24, 32]
    last = notes.metrics[32]
    assert last["train/epoch"] == 4.0
    assert 0 <= last["wait/data"] <= 1
    assert {"samples/per_s", "step/seconds", "time/training_s", "train/learning_rate"} <= last.keys()
    kinds = [kind for kind, _ in notes.events]
    assert list(dict.fromkeys(kinds)) == ["training", "cost_measured", "stopped"]  # of long steps, twice


def test_the_weights_that_are_left_are_those_that_were_evaluated(tmp_path: Path) -> None:
    outcome = train(tmp_path, spec_of())
    model = Toy().model()
    model.load_state_dict(weights_of(outcome))
    validation = Toy().data().validation
    assert validation is not None
    features = torch.stack([features for features, _, _ in validation])
    classes = torch.stack([label for _, _, label in validation])
    found = (model.eval()(features).argmax(-1) == classes).float().mean()
    assert float(found) == pytest.approx(outcome.metrics["accuracy"], abs=1e-6)


@pytest.mark.parametrize(
    ("stopped_at", "extras"),
    [(5, {}), (8, {"average": 0.9}), (13, {"clip_norm": 0.5, "schedule": {"name": "one_cycle"}})],
    ids=str,
)
def test_a_resumed_run_has_the_losses_of_the_undisturbed_one_to_the_bit(
    tmp_path: Path, stopped_at: int, extras: dict[str, Any]
) -> None:
    spec = spec_of(**extras)
    whole = Notes()
    first = Notes()
    second = Notes()
    expected = train(tmp_path / "whole", spec, whole)
    steps = iter(range(1, 100))
    part = train(tmp_path / "parts", spec, first, should_stop=lambda: next(steps) >= stopped_at)
    assert (part.reason, part.steps, part.weights) == ("interrupted", stopped_at, None)
    resumed = train(tmp_path / "parts", spec, second)
    assert first.losses | second.losses == whole.losses
    said_again = {step: loss for step, loss in second.losses.items() if step <= stopped_at}
    assert said_again.items() <= first.losses.items()
    assert min(second.losses.keys() - said_again.keys()) == stopped_at + 1
    assert second.events[0] == ("restored", {"step": stopped_at, "damaged": []})
    assert_same(weights_of(resumed), weights_of(expected))
    assert resumed.metrics == expected.metrics


class Late(nn.Module):
    """Trains its second layer from the seventh pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 3)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return self.first(features) + (self.second(features) if self.passes > 6 else 0.0)


class LateToy(Toy):
    """With an optimiser that makes other state of its first gradient than of none."""

    def model(self) -> nn.Module:
        return Late()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.NAdam(parameters, lr=0.01)


def test_what_had_no_gradient_before_a_checkpoint_begins_with_its_first_one(tmp_path: Path) -> None:
    found = []
    for name, stops in (("whole", [12]), ("parts", [4, 12])):
        for stop in stops:
            spec = spec_of(stop={"steps": stop}, optimizer={})
            outcome = Trainer(spec, LateToy(), World.single("cpu"), tmp_path / name).run()
        found.append(weights_of(outcome))
    assert_same(*found)


def test_an_average_may_begin_with_a_resumption_and_end_with_another(tmp_path: Path) -> None:
    notes = Notes()
    without = spec_of(stop={"steps": 4})
    last = Notes()
    weights = weights_of(train(tmp_path, without))
    begun = train(tmp_path, spec_of(stop={"steps": 5}, average=0.9), notes)
    assert ("average_begun", {"step": 4}) in notes.events
    after = train(tmp_path / "straight", spec_of(stop={"steps": 5}))  # the weights of step 5 themselves
    for name, average in weights_of(begun).items():
        if average.is_floating_point() and "running" not in name:
            torch.testing.assert_close(average, 0.1 * weights[name] + 0.9 * weights_of(after)[name])
    ended = train(tmp_path, spec_of(stop={"steps": 8}), last)
    assert_same(weights_of(ended), weights_of(train(tmp_path / "whole", spec_of(stop={"steps": 8}))))
    assert "average_begun" not in [kind for kind, _ in last.events]


class Noisy(Toy):
    """Its validation data draws random numbers."""

    def data(self) -> Data:
        return Data(super().data().train, Drawn(50, 2))


class Drawn(Points):
    deterministic = False

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        features, index, label = super().__getitem__(index)
        return features + torch.randn(features.shape), index, label


def test_a_resumed_run_evaluates_with_the_draws_of_the_undisturbed_one(tmp_path: Path) -> None:
    def run(folder: Path, stopped_at: int) -> dict[int, float]:
        folder.mkdir(exist_ok=True)
        notes, steps = Notes(), iter(range(1, 100))
        world = World.single("cpu")
        how: dict[str, Any] = {"journal": notes, "should_stop": lambda: next(steps) >= stopped_at}
        Trainer(spec_of(stop={"epochs": 4}), Noisy(), world, folder, **how).run()
        return {step: row["validation/loss"] for step, row in notes.metrics.items() if "validation/loss" in row}

    whole = run(tmp_path / "whole", 99)
    assert run(tmp_path / "parts", 17) | run(tmp_path / "parts", 99) == whole
    assert len(whole) == 4


def test_no_sample_is_seen_twice_or_skipped_over_a_stop_in_mid_epoch(tmp_path: Path) -> None:
    steps = iter(range(1, 100))
    spec = spec_of(stop={"epochs": 1})
    train(tmp_path / "run", spec, notes=str(tmp_path), should_stop=lambda: next(steps) >= 3)
    train(tmp_path / "run", spec, notes=str(tmp_path))
    assert sorted(seen(tmp_path)) == list(range(256))


def test_a_run_that_had_ended_ends_again_at_once(tmp_path: Path) -> None:
    first = train(tmp_path, spec_of(stop={"epochs": 4, "target": "accuracy>=0.9"}))
    again, notes = train(tmp_path, spec_of(stop={"epochs": 4, "target": "accuracy>=0.9"}), given := Notes()), given
    assert first.reason == again.reason == "target"
    assert (again.steps, again.metrics) == (first.steps, first.metrics)
    assert max(notes.losses) == first.steps  # said again; no further step was made


def test_what_was_reported_last_before_a_death_is_reported_again(tmp_path: Path) -> None:
    """A cluster that dies takes along what its driver has not recorded yet, and leaves the checkpoint of that step."""
    whole, after = Notes(), Notes()
    spec = spec_of(stop={"steps": 20}, evaluate={"every_steps": 9})
    steps = iter(range(1, 100))
    train(tmp_path / "run", spec, whole, should_stop=lambda: next(steps) >= 10)
    train(tmp_path / "run", spec_of(stop={"steps": 11}), after)
    for step in (8, 9, 10):
        assert after.metrics[step] == pytest.approx(whole.metrics[step], nan_ok=True)
    assert "validation/loss" in after.metrics[9]


def test_under_convergence_the_best_network_is_kept(tmp_path: Path) -> None:
    spec = spec_of(
        stop={"steps": 200, "convergence": {"metric": "accuracy", "patience": 2}}, evaluate={"every_steps": 4}
    )
    notes = Notes()
    outcome = train(tmp_path, spec, notes)
    accuracy = {step: v["validation/accuracy"] for step, v in notes.metrics.items() if "validation/accuracy" in v}
    assert outcome.reason == "convergence"
    assert outcome.selected_step < outcome.steps == max(accuracy)
    assert outcome.metrics["accuracy"] == accuracy[outcome.selected_step] == max(accuracy.values())


class Killed(BaseException):
    """What kill -9 is to a process."""


def test_the_best_network_is_known_as_that_though_it_was_killed_while_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = iter(range(9))

    def killed_at_the_second(draft: Path, path: Path) -> None:
        if next(notes) == 1:
            raise Killed
        move_synced(draft, path)

    spec = spec_of(
        stop={"steps": 8, "convergence": {"metric": "loss", "patience": 9}},
        evaluate={"every_steps": 4},
        checkpoint={"asynchronous": False},
    )
    with monkeypatch.context() as patched:
        patched.setattr("shoal.atomic_file.move_synced", killed_at_the_second)
        with pytest.raises(Killed):
            train(tmp_path, spec)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert [found.step for found in (checkpointer.latest(), checkpointer.best()) if found] == [8, 4]
    assert train(tmp_path, spec).selected_step == 8
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        best = checkpointer.best()
        assert best is not None
        assert best.step == 8


def test_a_loss_that_is_not_finite_stops_it_with_step_samples_and_checkpoint(tmp_path: Path) -> None:
    spec = spec_of(stop={"epochs": 3}, checkpoint={"every_steps": 2, "asynchronous": False})
    with pytest.raises(NotFinite) as raised:
        train(tmp_path / "run", spec, notes=str(tmp_path), fault="nan", fault_step=5)
    lines = (tmp_path / "samples-0.jsonl").read_text().splitlines()
    assert raised.value.step == 6  # as the record counts them
    assert raised.value.indices == sorted(json.loads(lines[5]))
    assert str(raised.value.checkpoint).endswith("step-000000004")
    notes = Notes()
    train(tmp_path / "run", spec, notes, notes=str(tmp_path))
    assert notes.events[0] == ("restored", {"step": 4, "damaged": []})  # the last good one


def test_a_value_of_the_data_that_is_not_finite_is_named() -> None:
    samples = [(torch.zeros(3), 1.0), {"x": torch.tensor([[1.0, float("inf")]]), "y": 2}, (torch.zeros(2), math.nan)]
    assert find_remedy(samples, [0], False) == ""
    assert "sample 1 of the data has inf in its ['x'] at [0, 1]: repair it" in find_remedy(samples, [0, 1, 2], True)
    assert "sample 2 of the data has nan in its [1] at []:" in find_remedy(samples, [2], False)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["checkpoint.every_steps=2"], id="saved after so many steps"),
        pytest.param(["checkpoint.every_s=0.000001"], id="saved by time"),
        pytest.param(["stop.steps=6", "checkpoint.every_steps=4", "average=0.9"], id="the last step"),
        pytest.param(
            ["stop.convergence.metric=accuracy", "checkpoint.every_steps=4", "evaluate.every_steps=6"],
            id="the best one",
        ),
    ],
)
def test_weights_that_a_gradient_has_spoilt_are_neither_saved_nor_registered(tmp_path: Path, words: list[str]) -> None:
    """The loss of that step is finite, and without clip_norm nobody looks at the gradient: the next loss is NaN."""
    spec = spec_of().override(words)
    with pytest.raises(NotFinite) as raised:
        train(tmp_path / "run", spec, notes=str(tmp_path), fault="gradient", fault_step=5)
    assert (raised.value.what, raised.value.step) == ("the weight 0.weight", 6)
    good = Path(str(raised.value.checkpoint))
    assert good.name in ("step-000000004", "step-000000005")
    assert not (tmp_path / "run" / "checkpoints" / "step-000000006").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    outcome = train(tmp_path / "run", spec.override(["stop.steps=8"]), notes=str(tmp_path))
    assert all(weight.isfinite().all() for weight in weights_of(outcome).values())


def test_weights_are_looked_at_value_by_value_where_a_norm_overflows() -> None:
    large, infinite = torch.full((4,), 1e30), torch.tensor([1e30, float("-inf")])
    given = {"empty": torch.empty(0), "large": large, "small": torch.ones(2, dtype=torch.bfloat16)}
    named = [(name, torch.nn.Parameter(value)) for name, value in given.items()]
    masked = torch.nn.Parameter(infinite, requires_grad=False)  # on purpose, and not trained
    assert find_not_finite([]) is None
    assert find_not_finite([*named, ("mask", masked)]) is None
    assert find_not_finite([*named, ("infinite", torch.nn.Parameter(infinite))]) == "infinite"


def test_histograms_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    notes = Notes()
    train(tmp_path, spec_of(stop={"steps": 4}, histograms_every_steps=2), notes)
    assert {step for step, _ in notes.histograms} == {2, 4}
    assert {"weights/0.weight", "gradients/0.weight"} <= {name for _, name in notes.histograms}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train(tmp_path, spec_of(stop={"steps": 2}))
    with pytest.raises(SpecMismatch):
        train(tmp_path, spec_of(stop={"steps": 4}), hidden=8)


def test_metrics_that_some_batches_lack_are_refused(tmp_path: Path) -> None:
    class Sometimes(Toy):
        batches = 0

        def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
            self.batches += 1
            metrics = super().metrics(outputs, batch)
            return metrics if self.batches == 2 else {**metrics, "of a class": metrics["accuracy"]}

    spec = spec_of(stop={"steps": 2}, evaluate={"batch_size": 32})
    with pytest.raises(ConfigError, match=r"of a class.* not measured of every batch alike"):
        Trainer(spec, Sometimes(), World.single("cpu"), tmp_path).run()


def test_selective_backprop_learns_too(tmp_path: Path) -> None:
    outcome = train(tmp_path, spec_of(stop={"epochs": 6}, selective_backprop={"beta": 1.0}))
    assert outcome.metrics["accuracy"] > 0.8


def test_reports_are_made_however_often_it_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.train.loop.trainer.INTERVAL_S", 0.0)
    notes = Notes()
    train(tmp_path, spec_of(log_every_steps=None, evaluate={"every_steps": 2}, stop={"steps": 40}), notes)
    # The ranks come together at each evaluation, so that no step between two of them is one at which they have to.
    assert set(range(2, 41, 2)) <= notes.losses.keys()
