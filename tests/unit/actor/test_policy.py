"""The NumPy policy of an actor against the module that the learner trains, and against an oracle of its sampling."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from registered import arrays_of
from shoal.actor import MlpPolicy
from shoal.errors import ConfigError, WeightsError
from shoal.models.actor_critic import ActorCritic
from shoal.rl.spec import policy_spec
from shoal.wire import PolicySpec

ONE_LAYER = PolicySpec("mlp_categorical", "tanh", (("weight", "bias"),))


def model_with_large_weights(hidden: Sequence[int], num_actions: int = 3) -> ActorCritic:
    """Random weights that give logits far from equal; the initial ones are nearly uniform, and would hide a mistake."""
    torch.manual_seed(11)
    model = ActorCritic(4, num_actions, hidden)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.7)
    return model


def policy_with_logits(logits: Sequence[float], seed: int = 0) -> MlpPolicy:
    """A policy whose logits are these, whatever it observes."""
    policy = MlpPolicy(ONE_LAYER, seed)
    bias = np.array(logits, np.float32)
    policy.load(1, {"weight": np.zeros((len(logits), 1), np.float32), "bias": bias})
    return policy


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, by the definition."""
    shifted = logits.astype(np.float64) - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result


def log_probabilities(policy: MlpPolicy, observation: np.ndarray, num_actions: int) -> np.ndarray:
    """What `act` says of each action, gathered by sampling until each was seen."""
    seen: dict[int, float] = {}
    for _ in range(50_000):
        action, log_probability = policy.act(observation)
        assert seen.setdefault(action, log_probability) == log_probability
        if len(seen) == num_actions:
            break
    return np.array([seen[action] for action in range(num_actions)])


# -- against torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [(), (8,), (64, 64), (16, 8, 4)])
def test_log_probabilities_are_those_of_the_learner_s_module(hidden: tuple[int, ...]) -> None:
    """Tolerance 1e-5: both compute in float32 with sums of at most 64 terms of order 1, in another order of addition,
    so they differ by a few times 64 * 6e-8."""
    model = model_with_large_weights(hidden)
    policy = MlpPolicy(policy_spec(hidden), seed=3)
    policy.load(1, arrays_of(model))
    rng = np.random.default_rng(5)
    for observation in rng.normal(size=(10, 4)).astype(np.float32) * 0.3:
        with torch.no_grad():
            logits, _ = model(torch.from_numpy(observation)[None])
        expected = torch.log_softmax(logits[0], -1).numpy()
        drawn = dict(policy.act(observation) for _ in range(1500))
        for action in np.flatnonzero(expected > -5):  # more likely than e^-5: it has come by now
            assert drawn[int(action)] == pytest.approx(float(expected[action]), abs=1e-5)


def test_the_rectifier() -> None:
    """By hand: h = max(0, W x + b) = (1, 0), logits = (2, -1)."""
    policy = MlpPolicy(PolicySpec("mlp_categorical", "relu", (("w0", "b0"), ("w1", "b1"))), seed=0)
    first = {"w0": np.array([[1, 0], [0, 1]], np.float32), "b0": np.array([0.5, -4], np.float32)}
    second = {"w1": np.array([[2, 9], [-1, 9]], np.float32), "b1": np.zeros(2, np.float32)}
    policy.load(1, {**first, **second})
    observation = np.array([0.5, 1.0], np.float32)
    np.testing.assert_allclose(
        log_probabilities(policy, observation, 2), log_softmax(np.array([2.0, -1.0])), rtol=0, atol=1e-6
    )


def test_acting_leaves_observation_and_weights_as_they_were() -> None:
    model = model_with_large_weights((8,))
    policy = MlpPolicy(policy_spec((8,)), seed=3)
    loaded = arrays_of(model)
    before = {name: array.copy() for name, array in loaded.items()}
    policy.load(1, loaded)
    observation = np.ones(4, np.float32)
    for _ in range(10):
        policy.act(observation)
    assert observation.tolist() == [1, 1, 1, 1]
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, before[name])


# -- against an oracle of sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits", [[0.0, 0.0], [1.5, 0.0, -1.0, 0.3], [0.0] * 18, [3.0, -1.0], [80.0, 80.0, 79.0], [-90.0, -89.0]]
)
def test_actions_come_as_often_as_their_softmax_says(logits: list[float]) -> None:
    """Pearson's chi-square. A right sampler exceeds the bound (Wilson-Hilferty, 5 sigma) once in three million seeds;
    the seed is fixed. A sampler that is wrong by 2 points of a hundred in one action exceeds it."""
    num_samples = 20_000
    policy = policy_with_logits(logits, seed=17)
    observation = np.zeros(1, np.float32)
    counts = np.bincount([policy.act(observation)[0] for _ in range(num_samples)], minlength=len(logits))
    expected = np.exp(log_softmax(np.array(logits))) * num_samples
    assert expected.min() > 5, "chi-square needs some of each"
    freedom = len(logits) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < bound


@pytest.mark.parametrize("logits", [[0.0, 0.0], [1.5, 0.0, -1.0, 0.3], [1e4, 9999.0], [-1e30, -1e30], [3.4e38, 3.4e38]])
def test_log_probabilities_are_those_of_a_softmax(logits: list[float]) -> None:
    """The logits are float32, all after them float64: 1e-12 is for the last places of exp and log."""
    policy = policy_with_logits(logits)
    expected = log_softmax(np.array(logits, np.float32))
    got = log_probabilities(policy, np.zeros(1, np.float32), len(logits))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    assert got.max() <= 0


@pytest.mark.parametrize("kind", [np.float64, np.int64])
def test_an_observation_of_another_kind_is_acted_on_as_the_learner_sees_it(kind: type) -> None:
    """float32 holds no more than 24 bits: a policy that saw all of a time in seconds would be another one."""
    weight = np.array([[-1.0, 1.0], [0.0, 0.0]], np.float32)
    policy = MlpPolicy(ONE_LAYER, seed=0)
    policy.load(1, {"weight": weight, "bias": np.zeros(2, np.float32)})
    observation = np.array([1_700_000_001, 1_700_000_000]).astype(kind)
    seen = observation.astype(np.float32)
    assert seen[0] == seen[1]
    np.testing.assert_array_equal(log_probabilities(policy, observation, 2), log_probabilities(policy, seen, 2))


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_version_is_applied_whole_or_not_at_all() -> None:
    model = model_with_large_weights((8,))
    policy = MlpPolicy(policy_spec((8,)), seed=1)
    policy.load(3, arrays_of(model))
    broken = {**arrays_of(model_with_large_weights((8,))), "policy.2.bias": np.zeros(7, np.float32)}
    observation = np.full(4, 0.2, np.float32)
    before = log_probabilities(policy, observation, 3)
    with pytest.raises(WeightsError):
        policy.load(4, broken)
    assert policy.version == 3
    np.testing.assert_array_equal(log_probabilities(policy, observation, 3), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy.0.weight": None}, r"version 2 has no 'policy.0.weight' or no 'policy.0.bias'"),
        ({"policy.2.bias": None}, r"version 2 has no 'policy.2.weight' or no 'policy.2.bias'"),
        ({"policy.0.weight": np.zeros(8, np.float32)}, r"policy\.0\.weight is \(8,\), its bias \(8,\)"),
        ({"policy.0.weight": np.zeros((8, 4, 1), np.float32)}, r"policy\.0\.weight is \(8, 4, 1\)"),
        ({"policy.0.bias": np.zeros(9, np.float32)}, r"policy\.0\.weight is \(8, 4\), its bias \(9,\)"),
        ({"policy.0.bias": np.zeros((8, 1), np.float32)}, r"its bias \(8, 1\)"),
        ({"policy.2.weight": np.zeros((3, 9), np.float32)}, r"policy\.2\.weight takes 9 inputs"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    tensors = {**arrays_of(model_with_large_weights((8,))), **change}
    policy = MlpPolicy(policy_spec((8,)))
    with pytest.raises(WeightsError, match=message):
        policy.load(2, {name: array for name, array in tensors.items() if array is not None})
    assert policy.version == 0


def test_tensors_that_the_policy_does_not_name_are_ignored() -> None:
    policy = MlpPolicy(policy_spec(()))
    weight, bias = np.zeros((2, 4), np.float32), np.zeros(2, np.float32)
    policy.load(1, {"policy.0.weight": weight, "policy.0.bias": bias, "value.0.weight": np.zeros((1, 1, 1), np.int8)})
    assert policy.version == 1


def test_a_policy_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"policy\.kind = 'gaussian'"):
        MlpPolicy(PolicySpec("gaussian", "tanh", ()))
    with pytest.raises(ConfigError, match=r"policy\.activation = 'swish'"):
        MlpPolicy(PolicySpec("mlp_categorical", "swish", ()))


@pytest.mark.parametrize("hidden", [(), (16,), (12, 20), (9, 4, 11)])
def test_the_fast_perceptron_equals_its_layers_one_by_one_and_so_do_its_gradients(hidden: tuple[int, ...]) -> None:
    """σ and 2σ - 1 each round once a layer: the error is absolute, a few distances of neighbouring numbers near 1."""
    for dtype, tolerance in (
        (torch.float64, {"rtol": 1e-9, "atol": 1e-12}),
        (torch.float32, {"rtol": 1e-4, "atol": 1e-5}),
    ):
        model = model_with_large_weights(hidden).to(dtype)
        x = (3 * torch.randn(257, 4, dtype=dtype)).requires_grad_()
        for part in (model.policy, model.value):
            fast, slow = part(x), torch.nn.Sequential.forward(part, x)
            assert fast.dtype == dtype
            np.testing.assert_allclose(fast.detach(), slow.detach(), **tolerance, equal_nan=False)
            weights = torch.randn_like(fast)
            leaves = [x, *part.parameters()]
            gradients = [torch.autograd.grad((y * weights).sum(), leaves) for y in (fast, slow)]
            for fast_gradient, slow_gradient in zip(*gradients, strict=True):
                largest = float(slow_gradient.abs().max())
                assert fast_gradient.dtype == dtype
                np.testing.assert_allclose(
                    fast_gradient / largest, slow_gradient / largest, **tolerance, equal_nan=False
                )


def test_the_fast_perceptron_saturates_as_tanh_does() -> None:
    part = ActorCritic(1, 1, (1,)).policy
    with torch.no_grad():
        for parameter, value in zip(part.parameters(), (1.0, 0.0, 1.0, 0.0), strict=True):
            parameter.fill_(value)
    x = torch.linspace(-30, 30, 2_001).unsqueeze(-1)
    with torch.no_grad():
        np.testing.assert_allclose(part(x), torch.tanh(x), rtol=0, atol=2.5e-7, equal_nan=False)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in forward mode
@pytest.mark.parametrize("hidden", [(), (3,), (3, 2)])
def test_the_fast_perceptron_is_differentiated_any_number_of_times(hidden: tuple[int, ...]) -> None:
    part = ActorCritic(2, 2, hidden).double().policy
    x, direction = (torch.randn(4, 2, dtype=torch.float64) for _ in range(2))
    inputs = (x.clone().requires_grad_(), *part.parameters())

    def compute(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        named = dict(zip(dict(part.named_parameters()), parameters, strict=True))
        outputs: torch.Tensor = torch.func.functional_call(part, named, x)
        return outputs

    assert torch.autograd.gradcheck(compute, inputs, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(compute, inputs, check_batched_grad=True, fast_mode=True)
    (slope,) = torch.autograd.grad(part(inputs[0]).sum(), inputs[0], create_graph=True)
    assert slope.requires_grad
    rows = torch.vmap(torch.func.grad(lambda row: part(row).sum()))(x)
    torch.testing.assert_close(rows, slope)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        found = torch.autograd.forward_ad.unpack_dual(part(torch.autograd.forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(found.sum(), (slope * direction).sum())


def test_the_perceptron_takes_any_leading_dimensions_and_autocast() -> None:
    part = ActorCritic(4, 2, (8,)).policy
    x = torch.randn(2, 3, 4, requires_grad=True)
    expected = torch.autograd.grad(part(x.flatten(0, 1)).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(part(x).square().sum(), x)[0], expected)
    (one,) = torch.autograd.grad(part(x[0, 0]).square().sum(), x)
    torch.testing.assert_close(one[0, 0], expected[0, 0])
    with torch.autocast("cpu"):
        outputs = part(x.flatten(0, 1))
    outputs.float().square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))
