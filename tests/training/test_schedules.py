"""Schedules against PyTorch's own schedulers, their ends, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from shoal.errors import ConfigError
from shoal.train.optim.lr_schedule import compute_learning_rate, compute_momentum, resolve_total_steps
from shoal.train.run_facts import epochs_to_steps
from shoal.train.spec import ScheduleSpec, TrainSpec


def _optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)


@pytest.mark.parametrize(("total", "warmup"), [(100, 0.3), (37, 0.0), (10, 0.5), (250, 0.1)])
def test_one_cycle_is_pytorchs_in_rate_and_momentum(total: int, warmup: float) -> None:
    optimizer = _optimizer()
    theirs = OneCycleLR(optimizer, 1.0, total, pct_start=warmup or 0.3, final_div_factor=400.0)
    spec = ScheduleSpec(name="one_cycle", warmup=warmup)
    for step in range(total):
        group = optimizer.param_groups[0]
        assert compute_learning_rate(step, spec, total) == pytest.approx(group["lr"], rel=1e-9)
        assert compute_momentum(step, spec, total) == pytest.approx(group["momentum"], rel=1e-9)
        optimizer.step()
        if step + 1 < total:
            theirs.step()


def test_cosine_is_pytorchs() -> None:
    optimizer = _optimizer()
    theirs = CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1)
    spec = ScheduleSpec(name="cosine", final=0.1)
    for step in range(50):
        assert compute_learning_rate(step, spec, 50) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_warm_up_counts_in_steps_or_in_shares_of_the_run() -> None:
    in_steps = [compute_learning_rate(step, ScheduleSpec(warmup=4), None) for step in range(6)]
    assert in_steps == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    in_shares = [compute_learning_rate(step, ScheduleSpec(warmup=0.4), 10) for step in range(6)]
    assert in_shares == in_steps


@pytest.mark.parametrize("name", ["one_cycle", "cosine", "linear"])
@pytest.mark.parametrize("size", [0.5, 2.0], ids=["larger batches", "smaller batches"])
@pytest.mark.parametrize("changed_at", [5, 12, 30])
def test_a_warm_up_in_steps_counts_those_that_were_taken(name: str, size: float, changed_at: int) -> None:
    """After some of 40 steps, batches are of another size: what is left is so many times as many steps."""
    spec = ScheduleSpec.parse({"name": name, "warmup": 12})
    before = size * changed_at
    total = round(40 * size)
    steps = [(taken, before + taken - changed_at) for taken in range(changed_at, changed_at + total - round(before))]
    rates = [compute_learning_rate(place, spec, total, taken) for taken, place in steps]
    undisturbed = [compute_learning_rate(step, spec, 40) for step in range(40)]
    assert rates[0] == pytest.approx(undisturbed[changed_at], abs=0.05)
    assert rates[: max(0, 12 - changed_at)] == undisturbed[changed_at:12]
    later = rates[max(0, 12 - changed_at) :]
    assert later == sorted(later, reverse=True)
    assert later[-1] < 0.1
    if name == "one_cycle":
        momenta = [compute_momentum(place, spec, total, taken) for taken, place in steps]
        assert momenta[0] == pytest.approx(compute_momentum(changed_at, spec, 40), abs=0.01)


def test_linear_falls_evenly_to_its_end() -> None:
    spec = ScheduleSpec(name="linear", final=0.2)
    assert [compute_learning_rate(step, spec, 4) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@given(
    name=st.sampled_from(["constant", "one_cycle", "cosine", "linear"]),
    total=st.integers(1, 500),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 600).map(float)),
    step=st.integers(0, 600),
)
def test_every_rate_is_a_share_above_nothing(name: str, total: int, warmup: float, step: int) -> None:
    spec = ScheduleSpec.parse({"name": name, "warmup": warmup})
    factor = compute_learning_rate(step, spec, total)
    assert 0.0 <= factor <= 1.0 + 1e-12
    if step < total:
        assert factor > 0.0  # no step of the run is wasted


def test_the_total_is_the_nearest_end_that_is_known() -> None:
    both = TrainSpec.parse({"stop": {"steps": 500, "epochs": 3}})
    assert resolve_total_steps(both, 100) == 300
    assert resolve_total_steps(both, None) == 500
    assert resolve_total_steps(TrainSpec.parse({"schedule": {"total_steps": 7}, "stop": {"steps": 500}}), 100) == 7
    assert resolve_total_steps(TrainSpec(), None) is None


@pytest.mark.parametrize("name", ["constant", "cosine", "one_cycle"])
def test_a_warm_up_that_never_ends_is_refused(name: str) -> None:
    def total(warmup: float) -> int | None:
        spec = TrainSpec.parse({"schedule": {"name": name, "warmup": warmup}, "stop": {"steps": 20}})
        return resolve_total_steps(spec, None)

    assert total(19) == total(0.9) == 20
    with pytest.raises(ConfigError, match=r"schedule\.warmup = 20\.0: is as long as the run, of 20 steps"):
        total(20)


@pytest.mark.parametrize("schedule", [{"name": "one_cycle"}, {"name": "cosine"}, {"warmup": 0.1}])
def test_a_schedule_that_needs_an_end_is_refused_without(schedule: dict[str, object]) -> None:
    spec = TrainSpec.parse({"schedule": schedule, "stop": {"epochs": 2}})
    assert resolve_total_steps(spec, 10) == 20
    with pytest.raises(ConfigError, match=r"schedule\.total_steps.*does not know its length.*give schedule\.total"):
        resolve_total_steps(spec, None)
    with pytest.raises(ConfigError, match="number of steps"):
        compute_learning_rate(0, spec.schedule, None)


@given(hundredths=st.integers(1, 1000), steps_per_epoch=st.integers(1, 1000))
def test_epochs_in_steps_are_the_fewest_that_fill_them(hundredths: int, steps_per_epoch: int) -> None:
    exact = -(-hundredths * steps_per_epoch // 100)
    assert epochs_to_steps(hundredths / 100, steps_per_epoch) == exact
