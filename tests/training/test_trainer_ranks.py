"""The training loop on several ranks: the same losses as alone, one decision for all, going on under another plan."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from programs import RanksFailed, run_ranks
from shoal.errors import ConfigError, NotFinite, PlanError, RankLost
from shoal.parallel import World
from shoal.train.spec import TrainSpec
from train_task import FEATURES, Toy, seen

STEPS = 12
# Sums over ranks are taken in another order than over the rows of one batch: float32, a dozen steps of Adam.
TOLERANCE = 1e-4


class Losses:
    """A journal that keeps the losses by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}
        self.eager_reasons: list[object] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self.by_step[step] = values["train/loss"]

    def record_event(self, kind: str, /, **details: object) -> None:
        if kind == "built_eagerly":
            self.eager_reasons.append(details["error"])

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        pass

    def flush(self) -> None:
        pass


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
    from shoal.train.loop.trainer import Trainer

    losses, calls = Losses(), iter(range(1, 1000))

    def should_stop() -> bool:
        return stop_at is not None and world.rank == stopper and next(calls) >= stop_at

    trainer = Trainer(spec, Toy(**args), world, folder, journal=losses, should_stop=should_stop)
    outcome = trainer.run()
    assert losses.eager_reasons == []
    return losses.by_step, outcome


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


def train_each(
    world: World, folder: Path, plans: list[str], args: dict[str, Any]
) -> list[tuple[dict[int, float], Any]]:
    """The program of a rank: one run after the other, each under a plan of its own."""
    return [train(world, folder / plan, spec_of(plan), args) for plan in plans]


def test_every_plan_has_the_losses_of_one_process(alone: dict[int, float], tmp_path: Path) -> None:
    plans = ["ddp", "fsdp", "tensor"]
    first, second = run_ranks(train_each, 2, tmp_path, plans, {})
    for plan, (losses, outcome), (_, same) in zip(plans, first, second, strict=True):
        assert losses == pytest.approx(alone, rel=TOLERANCE), plan
        assert outcome == same
        assert outcome.metrics["accuracy"] > 0.5


class Sometimes(Toy):
    """How well it knows a class is measured of samples that have it, which one rank has."""

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        metrics = super().metrics(outputs, batch)
        return metrics if torch.distributed.get_rank() else {**metrics, "of a class": metrics["accuracy"]}


def evaluated_unalike(world: World, folder: Path, spec: TrainSpec) -> str:
    """The program of a rank that must fail: what it raised."""
    from shoal.train.loop.trainer import Trainer

    with pytest.raises(ConfigError) as raised:
        Trainer(spec, Sometimes(), world, folder).run()
    return str(raised.value)


def test_metrics_that_one_rank_measures_alone_are_refused_on_all(tmp_path: Path) -> None:
    for said in run_ranks(evaluated_unalike, 2, tmp_path, spec_of("ddp", stop={"steps": 2})):
        assert "Task.metrics" in said
        assert "not measured of every batch alike" in said


class Unevenly(Toy):
    """Its second rank takes long to evaluate."""

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            time.sleep(0.5)
        return super().metrics(outputs, batch)


class Waits(Losses):
    """A journal that keeps the shares of time spent waiting for other ranks."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.shares += [share for name, share in values.items() if name == "wait/communication"]


def waits(world: World, folder: Path, spec: TrainSpec) -> list[float]:
    """The program of a rank: what is reported of waiting."""
    from shoal.train.loop.trainer import Trainer

    journal = Waits()
    Trainer(spec, Unevenly(count=64), world, folder, journal=journal).run()
    return journal.shares


def test_ranks_that_wait_in_an_evaluation_do_not_wait_in_a_step(tmp_path: Path) -> None:
    spec = spec_of("fsdp", evaluate={"every_steps": 2}, stop={"steps": 6}, log_every_steps=2, checkpoint={})
    shares, _ = run_ranks(waits, 2, tmp_path, spec)
    assert len(shares) == 3
    assert max(shares) < 1.0


def test_a_pipeline_has_the_losses_of_one_process(tmp_path: Path) -> None:
    args = {"dropout": 0.0}  # it takes a batch in micro-batches, each with a dropout mask of its own
    [(expected, _)] = run_ranks(train, 1, tmp_path / "one", spec_of("single"), args)
    results = run_ranks(train, 2, tmp_path / "two", spec_of("pipeline"), args)
    assert results[0][0] == pytest.approx(expected, rel=TOLERANCE)
    assert results[0][1] == results[1][1]


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


def train_rooted(world: World, folder: Path, spec: TrainSpec) -> list[object]:
    from shoal.train.loop.trainer import Trainer

    losses = Losses()
    Trainer(spec, Rooted(), world, folder, journal=losses).run()
    return losses.eager_reasons


def test_a_run_says_why_a_model_was_not_split_without_memory(tmp_path: Path) -> None:
    first, _ = run_ranks(train_rooted, 2, tmp_path, spec_of("tensor", stop={"steps": 1}))
    assert first == ["its plan is not found without its weights: arbitrary weights give no numbers"]


def test_a_run_goes_on_under_other_plans_and_numbers_of_workers(alone: dict[int, float], tmp_path: Path) -> None:
    folder, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    losses: dict[int, float] = {}
    for plan, size, until in [("fsdp", 2, 3), ("ddp", 2, 6), ("tensor", 2, 8), ("single", 1, 10), ("fsdp", 2, STEPS)]:
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
    from shoal.train.loop.trainer import Trainer

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
    from shoal.sync.rank_signals import RankSync
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


@pytest.mark.parametrize(
    ("plan", "place"),
    [
        ("ddp", "assembly"),
        ("tensor", "exchange of signs"),
        ("ddp", "evaluation"),
        ("fsdp", "evaluation"),
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


def normalise(world: World, folder: Path) -> list[str]:
    """The program of a rank: what is said of a normaliser, under each plan."""
    from shoal.train.loop.trainer import Trainer

    found = []
    for plan in ("ddp", "fsdp"):
        with pytest.raises(PlanError) as raised:
            Trainer(spec_of(plan), Normalised(), world, folder / plan).run()
        found.append(str(raised.value))
    return found


def test_statistics_that_each_rank_takes_of_its_own_samples_are_refused(tmp_path: Path) -> None:
    for messages in run_ranks(normalise, 2, tmp_path):
        for message in messages:
            assert "'0.mean': is a buffer that data ranks 0 and 1 have made different ones of" in message


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


def cache(world: World, folder: Path, plan: str) -> dict[int, float]:
    """The program of a rank: the losses of a model that makes buffers as it is called."""
    from shoal.train.loop.trainer import Trainer

    losses = Losses()
    Trainer(spec_of(plan, stop={"steps": 3}), Cached(), world, folder, journal=losses).run()
    return losses.by_step


def test_buffers_that_a_forward_pass_makes_or_lets_grow_are_trained_with_as_alone(tmp_path: Path) -> None:
    [expected] = run_ranks(cache, 1, tmp_path / "alone", "single")
    assert sorted(expected) == [1, 2, 3]
    assert run_ranks(cache, 2, tmp_path / "ddp", "ddp")[0] == pytest.approx(expected, rel=TOLERANCE)
