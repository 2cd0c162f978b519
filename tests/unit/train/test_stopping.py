"""When a run ends: each criterion, which of several wins, what is kept, and that a resumed run decides alike."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.train.loop.stopping import StopDecision, StopPolicy
from shoal.train.spec import StopSpec

LOSSES = st.lists(st.floats(-3, 3) | st.just(math.nan), min_size=1, max_size=30)


def _policy(stop: dict[str, Any], devices: int = 1, price: float = 0.0) -> StopPolicy:
    return StopPolicy(StopSpec.parse(stop), devices, price)


def _run(policy: StopPolicy, losses: list[float], first: int = 1) -> StopDecision | None:
    for step, loss in enumerate(losses, start=first):
        stop = policy.decide_after_evaluation(step, {"loss": loss})
        if stop:
            return stop
    return None


@pytest.mark.parametrize(
    ("stop", "told", "reason"),
    [
        ({"steps": 10}, (10, 0.5, 1.0), "steps"),
        ({"epochs": 0.5}, (10, 0.5, 1.0), "epochs"),
        ({"wall_s": 60}, (10, 0.5, 60.0), "wall_s"),
        ({"money": 2}, (10, 0.5, 900.0), "money"),
        ({"steps": 11, "wall_s": 55, "epochs": 9}, (10, 0.5, 60.0), "wall_s"),
    ],
)
def test_limits(stop: dict[str, Any], told: tuple[int, float, float], reason: str) -> None:
    policy = _policy(stop, devices=2, price=4.0)
    step, epoch, elapsed_s = told
    assert policy.decide_after_step(step - 1, epoch * 0.9, elapsed_s * 0.9) is None
    ended = policy.decide_after_step(*told)
    assert (ended.reason, ended.step, ended.keep_step) == (reason, step, step)


def test_a_target_met_in_the_evaluation_after_the_last_step_is_the_reason() -> None:
    policy = _policy({"epochs": 1, "target": "accuracy>=0.9"})
    assert policy.decide_after_evaluation(5, {"accuracy": 0.8}) is None
    limit = policy.decide_after_step(10, 1.0, 1.0)
    assert limit.reason == "epochs"
    ended = policy.decide_after_evaluation(10, {"accuracy": 0.9})
    assert ended.reason == "target"
    assert "0.9 >= 0.9 at step 10" in ended.detail
    assert policy.decide_after_step(10, 1.0, 1.0) == ended  # whichever is asked last


def test_a_target_met_as_the_run_converges_is_the_reason_and_its_network_is_kept() -> None:
    policy = _policy({"target": "accuracy>=0.9", "convergence": {"metric": "loss", "patience": 1}})
    assert policy.decide_after_evaluation(1, {"loss": 0.1, "accuracy": 0.8}) is None
    ended = policy.decide_after_evaluation(2, {"loss": 0.2, "accuracy": 0.9})
    assert (ended.reason, ended.keep_step, policy.best_step) == ("target", 2, 1)


def test_an_evaluation_of_another_step_comes_too_late() -> None:
    policy = _policy({"steps": 10, "target": "accuracy>=0.9"})
    first = policy.decide_after_step(10, 1.0, 1.0)
    assert policy.decide_after_evaluation(11, {"accuracy": 1.0}) == first


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        ({"metric": "loss", "value": 0.1}, 0.05, True),
        ({"metric": "loss", "value": 0.1}, 0.2, False),
        ({"metric": "accuracy", "value": 0.1}, 0.2, True),
        ({"metric": "loss", "value": 0.1, "direction": "max"}, 0.2, True),
        ("loss<=0.1", 0.1, True),
        ("accuracy>=0.1", math.nan, False),
    ],
)
def test_the_direction_of_a_target_follows_from_its_name(target: object, value: float, met: bool) -> None:
    policy = _policy({"target": target})
    name = "accuracy" if "accuracy" in str(target) else "loss"
    assert bool(policy.decide_after_evaluation(1, {name: value})) is met


def test_a_metric_that_is_not_evaluated_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"stop\.target\.metric = 'acuracy'.*loss, accuracy"):
        _policy({"target": "acuracy>=0.9"}).decide_after_evaluation(1, {"loss": 1.0, "accuracy": 0.5})


def _as_defined(losses: list[float], patience: int, least: float) -> tuple[int, int] | None:
    """(step, kept step) from the whole history: n is kept when none of the next `patience` betters it enough."""
    n = next((index for index, loss in enumerate(losses) if not math.isnan(loss)), len(losses))
    if n > patience:
        return patience + 1, patience + 1  # there was nothing to better
    while n < len(losses):
        following = range(n + 1, n + 1 + patience)
        better = next((index for index in following if index < len(losses) and losses[n] - losses[index] > least), None)
        if better is None:
            return (n + patience + 1, n + 1) if n + patience < len(losses) else None
        n = better
    return None


@given(losses=LOSSES, patience=st.integers(1, 5), least=st.floats(0, 1))
def test_convergence_keeps_the_step_that_the_next_ones_did_not_better(
    losses: list[float], patience: int, least: float
) -> None:
    policy = _policy({"convergence": {"patience": patience, "min_improvement": least}})
    stop = _run(policy, losses)
    assert (None if stop is None else (stop.step, stop.keep_step)) == _as_defined(losses, patience, least)


@given(num=st.integers(1, 30), patience=st.integers(1, 5), least=st.floats(0, 1))
def test_it_never_stops_while_there_is_improvement_and_always_stops_without(
    num: int, patience: int, least: float
) -> None:
    falling = [-float(index) * (least + 0.1) for index in range(num)]
    spec = {"convergence": {"patience": patience, "min_improvement": least}}
    assert _run(_policy(spec), falling) is None
    stop = _run(_policy(spec), [0.0] * (patience + 1))
    assert (stop.step, stop.keep_step, stop.reason) == (patience + 1, 1, "convergence")


@given(losses=LOSSES, cut=st.integers(0, 30), patience=st.integers(1, 5))
def test_a_resumed_run_decides_as_the_undisturbed_one(losses: list[float], cut: int, patience: int) -> None:
    spec = {"convergence": {"patience": patience}, "target": "loss<=-2.5", "wall_s": 20}

    def go_on(policy: StopPolicy, first: int, last: int) -> StopDecision | None:
        for step in range(first, last + 1):
            stop = policy.decide_after_step(step, 0.0, float(step - first + 1))
            stop = policy.decide_after_evaluation(step, {"loss": losses[step - 1]}) or stop
            if stop:
                return stop
        return None

    undisturbed = go_on(_policy(spec), 1, len(losses))
    before = _policy(spec)
    first = go_on(before, 1, min(cut, len(losses)))
    if first:
        assert first == undisturbed
        return
    after = _policy(spec)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert go_on(after, min(cut, len(losses)) + 1, len(losses)) == undisturbed


def test_money_of_lives_with_other_numbers_of_devices_adds_up() -> None:
    first = _policy({"money": 3}, devices=4, price=1.0)
    assert first.decide_after_step(1, 0.0, 1800.0) is None  # 2 spent
    second = _policy({"money": 3}, devices=1, price=1.0)
    second.load_state_dict(first.state_dict())
    assert second.decide_after_step(2, 0.0, 3500.0) is None
    ended = second.decide_after_step(3, 0.0, 3600.0)
    assert ended.reason == "money"
    assert (second.money, second.elapsed_s) == (3.0, 5400.0)


def test_the_same_network_evaluated_twice_counts_once() -> None:
    policy = _policy({"convergence": {"patience": 2}})
    assert _run(policy, [1.0, 2.0]) is None
    assert policy.decide_after_evaluation(2, {"loss": 2.0}) is None
    stop = policy.decide_after_evaluation(3, {"loss": 2.0})
    assert stop is not None
    resumed = _policy({"convergence": {"patience": 2}})
    resumed.load_state_dict(policy.state_dict())
    assert resumed.decide_after_evaluation(3, {"loss": 2.0}) == stop  # what had converged has


@pytest.mark.parametrize(
    "convergence", [{"metric": "accuracy"}, {"metric": "loss", "direction": "max"}], ids=["metric", "direction"]
)
def test_what_was_best_by_another_measure_is_forgotten(convergence: dict[str, Any]) -> None:
    before = _policy({"convergence": {"metric": "loss", "patience": 2}})
    before.decide_after_evaluation(1, {"loss": 0.3, "accuracy": 0.8})
    before.decide_after_evaluation(2, {"loss": 0.4, "accuracy": 0.9})
    after = _policy({"convergence": {**convergence, "patience": 2}})
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.best_step is None
    assert after.decide_after_evaluation(2, {"loss": 0.4, "accuracy": 0.9}) is None
    assert after.best_step == 2
    assert after.decide_after_evaluation(3, {"loss": 0.5, "accuracy": 0.95}) is None
    assert after.best_step == 3


def test_a_metric_that_is_never_a_number_ends_the_run_as_one_that_never_improves() -> None:
    policy = _policy({"convergence": {"metric": "accuracy", "patience": 2}})
    for step in (1, 2):
        assert policy.decide_after_evaluation(step, {"accuracy": math.nan}) is None
    stop = policy.decide_after_evaluation(3, {"accuracy": math.nan})
    assert (stop.reason, stop.step, stop.keep_step) == ("convergence", 3, 3)
    assert stop.detail == "accuracy was not a number in 3 evaluations"
