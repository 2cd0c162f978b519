"""V-trace and the IMPALA loss against a NumPy oracle that follows the paper's equations step by step."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_setting import random_batch
from shoal.models.action_distribution import Categorical
from shoal.models.actor_critic import ActorCritic
from shoal.rl.algorithm_config import ImpalaConfig
from shoal.rl.algorithms.actor_critic import Losses, compute_losses, estimate_targets
from shoal.rl.algorithms.impala import Impala
from shoal.rl.algorithms.segments import SegmentBatch, build_batch, make_grid
from shoal.rl.algorithms.vtrace import vtrace

# float32 sums over at most 50 steps in another order than the oracle's float64
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def oracle_vtrace(ratios, discounts, rewards, values, bootstrap, rho_bar, c_bar, lambda_):
    """Equation (1) of arXiv:1802.01561 as a double sum, not as the recursion that the code uses."""
    length = len(rewards)
    next_values = np.append(values[1:], bootstrap)
    rho, c = np.minimum(rho_bar, ratios), lambda_ * np.minimum(c_bar, ratios)
    delta = rho * (rewards + discounts * next_values - values)
    targets = np.zeros(length)
    for s in range(length):
        total = values[s]
        for t in range(s, length):
            total += np.prod(discounts[s:t]) * np.prod(c[s:t]) * delta[t]
        targets[s] = total
    next_targets = np.append(targets[1:], bootstrap)
    return targets, rho * (rewards + discounts * next_targets - values)


def draw_batch(seed: int, lengths: list[int]) -> tuple[SegmentBatch, dict[str, Any]]:
    """Segments, as the loss takes them and as the oracle does."""
    drawn = vars(random_batch(seed, lengths))
    names = ("observations", "actions", "rewards", "log_probabilities", "lengths", "terminated")
    arrays = {name: drawn[name] for name in names}
    return build_batch(**arrays), arrays


def impala_loss(
    logits: torch.Tensor, values: torch.Tensor, batch: SegmentBatch, config: ImpalaConfig, model: Categorical
) -> Losses:
    """Of a whole batch, of the outputs for every observation."""
    targets, rows = estimate_targets(logits, values, batch, config, model, Impala.trace), make_grid(batch.lengths_B)[0]
    return compute_losses(logits[rows], values[rows], batch.actions, targets, config, model, Impala.gain)


def oracle_loss(logits, values, arrays, config):
    """Segment by segment in float64."""
    row = step = 0
    advantages = []
    targets = []
    step_rows = []
    for length, terminated in zip(arrays["lengths"], arrays["terminated"], strict=True):
        rows, steps = slice(row, row + length), slice(step, step + length)
        log_policy = logits[rows] - np.log(np.exp(logits[rows]).sum(-1, keepdims=True))
        log_pi = log_policy[np.arange(length), arrays["actions"][steps]]
        discounts = np.full(length, config.discount)
        if terminated:
            discounts[-1] = 0.0
        target, advantage = oracle_vtrace(
            np.exp(log_pi - arrays["log_probabilities"][steps]),
            discounts,
            arrays["rewards"][steps].astype(float),
            values[rows],
            values[row + length],
            config.rho_bar,
            config.c_bar,
            config.lambda_,
        )
        targets.append(target)
        advantages.append(advantage)
        step_rows += list(range(row, row + length))
        row, step = row + length + 1, step + length
    advantages, targets = np.concatenate(advantages), np.concatenate(targets)
    log_policy = logits[step_rows] - np.log(np.exp(logits[step_rows]).sum(-1, keepdims=True))
    log_pi = log_policy[np.arange(len(targets)), arrays["actions"]]
    ratios = np.exp(log_pi - arrays["log_probabilities"])
    is_clipped = np.where(advantages > 0, ratios > 1 + config.clip, ratios < 1 - config.clip)
    policy = -(advantages * ~is_clipped * np.log(ratios)).mean()
    value = 0.5 * ((targets - values[step_rows]) ** 2).mean()
    entropy = -(np.exp(log_policy) * log_policy).sum(-1).mean()
    return policy + config.value_cost * value - config.entropy_cost * entropy, policy, value, entropy


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rho_bar", "c_bar", "lambda_"), [(1.0, 1.0, 1.0), (2.0, 0.7, 0.9)])
def test_vtrace_equals_the_papers_double_sum(seed: int, rho_bar: float, c_bar: float, lambda_: float) -> None:
    random = np.random.default_rng(seed)
    length = 12
    ratios = np.exp(random.normal(size=length))
    discounts = np.where(random.random(length) < 0.2, 0.0, 0.97)
    rewards, values = random.normal(size=length), random.normal(size=length + 1)
    targets, advantages = oracle_vtrace(ratios, discounts, rewards, values[:-1], values[-1], rho_bar, c_bar, lambda_)

    def column(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float32).unsqueeze(1)

    trace = vtrace(
        column(np.log(ratios)),
        column(discounts),
        column(rewards),
        column(values),
        torch.ones(length, 1),
        rho_bar,
        c_bar,
        lambda_,
    )
    np.testing.assert_allclose(trace.targets_TB[:, 0], targets, **TOLERANCE)
    np.testing.assert_allclose(trace.advantages_TB[:, 0], advantages, **TOLERANCE)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 9], [7, 7], [20, 3, 14, 1, 8]])
def test_loss_equals_the_oracle_on_segments_of_unequal_length(lengths: list[int]) -> None:
    config = ImpalaConfig(rho_bar=1.5, c_bar=0.9, lambda_=0.95, entropy_cost=0.03, clip=0.4, normalize_advantages=False)
    batch, arrays = draw_batch(len(lengths), lengths)
    random = np.random.default_rng(7)
    rows = sum(lengths) + len(lengths)
    logits, values = random.normal(size=(rows, 3)), random.normal(size=rows)
    losses = impala_loss(
        torch.tensor(logits, dtype=torch.float32),
        torch.tensor(values, dtype=torch.float32),
        batch,
        config,
        Categorical(),
    )
    expected = oracle_loss(logits, values, arrays, config)
    np.testing.assert_allclose([float(loss) for loss in losses[:4]], expected, **TOLERANCE)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_the_whole_loss_is_the_papers(seed: int, normalize: bool) -> None:
    """The three sums of section 4.2, as means over the steps, for any truncation levels, segments and endings."""
    random = np.random.default_rng(seed)
    config = ImpalaConfig(
        discount=random.choice([0.0, 0.9, 1.0]), rho_bar=random.choice([0.5, 1.0, 3.0]),
        c_bar=random.choice([0.3, 1.0]), lambda_=random.choice([0.0, 0.9, 1.0]),
        value_cost=0.7, entropy_cost=0.05, normalize_advantages=normalize, clip=1e9,
    )  # fmt: skip
    batch, arrays = draw_batch(seed, random.integers(1, 30, 4).tolist())
    num_steps, num_rows = len(arrays["rewards"]), len(arrays["observations"])
    logits = torch.tensor(random.normal(size=(num_rows, 3)), dtype=torch.float64, requires_grad=True)
    values = torch.tensor(random.normal(size=num_rows), dtype=torch.float64, requires_grad=True)
    double = batch._replace(rewards=batch.rewards.double(), log_probabilities=batch.log_probabilities.double())
    impala_loss(logits, values, double, config, Categorical()).total.backward()

    pi, v = torch.softmax(logits.detach(), -1).numpy(), values.detach().numpy()
    rows = []
    targets = []
    advantages = []
    step = 0
    row = 0
    for length, terminated in zip(arrays["lengths"], arrays["terminated"], strict=True):
        here, steps = np.arange(row, row + length), slice(step, step + length)
        ratios = pi[here, arrays["actions"][steps]] / np.exp(arrays["log_probabilities"][steps].astype(float))
        discounts = np.full(length, config.discount)
        discounts[-1] *= not terminated
        rewards = arrays["rewards"][steps].astype(float)
        levels = (config.rho_bar, config.c_bar, config.lambda_)
        found = oracle_vtrace(ratios, discounts, rewards, v[here], v[row + length], *levels)
        rows = [*rows, *here]
        targets = [*targets, *found[0]]
        advantages = [*advantages, *found[1]]
        step, row = step + length, row + length + 1
    weights = np.array(advantages)
    if normalize:
        weights = (weights - weights.mean()) / (weights.std() + 1e-8)
    p = pi[rows]
    entropies = -(p * np.log(p)).sum(-1, keepdims=True)
    pushed = -weights[:, None] * (np.eye(3)[arrays["actions"]] - p) + config.entropy_cost * p * (np.log(p) + entropies)
    expected_logits, expected_values = np.zeros((num_rows, 3)), np.zeros(num_rows)
    expected_logits[rows] = pushed / num_steps
    expected_values[rows] = config.value_cost * (v[rows] - np.array(targets)) / num_steps
    np.testing.assert_allclose(logits.grad, expected_logits, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(values.grad, expected_values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_actions", [3, 40])
def test_log_probabilities_and_entropies_of_short_and_of_long_rows(num_actions: int) -> None:
    logits, actions = torch.randn(7, num_actions).double(), torch.arange(7) % num_actions
    log_policy = logits.numpy() - np.log(np.exp(logits.numpy()).sum(1, keepdims=True))
    log_pi, entropies = Categorical().evaluate(logits, actions)
    np.testing.assert_allclose(log_pi, log_policy[range(7), actions], rtol=1e-12)
    np.testing.assert_allclose(entropies, -(np.exp(log_policy) * log_policy).sum(1), rtol=1e-12)


@pytest.mark.parametrize("terminated", [True, False])
def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not(terminated: bool) -> None:
    config = ImpalaConfig(discount=0.9)
    batch = build_batch(
        np.zeros((2, 1)), np.zeros(1, np.int64), np.ones(1), np.zeros(1), np.array([1]), np.array([terminated])
    )
    logits, values = torch.zeros(2, 1), torch.tensor([2.0, 10.0])
    losses = impala_loss(logits, values, batch._replace(rewards=batch.rewards.float()), config, Categorical())
    target = 1.0 if terminated else 1.0 + 0.9 * 10.0
    assert float(losses.value) == pytest.approx(0.5 * (target - 2.0) ** 2)


def test_a_segments_padding_and_its_neighbours_do_not_change_its_targets() -> None:
    config = ImpalaConfig(normalize_advantages=False)
    model = ActorCritic(4, 3, (8,))
    both, _ = draw_batch(21, [3, 10])
    alone = SegmentBatch(
        both.observations[:4], both.actions[:3], both.rewards[:3], both.log_probabilities[:3],
        both.lengths_B[:1], both.terminated_B[:1],
    )  # fmt: skip
    rest = SegmentBatch(
        both.observations[4:], both.actions[3:], both.rewards[3:], both.log_probabilities[3:],
        both.lengths_B[1:], both.terminated_B[1:],
    )  # fmt: skip
    with torch.no_grad():
        whole = impala_loss(*model(both.observations), both, config, Categorical())
        parts = [impala_loss(*model(one.observations), one, config, Categorical()) for one in (alone, rest)]
    expected = (3 * float(parts[0].total) + 10 * float(parts[1].total)) / 13
    assert float(whole.total) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("behaviour", "is_pushed"), [(0.3, True), (0.25, False)])
def test_experience_pushes_no_further_than_the_trust_region(behaviour: float, is_pushed: bool) -> None:
    """π = 1/3 of an action that μ took with 0.3 or 0.25: π/μ is 1.11, within 1 + 0.2, or 1.33."""
    one = build_batch(
        np.zeros((2, 1)), np.array([0]), np.array([1.0], np.float32), np.log(np.array([behaviour], np.float32)),
        np.array([1]), np.array([True]),
    )  # fmt: skip
    logits = torch.zeros(2, 3, requires_grad=True)
    config = ImpalaConfig(entropy_cost=0.0, normalize_advantages=False)
    losses = impala_loss(logits, torch.zeros(2), one, config, Categorical())
    losses.policy.backward()
    assert bool(logits.grad.abs().sum() > 0) == is_pushed
    assert float(losses.clip_fraction) == (not is_pushed)
