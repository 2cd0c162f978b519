"""A population from its spec to its record, its checkpoints and its registered networks, in this process."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.runs
from shoal import checkpoint
from shoal.errors import ConfigError, SpecMismatch, TrainError
from shoal.libs.population.ensemble import Ensemble
from shoal.libs.population.flow.build import load_member
from shoal.libs.population.flow.rounds import choose_spec
from shoal.libs.population.flow.run import PopulationTrainer, check_population, run_population
from shoal.libs.population.spec import PopulationSpec
from shoal.registry import Registry
from shoal.runs import RunKind, Status
from shoal.train.launch.local import fit_locally
from shoal.train.spec import TrainSpec

TASK = """
import os, signal
import torch
from torch import nn
from torch.utils.data import TensorDataset
from shoal.data import Data
from shoal.train import Task


def points(count, seed):
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, generator=random)
    return TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())


def blur(inputs, strengths, generators):
    drawn = torch.stack([torch.randn(inputs.shape[1:], generator=each) for each in generators])
    return inputs + drawn * strengths[:, None, None]


class Quadrants(Task):
    def __init__(self, *, hidden=16, fatal=0, mixed=False):
        self.hidden, self.fatal, self.mixed = hidden, fatal, mixed

    def model(self):
        network = nn.Sequential(nn.Linear(2, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 2))
        network.register_buffer("scale", torch.ones(1, dtype=torch.float64 if self.mixed else torch.float32))
        return network

    def data(self):
        return Data(points(256, 1), validation=points(128, 2))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean()}

    def augmentations(self):
        return {"blur": blur}
"""

FIELDS: dict[str, Any] = {
    "task": "quadrants.py",
    "members": 4,
    "rounds": 4,
    "steps_per_round": 8,
    "batch_size": 32,
    "space": {"optimizer.learning_rate": "log(1e-2, 1)", "augmentation.blur": "uniform(0, 0.3)"},
    "ensemble": 2,
    "threads": 1,
    "engine": "looped",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "quadrants.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_spec(**fields: Any) -> PopulationSpec:
    return PopulationSpec.parse(FIELDS | fields)


def read_rounds(run_id: str) -> dict[int, dict[str, Any]]:
    """The newest record of each round."""
    events = shoal.runs.load(run_id).events()
    return {each["round"]: each for each in events[events["kind"] == "round"]["details"]}


@pytest.mark.usefixtures("folder", "drawn_report")
def test_a_run_has_a_record_of_every_round_and_registers_the_best_member_and_the_ensemble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = "shoal.registry.registry.find_load_error"
    monkeypatch.setattr(check, lambda version, *_, **__: f"{version.name} lacks a module")
    result = run_population(make_spec())
    run = shoal.runs.load(result.run_id)
    errors = [each["error"] for _, each in run.list_events("unservable")]
    assert errors == ["quadrants lacks a module", "quadrants-ensemble lacks a module"]
    assert (run.kind, run.status) == (RunKind.POPULATION, Status.FINISHED)
    rounds = read_rounds(run.id)
    assert list(rounds) == [1, 2, 3, 4]
    assert rounds[4]["scores"] == pytest.approx(result.scores)
    assert result.scores[result.best] == max(result.scores)
    assert set(rounds[1]["hyper_parameters"]) == set(FIELDS["space"])
    assert "member/03/accuracy" in run.metrics()
    assert list(run.models()["name"]) == ["quadrants", "quadrants-ensemble"]
    best = Registry().get("quadrants").manifest
    assert best.metrics == pytest.approx(result.metrics)
    schedule = best.lineage["schedule"]
    assert [each["first_round"] for each in schedule] == [1, *(each["last_round"] + 1 for each in schedule[:-1])]
    assert schedule[-1]["member"] == result.best
    for each in schedule:
        rates = rounds[each["last_round"]]["hyper_parameters"]["optimizer.learning_rate"]
        assert each["optimizer.learning_rate"] == rates[each["member"]]
    page = (run.folder / "report.html").read_text()
    assert "genealogy" in page
    assert "schedule of optimizer.learning_rate" in page
    assert result.ensemble["loss"] <= math.log(2)
    network: Any = Registry().get("quadrants-ensemble").manifest.model.build()
    assert isinstance(network, Ensemble)
    weights = Registry().get("quadrants-ensemble").snapshot().tensors()
    network.load_state_dict({name: torch.tensor(each) for name, each in weights.items()})
    inputs = torch.randn(5, 2)
    with torch.no_grad():
        pairs = zip(network.members, network.temperatures, strict=True)
        mean = torch.stack([(member(inputs) / temperature).softmax(-1) for member, temperature in pairs]).mean(0)
        expected = (mean.log() / network.mean_temperature).softmax(-1)
        torch.testing.assert_close(network(inputs).exp(), expected)  # the calibrated average


@pytest.mark.usefixtures("folder")
def test_any_member_begins_a_training_and_a_training_begins_members() -> None:
    result = run_population(make_spec(ensemble=0))
    shared = {"task": "quadrants.py", "batch_size": 32, "threads": 1}
    spec = TrainSpec.parse({**shared, "init": "quadrants", "stop": {"steps": 1}, "optimizer": {"learning_rate": 1e-9}})
    trained = fit_locally(spec)
    assert trained.metrics["accuracy"] == pytest.approx(result.metrics["accuracy"])
    state = {name: torch.tensor(each) for name, each in Registry().get("quadrants").snapshot().tensors().items()}
    torch.save(state, "member.pt")
    still = {"optimizer.learning_rate": "uniform(1e-9, 2e-9)"}
    again = run_population(make_spec(init="member.pt", rounds=1, steps_per_round=1, ensemble=0, space=still))
    assert again.scores == pytest.approx([trained.metrics["accuracy"]] * 4)


@pytest.mark.usefixtures("folder")
def test_any_member_of_a_run_is_a_state_dict() -> None:
    result = run_population(make_spec(rounds=1))
    registered = Registry().get("quadrants").snapshot().tensors()
    best = load_member(result.run_id, result.best)
    assert {name: each.numpy().tolist() for name, each in best.items()} == {
        name: each.tolist() for name, each in registered.items()
    }
    assert not torch.equal(load_member("latest", (result.best + 1) % 4)["0.weight"], best["0.weight"])
    with pytest.raises(ConfigError, match="the run has members 0 to 3"):
        load_member("latest", 4)


@pytest.mark.usefixtures("folder")
def test_weights_of_another_network_are_rejected_before_a_run_begins() -> None:
    torch.save(torch.nn.Linear(2, 3).state_dict(), "other.pt")
    for check in (
        lambda: check_population(make_spec(init="other.pt")),
        lambda: fit_locally(TrainSpec.parse({"task": "quadrants.py", "init": "other.pt", "stop": {"steps": 1}})),
    ):
        with pytest.raises(SpecMismatch, match="has other tensors than the network"):
            check()
    with pytest.raises(ConfigError, match=r"init = 'absent.pt': is no file"):
        check_population(make_spec(init="absent.pt"))


@pytest.mark.usefixtures("folder")
def test_a_member_that_diverges_is_retired_and_replaced() -> None:
    space = {"optimizer.learning_rate": "choice(0.3, 1e38)"}
    result = run_population(make_spec(space=space, rounds=2, ensemble=0, evolution="pbt"), registers=False)
    first = read_rounds(result.run_id)[1]
    diverged = [member for member, rate in enumerate(first["hyper_parameters"]["optimizer.learning_rate"]) if rate > 1]
    assert diverged
    assert first["retired"] == diverged
    assert [member for member, score in enumerate(first["scores"]) if score is None] == diverged
    assert {loser for loser, _ in first["copies"]} >= set(diverged)


@pytest.mark.usefixtures("folder")
def test_a_run_without_any_finite_score_fails_with_the_remedy() -> None:
    space = {"optimizer.learning_rate": "log(1e37, 1e38)"}
    with pytest.raises(TrainError, match="all diverged"):
        run_population(make_spec(space=space))
    assert shoal.runs.load("latest").status is Status.FAILED


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"metric": "auroc"}, "metric = 'auroc': is not measured of each member. there is loss, accuracy"),
        ({"space": {"augmentation.crop": "uniform(0, 1)"}}, "Quadrants.augmentations has no 'crop'"),
        ({"args": {"width": 2}}, "args.width = 2"),
        ({"members": 1, "ensemble": 0}, "compares members, and needs 2 at least"),
        ({"memory_bytes": 100}, "memory_bytes = 100: one member takes"),
        ({"args": {"mixed": True}}, "members are rows of one type"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_a_task_lacks_is_reported_before_a_run_begins(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_population(make_spec(**fields))
    assert problem in str(raised.value)
    assert shoal.runs.list_runs() == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"space": {"optimizer.learning_rate": "log(1, 0.1)"}}, "is not below the upper end"),
        ({"space": {"optimizer.rate": "log(0.1, 1)"}}, "no member has 'optimizer.rate'"),
        ({"space": {"args.hidden": "choice(4, 8)"}}, "no member has 'args.hidden'"),
        ({"space": {"optimizer.learning_rate": "choice(0.1, small)"}}, "is a number"),
        ({"space": {}}, "space"),
        ({"ensemble": 5}, "ensemble=5 is more than members=4"),
        ({"metric": "quality"}, "say direction=max or min"),
        ({"space": {"optimizer.momentum": "uniform(0.9, 1.2)"}}, "its values are from 0 to 1"),
        (
            {"space": {"augmentation.blur": "uniform(0, 1)"}, "augmentation": {"blur": 1.0}},
            "space.augmentation.blur=null",
        ),
    ],
)
def test_a_spec_that_cannot_work_is_rejected(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_spec(**fields)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("members", "ensemble", "size"), [(30, None, 5), (4, None, 4), (1, None, 0), (30, 3, 3), (30, 0, 0)]
)
def test_an_ensemble_is_of_five_unless_specified_or_of_all_where_there_are_fewer(
    members: int, ensemble: int | None, size: int
) -> None:
    assert make_spec(members=members, ensemble=ensemble).ensemble_size == size


def test_overrides_change_add_and_remove_hyper_parameters() -> None:
    words = ["space.optimizer.momentum=uniform(0.1, 0.9)", "space.augmentation.blur=null", "evolution=halving"]
    spec = make_spec().override(words)
    assert spec.space == {"optimizer.learning_rate": "log(1e-2, 1)", "optimizer.momentum": "uniform(0.1, 0.9)"}
    assert PopulationSpec.from_yaml(spec.to_yaml()) == spec


def test_a_fixed_value_of_what_the_space_has_too_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"add space.optimizer.learning_rate=null"):
        choose_spec(make_spec(), ["optimizer.learning_rate=0.1"])
    words = ["space.optimizer.learning_rate=null", "optimizer.learning_rate=0.1"]
    assert choose_spec(make_spec(space={"optimizer.momentum": "uniform(0, 0.9)"}), words).optimizer.learning_rate == 0.1


@pytest.mark.usefixtures("folder")
def test_a_run_that_has_ended_goes_on_for_more_rounds_of_the_same_members() -> None:
    ended = run_population(make_spec(rounds=1, ensemble=0), registers=False)
    with pytest.raises(ConfigError, match="has ended already, after 1 rounds"):
        check_population(make_spec(rounds=1, resume=ended.run_id))
    with pytest.raises(SpecMismatch, match=r"evolution = .*random_search.*: the run has"):
        check_population(make_spec(rounds=2, evolution="random_search", resume=ended.run_id))
    further = run_population(make_spec(rounds=2, ensemble=0, resume=ended.run_id), registers=False)
    assert further.run_id == ended.run_id
    assert list(read_rounds(ended.run_id)) == [1, 2]


class Killed(BaseException):
    """Stands for SIGKILL: nothing is recorded or saved after it."""


def test_a_run_that_is_killed_again_and_again_has_the_lineage_of_one_that_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any checkpoint; with a round trained and not scored; between a checkpoint and the round's event."""
    moments: dict[str, tuple[Any, str]] = {
        "batch": (PopulationTrainer, "_next_batch"),
        "score": (PopulationTrainer, "_evaluate_members"),
        "save": (checkpoint, "save"),
    }

    def run_until(moment: str, count: int, spec: PopulationSpec) -> None:
        owner, name = moments[moment]
        original, calls = getattr(owner, name), []

        def die_at_last(*args: Any, **options: Any) -> Any:
            calls.append(1)
            result = original(*args, **options)
            if len(calls) == count:
                raise Killed
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, die_at_last)
            with pytest.raises(Killed):
                run_population(spec, registers=False)

    expected = run_population(make_spec(rounds=6), registers=False)
    resumed = ""
    for moment, count in (("batch", 4), ("score", 3), ("save", 2)):  # the last two in rounds 3 and 4
        run_until(moment, count, make_spec(rounds=6, resume=resumed))
        resumed = shoal.runs.load("latest").id
    assert len(shoal.runs.list_runs()) == 2
    result = run_population(make_spec(rounds=6, resume=resumed), registers=False)
    assert (result.run_id, result.scores) == (resumed, expected.scores)
    rounds = read_rounds(expected.run_id)
    assert read_rounds(resumed) == rounds
    assert any(each["copies"] for each in rounds.values())
