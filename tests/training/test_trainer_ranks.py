"""The training loop on several ranks: the same losses as alone, one decision for all, going on under another plan."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from programs import RanksFailed, run_ranks
from shoal.errors import ConfigError, NotFinite, PlanError, RankLost
from shoal.parallel import World
from shoal.train.loop.trainer import Trainer
from shoal.train.spec import TrainSpec
from train_task import FEATURES, Toy, seen
from training import toy_run

STEPS = 12
# Sums over ranks are taken in another order than over the rows of one batch: float32, a dozen steps of Adam.
TOLERANCE = 1e-4


def spec_of(plan: Any, **changes: Any) -> TrainSpec:
    base = {
        "task": "Toy",
        "parallel": plan,
        "batch_size": 32,
        "stop": {"steps": STEPS},
        "log_every_steps": 1,
        "optimizer": {"learning_rate": 0.01},
        "clip_norm": 1.0,
        "average": 0.9,
        "checkpoint": {"every_steps": 3},
    }
    return TrainSpec.parse({**base, **changes})


def train(
    world: World, folder: Path, spec: TrainSpec, args: dict[str, Any], stop_at: int | None = None, stopper: int = 0
) -> tuple[dict[int, float], Any]:
    """The program of a rank: (losses by step, on rank 0; the outcome)."""
    run = toy_run.train(
        Toy(**args), home=folder, spec=spec, world=world, interrupt_after=stop_at if world.rank == stopper else None
    )
    assert "built_eagerly" not in dict(run.log.events)
    return run.losses, run.result


def refused(world: World, folder: Path, spec: TrainSpec, args: dict[str, Any], kind: type[Exception]) -> Exception:
    """The program of a rank that must fail: what it raised."""
    with pytest.raises(kind) as raised:
        train(world, folder, spec, args)
    return raised.value


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process."""
    [(losses, _)] = run_ranks(train, 1, tmp_path_factory.mktemp("alone"), spec_of("single"), {})
    assert sorted(losses) == list(range(1, STEPS + 1))
    return dict(losses)


NO_DROPOUT = {"dropout": 0.0}  # a pipeline takes a batch in micro-batches, each with another dropout mask


def train_each(world: World, folder: Path, plans: list[str]) -> list[tuple[dict[int, float], Any]]:
    """The program of a rank: one run after the other, each under another plan."""
    return [train(world, folder / plan, spec_of(plan), NO_DROPOUT if plan == "pipeline" else {}) for plan in plans]


def test_every_plan_has_the_losses_of_one_process(alone: dict[int, float], tmp_path: Path) -> None:
    plans = ["ddp", "fsdp", "tensor", "pipeline"]
    [(without_dropout, _)] = run_ranks(train, 1, tmp_path / "one", spec_of("single"), NO_DROPOUT)
    first, second = run_ranks(train_each, 2, tmp_path, plans)
    for plan, (losses, outcome), (_, same) in zip(plans, first, second, strict=True):
        assert losses == pytest.approx(without_dropout if plan == "pipeline" else alone, rel=TOLERANCE), plan
        assert outcome == same
        assert outcome.metrics["accuracy"] > 0.5


class Sometimes(Toy):
    """How well it knows a class is measured of samples that have it, which one rank has."""

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        metrics = super().metrics(outputs, batch)
        return metrics if torch.distributed.get_rank() else {**metrics, "of a class": metrics["accuracy"]}


def metrics_that_one_rank_measures_alone_are_refused_on_all(world: World, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Task\.metrics.*not measured of every batch alike"):
        toy_run.train(Sometimes(), home=folder, spec=spec_of("ddp", stop={"steps": 2}), world=world)


class Roots(nn.Module):
    """Its weights are positive, without which there is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, FEATURES))

    def forward(self, features: Tensor) -> Tensor:
        return features @ self.weight.sqrt()


class Rooted(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(Roots(), super().model())


def a_run_says_why_a_model_was_not_split_without_memory(world: World, folder: Path) -> None:
    run = toy_run.train(Rooted(), home=folder, spec=spec_of("tensor", stop={"steps": 1}), world=world)
    if world.is_first:
        reason = dict(run.log.events)["built_eagerly"]["error"]
        assert reason == "its plan is not found without its weights: arbitrary weights give no numbers"


def test_a_run_goes_on_under_other_plans_and_numbers_of_workers(alone: dict[int, float], tmp_path: Path) -> None:
    folder, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    losses: dict[int, float] = {}
    for plan, size, until in [("fsdp", 2, 3), ("single", 1, 6), ("tensor", 2, STEPS)]:
        spec = spec_of(plan, stop={"steps": until}, schedule={"total_steps": STEPS})
        losses |= run_ranks(train, size, folder, spec, {})[0][0]
    assert losses == pytest.approx(alone, rel=TOLERANCE)


def test_what_one_rank_is_asked_all_do_at_the_same_step(alone: dict[int, float], tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    args = {"notes": str(notes)}
    results = run_ranks(train, 2, tmp_path / "run", spec_of("ddp"), args, 5, 1)
    assert {outcome.steps for _, outcome in results} == {5}
    assert all(outcome.is_interrupted for _, outcome in results)
    spec = spec_of("ddp", stop={"epochs": 1})
    later = run_ranks(train, 2, tmp_path / "run", spec, args)[0][0]
    assert sorted(seen(notes)) == list(range(256))
    assert results[0][0] | later == pytest.approx({step: alone[step] for step in range(1, 9)}, rel=TOLERANCE)


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_with_its_samples(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    args = {"notes": str(notes), "fault": "nan", "fault_step": 4, "fault_rank": 1}
    errors = run_ranks(refused, 2, tmp_path / "run", spec_of("ddp"), args, NotFinite)
    assert errors[0].step == errors[1].step == 5
    assert errors[0].indices == errors[1].indices
    assert len(errors[0].indices) == 16
    assert errors[0].checkpoint.endswith("step-000000003")


def spoil(world: World, folder: Path, spec: TrainSpec) -> NotFinite:
    """The program of a rank: the last one's share of the weights is spoilt after the fifth step; what was raised."""
    from shoal.parallel.state import gradients

    calls = iter(range(1, 1000))

    def look() -> bool:
        if next(calls) == 5 and world.rank == world.size - 1:
            weights = dict(trainer._parts.model.named_parameters())
            gradients.to_local(weights["3.weight"].detach())[0] = float("nan")
        return False

    trainer = Trainer(spec, Toy(), world, folder, should_stop=look)
    with pytest.raises(NotFinite) as raised:
        trainer.run()
    return raised.value


def test_weights_that_are_spoilt_on_one_rank_are_saved_by_none(tmp_path: Path) -> None:
    spec = spec_of("fsdp").override(["checkpoint.every_steps=1"])
    for error in run_ranks(spoil, 2, tmp_path, spec):
        assert (error.what, error.step, error.indices) == ("the weight 3.weight", 5, None)
        assert error.checkpoint.endswith("step-000000004")


def test_a_killed_rank_is_a_rank_lost_for_the_others_and_the_run_goes_on_exactly(
    alone: dict[int, float], tmp_path: Path
) -> None:
    folder, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    args = {"notes": str(notes), "fault": "kill", "fault_step": 7, "fault_rank": 1}
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train, 2, folder, spec_of("ddp"), args)
    assert RankLost.__name__ in failed.value.causes[0]
    assert "exit code -9" in failed.value.causes[1]
    again = run_ranks(train, 2, folder, spec_of("ddp"), {})[0][0]
    assert set(range(7, max(alone) + 1)) <= again.keys()  # from step 3 or 6: the newest checkpoint that was whole
    assert again == pytest.approx({step: alone[step] for step in again}, rel=TOLERANCE)


def die_on_the_way(world: World, folder: Path, plan: str, place: str) -> Any:
    """The program of a rank: the last one dies as soon as it comes to `place`."""
    from shoal.sync.synchronizer import RankSync
    from shoal.train.loop import trainer

    places = {
        "assembly": (trainer, "build_components"),
        "exchange of signs": (RankSync, "exchange"),
        "evaluation": (trainer, "evaluate"),
        "the network at the end": (trainer.Trainer, "_write_weights"),
    }
    if world.rank == world.size - 1:
        owner, name = places[place]
        setattr(owner, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    return train(world, folder, spec_of(plan, stop={"steps": 2}), {})


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plan", "place"),
    [
        ("ddp", "assembly"),
        ("tensor", "exchange of signs"),
        ("pipeline", "evaluation"),
        ("fsdp", "the network at the end"),
    ],
)
def test_a_rank_that_dies_between_two_steps_is_a_rank_lost_too(tmp_path: Path, plan: str, place: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(die_on_the_way, 2, tmp_path, plan, place)
    assert "exit code -9" in failed.value.causes[1]
    assert failed.value.causes[0].splitlines()[-1].startswith(f"shoal.errors.{RankLost.__name__}:")


class Normaliser(nn.Module):
    """Subtracts a running mean of what it has seen: on each rank, of that rank's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(features.mean(0), 0.1)
        return features - self.mean


class Normalised(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(Normaliser(), super().model())


def statistics_that_each_rank_takes_of_its_own_samples_are_refused(world: World, folder: Path) -> None:
    for plan in ("ddp", "fsdp"):
        with pytest.raises(
            PlanError, match=r"'0\.mean': is a buffer that data ranks 0 and 1 have made different ones of"
        ):
            toy_run.train(Normalised(), home=folder / plan, spec=spec_of(plan), world=world)


class Caching(nn.Module):
    """Masks features; the mask is made in the first pass, and what it multiplies by grows with the batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 1
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.0, FEATURES)
        if len(features) > self.length:
            self.length = len(features)
            self.cache = torch.full((self.length,), 2.0)
        return features * self.mask * self.cache[: len(features), None]


class Cached(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(Caching(), super().model())


def train_cached(world: World, folder: Path) -> dict[int, float]:
    """The losses of a model that makes buffers as it is called."""
    spec = spec_of("ddp" if world.size > 1 else "single", stop={"steps": 3})
    return toy_run.train(Cached(), home=folder, spec=spec, world=world).losses


SCENES = [
    metrics_that_one_rank_measures_alone_are_refused_on_all,
    a_run_says_why_a_model_was_not_split_without_memory,
    statistics_that_each_rank_takes_of_its_own_samples_are_refused,
]


def play_all(world: World, folder: Path) -> dict[int, float]:
    for scene in SCENES:
        scene(world, folder / scene.__name__)
    return train_cached(world, folder / "cached")


def test_two_ranks(tmp_path: Path) -> None:
    """In one start: each scene asserts for itself. Then: buffers that a forward pass makes, or lets grow."""
    expected = train_cached(World.single("cpu"), tmp_path / "alone")
    assert sorted(expected) == [1, 2, 3]
    assert run_ranks(play_all, 2, tmp_path)[0] == pytest.approx(expected, rel=TOLERANCE)
