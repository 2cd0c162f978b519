"""The training loop in one process: what it measures, when it stops, what it keeps, and how it goes on."""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.atomic_file import move_synced
from shoal.checkpoint import Checkpointer
from shoal.checkpoint.staging_buffer import StagingBuffer
from shoal.data import Data
from shoal.errors import ConfigError, NotFinite, SpecMismatch
from shoal.train.loop.checkpointing import find_not_finite
from shoal.train.loop.step_reports import find_remedy
from train_task import Points, Toy, seen
from training.toy_run import assert_same, spec_of, train_toy


def test_the_optimizer_waits_until_its_moments_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StagingBuffer.finish_copy
    monkeypatch.setattr(StagingBuffer, "finish_copy", lambda staging: (time.sleep(0.05), real(staging)))  # many steps
    shards = []
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        spec = spec_of(
            average=0.9, stop={"steps": 6}, checkpoint={"every_steps": 2, "asynchronous": asynchronous, "keep": 3}
        )
        train_toy(folder, spec=spec)
        shards.append([path.read_bytes() for path in sorted(folder.rglob("shard-*"))])
    assert len(shards[0]) == 3
    assert shards[0] == shards[1]


def test_it_learns_and_says_how_it_went(tmp_path: Path) -> None:
    outcome = train_toy(tmp_path, stop={"epochs": 4})
    assert (outcome.result.reason, outcome.result.steps, outcome.result.selected_step) == ("epochs", 32, 32)
    assert outcome.result.metrics["accuracy"] > 0.9
    assert sorted(outcome.losses) == list(range(1, 33))
    assert outcome.losses[32] < outcome.losses[1] / 3
    assert list(outcome.log.get_curve("validation/accuracy")) == [8, 16, 24, 32]
    last = outcome.log.metrics[32]
    assert last["train/epoch"] == 4.0
    assert 0 <= last["wait/data"] <= 1
    assert {"samples/per_s", "step/seconds", "time/training_s", "train/learning_rate"} <= last.keys()
    kinds = [kind for kind, _ in outcome.log.events]
    assert list(dict.fromkeys(kinds)) == ["training", "cost_measured", "stopped"]  # of long steps, twice


def test_the_weights_that_are_left_are_those_that_were_evaluated(tmp_path: Path) -> None:
    outcome = train_toy(tmp_path)
    model = Toy().model()
    model.load_state_dict(outcome.weights)
    validation = Toy().data().validation
    assert validation is not None
    features = torch.stack([features for features, _, _ in validation])
    classes = torch.stack([label for _, _, label in validation])
    found = (model.eval()(features).argmax(-1) == classes).float().mean()
    assert float(found) == pytest.approx(outcome.result.metrics["accuracy"], abs=1e-6)


@pytest.mark.parametrize(
    ("stopped_at", "extras"),
    [(5, {}), (8, {"average": 0.9}), (13, {"clip_norm": 0.5, "schedule": {"name": "one_cycle"}})],
    ids=str,
)
def test_a_resumed_run_has_the_losses_of_the_undisturbed_one_to_the_bit(
    tmp_path: Path, stopped_at: int, extras: dict[str, Any]
) -> None:
    spec = spec_of(**extras)
    expected = train_toy(tmp_path / "whole", spec=spec)
    part = train_toy(tmp_path / "parts", spec=spec, interrupt_after=stopped_at)
    assert (part.result.reason, part.result.steps, part.result.weights) == ("interrupted", stopped_at, None)
    resumed = train_toy(tmp_path / "parts", spec=spec)
    assert part.losses | resumed.losses == expected.losses
    said_again = {step: loss for step, loss in resumed.losses.items() if step <= stopped_at}
    assert said_again.items() <= part.losses.items()
    assert min(resumed.losses.keys() - said_again.keys()) == stopped_at + 1
    assert resumed.log.events[0] == ("restored", {"step": stopped_at, "damaged": []})
    assert_same(resumed.weights, expected.weights)
    assert resumed.result.metrics == expected.result.metrics


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
            outcome = train_toy(tmp_path / name, LateToy(), stop={"steps": stop}, optimizer={})
        found.append(outcome.weights)
    assert_same(*found)


def test_an_average_may_begin_with_a_resumption_and_end_with_another(tmp_path: Path) -> None:
    weights = train_toy(tmp_path, stop={"steps": 4}).weights
    begun = train_toy(tmp_path, stop={"steps": 5}, average=0.9)
    assert ("average_begun", {"step": 4}) in begun.log.events
    after = train_toy(tmp_path / "straight", stop={"steps": 5})  # the weights of step 5 themselves
    for name, average in begun.weights.items():
        if average.is_floating_point() and "running" not in name:
            torch.testing.assert_close(average, 0.1 * weights[name] + 0.9 * after.weights[name])
    ended = train_toy(tmp_path, stop={"steps": 8})
    assert_same(ended.weights, train_toy(tmp_path / "whole", stop={"steps": 8}).weights)
    assert "average_begun" not in [kind for kind, _ in ended.log.events]


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
        found = train_toy(folder, Noisy(), stop={"epochs": 4}, interrupt_after=stopped_at)
        return found.log.get_curve("validation/loss")

    whole = run(tmp_path / "whole", 99)
    assert run(tmp_path / "parts", 17) | run(tmp_path / "parts", 99) == whole
    assert len(whole) == 4


def test_no_sample_is_seen_twice_or_skipped_over_a_stop_in_mid_epoch(tmp_path: Path) -> None:
    spec = spec_of(stop={"epochs": 1})
    train_toy(tmp_path / "run", Toy(notes=str(tmp_path)), spec=spec, interrupt_after=3)
    train_toy(tmp_path / "run", Toy(notes=str(tmp_path)), spec=spec)
    assert sorted(seen(tmp_path)) == list(range(256))


def test_a_run_that_had_ended_ends_again_at_once(tmp_path: Path) -> None:
    first = train_toy(tmp_path, stop={"epochs": 4, "target": "accuracy>=0.9"})
    again = train_toy(tmp_path, stop={"epochs": 4, "target": "accuracy>=0.9"})
    assert first.result.reason == again.result.reason == "target"
    assert (again.result.steps, again.result.metrics) == (first.result.steps, first.result.metrics)
    assert max(again.losses) == first.result.steps  # said again; no further step was made


def test_what_was_reported_last_before_a_death_is_reported_again(tmp_path: Path) -> None:
    """A cluster that dies takes along what its driver has not recorded yet, and leaves the checkpoint of that step."""
    spec = spec_of(stop={"steps": 20}, evaluate={"every_steps": 9})
    whole = train_toy(tmp_path / "run", spec=spec, interrupt_after=10).log
    after = train_toy(tmp_path / "run", stop={"steps": 11}).log
    for step in (8, 9, 10):
        assert after.metrics[step] == pytest.approx(whole.metrics[step], nan_ok=True)
    assert "validation/loss" in after.metrics[9]


def test_under_convergence_the_best_network_is_kept(tmp_path: Path) -> None:
    spec = spec_of(
        stop={"steps": 200, "convergence": {"metric": "accuracy", "patience": 2}}, evaluate={"every_steps": 4}
    )
    outcome = train_toy(tmp_path, spec=spec)
    accuracy = outcome.log.get_curve("validation/accuracy")
    assert outcome.result.reason == "convergence"
    assert outcome.result.selected_step < outcome.result.steps == max(accuracy)
    assert outcome.result.metrics["accuracy"] == accuracy[outcome.result.selected_step] == max(accuracy.values())


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
            train_toy(tmp_path, spec=spec)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert [found.step for found in (checkpointer.latest(), checkpointer.best()) if found] == [8, 4]
    assert train_toy(tmp_path, spec=spec).result.selected_step == 8
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        best = checkpointer.best()
        assert best.step == 8


def test_a_loss_that_is_not_finite_stops_it_with_step_samples_and_checkpoint(tmp_path: Path) -> None:
    spec = spec_of(stop={"epochs": 3}, checkpoint={"every_steps": 2, "asynchronous": False})
    with pytest.raises(NotFinite) as raised:
        train_toy(tmp_path / "run", Toy(notes=str(tmp_path), fault="nan", fault_step=5), spec=spec)
    lines = (tmp_path / "samples-0.jsonl").read_text().splitlines()
    assert raised.value.step == 6  # as the record counts them
    assert raised.value.indices == sorted(json.loads(lines[5]))
    assert str(raised.value.checkpoint).endswith("step-000000004")
    notes = train_toy(tmp_path / "run", Toy(notes=str(tmp_path)), spec=spec).log
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
        train_toy(tmp_path / "run", Toy(notes=str(tmp_path), fault="gradient", fault_step=5), spec=spec)
    assert (raised.value.what, raised.value.step) == ("the weight 0.weight", 6)
    good = Path(str(raised.value.checkpoint))
    assert good.name in ("step-000000004", "step-000000005")
    assert not (tmp_path / "run" / "checkpoints" / "step-000000006").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    outcome = train_toy(tmp_path / "run", Toy(notes=str(tmp_path)), spec=spec.override(["stop.steps=8"]))
    assert all(weight.isfinite().all() for weight in outcome.weights.values())


def test_weights_are_looked_at_value_by_value_where_a_norm_overflows() -> None:
    large, infinite = torch.full((4,), 1e30), torch.tensor([1e30, float("-inf")])
    given = {"empty": torch.empty(0), "large": large, "small": torch.ones(2, dtype=torch.bfloat16)}
    named = [(name, torch.nn.Parameter(value)) for name, value in given.items()]
    masked = torch.nn.Parameter(infinite, requires_grad=False)  # on purpose, and not trained
    assert find_not_finite([]) is None
    assert find_not_finite([*named, ("mask", masked)]) is None
    assert find_not_finite([*named, ("infinite", torch.nn.Parameter(infinite))]) == "infinite"


def test_histograms_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    notes = train_toy(tmp_path, stop={"steps": 4}, histograms_every_steps=2).log
    assert {step for step, _ in notes.histograms} == {2, 4}
    assert {"weights/0.weight", "gradients/0.weight"} <= {name for _, name in notes.histograms}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train_toy(tmp_path, stop={"steps": 2})
    with pytest.raises(SpecMismatch):
        train_toy(tmp_path, Toy(hidden=8), stop={"steps": 4})


def test_metrics_that_some_batches_lack_are_refused(tmp_path: Path) -> None:
    class Sometimes(Toy):
        batches = 0

        def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
            self.batches += 1
            metrics = super().metrics(outputs, batch)
            return metrics if self.batches == 2 else {**metrics, "of a class": metrics["accuracy"]}

    with pytest.raises(ConfigError, match=r"of a class.* not measured of every batch alike"):
        train_toy(tmp_path, Sometimes(), stop={"steps": 2}, evaluate={"batch_size": 32})


def test_selective_backprop_learns_too(tmp_path: Path) -> None:
    outcome = train_toy(tmp_path, stop={"epochs": 6}, selective_backprop={"beta": 1.0})
    assert outcome.result.metrics["accuracy"] > 0.8


def test_reports_are_made_however_often_it_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.train.loop.trainer.INTERVAL_S", 0.0)
    notes = train_toy(tmp_path, log_every_steps=None, evaluate={"every_steps": 2}, stop={"steps": 40}).log
    # The ranks come together at each evaluation, so that no step between two of them is one at which they have to.
    assert set(range(2, 41, 2)) <= notes.losses.keys()
