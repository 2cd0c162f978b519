"""Acting for many streams at once: the actions and log-probabilities of acting for each alone."""

import math
from typing import Any

import numpy as np
import pytest

from shoal.actor.policy import MlpPolicy, make_policy
from shoal.errors import WeightsError
from shoal.wire import PolicySpec

LAYERS = (("w0", "b0"), ("w1", "b1"))
NUM_DRAWS = 8000
RANDOM = np.random.default_rng(3)
GREEDY: dict[str, Any] = {"kind": "mlp_epsilon_greedy", "epsilon": "e", "epsilon_exponent": 1.0}


def make(kind: str, num_outputs: int = 3, **fields: Any) -> MlpPolicy:
    """A policy of large random weights: far from the uniform one, which would hide a mistake."""
    policy = make_policy(PolicySpec(kind, "tanh", LAYERS, **fields), 0, "actor-0", (2,) if num_outputs == 5 else ())
    weights = {"e": np.float32(0.5)}
    for index, (rows, columns) in enumerate(((8, 4), (num_outputs, 8))):
        weights[f"w{index}"] = RANDOM.normal(0, 0.7, (rows, columns)).astype(np.float32)
        weights[f"b{index}"] = RANDOM.normal(0, 0.7, rows).astype(np.float32)
    policy.load(1, weights)
    return policy


def draw_alone(policy: MlpPolicy, observation: np.ndarray) -> list[tuple[Any, float]]:
    return [policy.act(observation) for _ in range(NUM_DRAWS)]


def draw_last(policy: MlpPolicy, observations: np.ndarray) -> list[tuple[Any, float]]:
    """The action of the last observation, which is that of stream 0."""
    drawn = []
    for _ in range(NUM_DRAWS):
        actions, log_probabilities = policy.act_batch(observations, range(len(observations))[::-1])
        drawn.append((actions[-1], log_probabilities[-1]))
    return drawn


def count(drawn: list[tuple[Any, float]]) -> dict[tuple[int, ...], tuple[int, float]]:
    """How often each action came, and its log-probability, which must be the same each time."""
    counts: dict[tuple[int, ...], tuple[int, float]] = {}
    for action, log_probability in drawn:
        key = tuple(np.ravel(action).tolist())
        number, before = counts.get(key, (0, log_probability))
        assert log_probability == pytest.approx(before, abs=1e-12)
        counts[key] = (number + 1, before)
    return counts


@pytest.mark.parametrize(  # as arrays from 8 rows on
    ("fields", "num_rows"),
    [
        ({"kind": "mlp_categorical"}, 12),
        ({"kind": "mlp_multi_categorical", "num_outputs": 5, "action_sizes": (3, 2)}, 3),
        (GREEDY, 12),
    ],
)
def test_choices_have_the_probabilities_of_acting_alone(fields: dict[str, Any], num_rows: int) -> None:
    """Frequencies: within five standard deviations of the probability. Log-probabilities:
    float32 sums in another order."""
    policy, observations = make(**fields), RANDOM.normal(0, 0.3, (num_rows, 4)).astype(np.float32)
    alone, together = count(draw_alone(policy, observations[-1])), count(draw_last(policy, observations))
    for action in alone.keys() & together.keys():
        assert together[action][1] == pytest.approx(alone[action][1], abs=1e-5)
    for counts in (alone, together):
        for number, log_probability in counts.values():
            probability = math.exp(log_probability)
            assert abs(number / NUM_DRAWS - probability) < 5 * math.sqrt(probability * (1 - probability) / NUM_DRAWS)
        assert sum(math.exp(each) for _, each in counts.values()) > 0.99


def test_masked_rows_have_the_probabilities_of_the_allowed_actions() -> None:
    """Log-probabilities of a row alone, to float32's rounding; an action that is not allowed never comes."""
    policy, observations = make("mlp_categorical"), RANDOM.normal(0, 0.3, (12, 4)).astype(np.float32)
    masks = RANDOM.random((12, 3)) < 0.5
    masks[np.arange(12), np.arange(12) % 3] = True
    seen: list[dict[int, float]] = [{} for _ in masks]
    for _ in range(200):
        for row, (action, log_probability) in enumerate(
            zip(*policy.act_batch(observations, range(12), masks), strict=True)
        ):
            seen[row][action] = math.exp(log_probability)
    for row, mask in enumerate(masks):
        assert all(mask[action] for action in seen[row])
        if len(seen[row]) == mask.sum():
            assert sum(seen[row].values()) == pytest.approx(1.0, abs=1e-5)
        action, log_probability = policy.act(observations[row], mask=mask)
        assert seen[row].get(action, math.exp(log_probability)) == pytest.approx(math.exp(log_probability), abs=1e-5)


def test_each_stream_explores_in_its_own_way() -> None:
    """ε is 0.5 ^ (1 + u), and u is 0 and 1/2 for the streams 0 and 1 of actor-0: an action that is not the best has the
    probability ε / 3."""
    policy = make(**GREEDY)
    seen: dict[int, set[float]] = {0: set(), 1: set()}
    for _ in range(200):
        _, log_probabilities = policy.act_batch(np.zeros((2, 4), np.float32), (0, 1))
        for stream, log_probability in enumerate(log_probabilities):
            seen[stream].add(round(math.exp(log_probability), 6))
    for stream, epsilon in ((0, 0.5), (1, 0.5**1.5)):
        assert seen[stream] == {round(epsilon / 3, 6), round(1 - epsilon + epsilon / 3, 6)}
    with pytest.raises(WeightsError, match="'e'"):
        policy.load(2, {})


def test_a_batch_of_one_is_acting_alone() -> None:
    weights = {"w": RANDOM.normal(size=(3, 4)).astype(np.float32), "b": np.zeros(3, np.float32)}
    alone, together = (make_policy(PolicySpec("mlp_categorical", "tanh", (("w", "b"),)), seed=0) for _ in range(2))
    alone.load(1, weights)
    together.load(1, weights)
    for _ in range(100):
        actions, log_probabilities = together.act_batch([np.ones(4)], range(1))
        assert (actions[0], log_probabilities[0]) == alone.act(np.ones(4))
