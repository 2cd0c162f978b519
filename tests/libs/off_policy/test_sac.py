"""SAC's losses against NumPy oracles of the paper's equations, and its updates."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from rl_setting import random_batch
from shoal.errors import ConfigError
from shoal.flows.rl_policy import describe_policy_model
from shoal.libs.off_policy.gaussian_actor import TwinCritic
from shoal.libs.off_policy.sac import actor_loss, critic_loss, soft_targets, temperature_loss
from shoal.models.action_distribution import SquashedGaussian
from shoal.rl.algorithms.algorithm import NonFiniteLoss, make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec

SPEC = RLSpec(hidden=(16,), segment_length=16, algorithm={"name": "sac", "learning_starts": 16, "batch_size": 8})
EXPERIENCE = experience_spec(Box(-9, 9, (3,), np.float32), Box(-2, 4, (2,), np.float32), SPEC)


pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch(seed: int, lengths: list[int]) -> ExperienceBatch:
    actions = np.random.default_rng(seed).uniform(-2, 4, (sum(lengths), 2)).astype(np.float32)
    return random_batch(seed, lengths, size=3, actions=actions)


def make_sac(seed: int = 0, **fields: object):
    torch.manual_seed(seed)
    return make_algorithm(SPEC.update({"algorithm": fields}), EXPERIENCE)


# -- equations --------------------------------------------------------------------------------------------------------


def test_the_losses_are_those_of_the_equations() -> None:
    random = np.random.default_rng(0)
    rewards = random.normal(size=7)
    log_pi = random.normal(size=7)
    discounts = 0.9 * (random.random(7) < 0.7)
    q = random.normal(size=(2, 7))
    next_q = random.normal(size=(2, 7))
    alpha = 0.3
    target_entropy = -2.0
    targets = [
        r + d * (min(q1, q2) - alpha * p) for r, d, q1, q2, p in zip(rewards, discounts, *next_q, log_pi, strict=True)
    ]
    tensors = [torch.from_numpy(each) for each in (rewards, discounts, next_q, log_pi)]
    found = soft_targets(*tensors, torch.tensor(alpha, dtype=torch.float64))
    np.testing.assert_allclose(found, targets, rtol=1e-12)
    expected = sum(np.mean([0.5 * (one - y) ** 2 for one, y in zip(each, targets, strict=True)]) for each in q)
    np.testing.assert_allclose(critic_loss(torch.from_numpy(q), found), expected, rtol=1e-12)
    expected = np.mean([alpha * p - min(q1, q2) for p, q1, q2 in zip(log_pi, *q, strict=True)])
    np.testing.assert_allclose(actor_loss(tensors[3], torch.from_numpy(q), torch.tensor(alpha)), expected, rtol=1e-6)
    log_alpha = torch.tensor(np.log(alpha), requires_grad=True)
    loss = temperature_loss(log_alpha, tensors[3], target_entropy)
    np.testing.assert_allclose(loss.item(), np.mean(-alpha * log_pi - alpha * target_entropy), rtol=1e-12)
    loss.backward()  # α rises exactly where the entropy, -E log π, is below the target
    assert (log_alpha.grad < 0) == (-log_pi.mean() < target_entropy)


@pytest.mark.parametrize("log_std", [-1.0, 0.0, 0.7])
def test_the_density_of_a_sample_is_that_of_a_variable_between_its_bounds(log_std: float) -> None:
    """Its probability between two numbers is that of u between their inverses, by the derivative of the distribution
    function, computed with central differences; and it integrates to 1 over (-1, 1)."""
    noise = torch.linspace(-4, 4, 40_001, dtype=torch.float64)[:, None]
    outputs = torch.tensor([[0.4, log_std]], dtype=torch.float64).expand(len(noise), 2)
    y, log_pi = SquashedGaussian([-1.0], [1.0]).sample(outputs, noise)
    density, y = log_pi.exp().numpy(), y[:, 0].numpy()
    assert np.trapezoid(density, y) == pytest.approx(1.0, abs=1e-3)
    cumulated = 0.5 * (1 + torch.erf(noise[:, 0] / 2**0.5)).numpy()
    middle = slice(1000, -1000)
    slopes = (cumulated[2:] - cumulated[:-2]) / (y[2:] - y[:-2])
    np.testing.assert_allclose(density[1:-1][middle], slopes[middle], rtol=1e-4)


def test_the_density_stays_finite_where_tanh_rounds_to_1() -> None:
    outputs = torch.tensor([[30.0, 0.0]])
    y, log_pi = SquashedGaussian([-1.0], [1.0]).sample(outputs, torch.zeros(1, 1))
    assert y.item() == 1.0
    assert log_pi.item() == pytest.approx(60 - 2 * np.log(2) - 0.5 * np.log(2 * np.pi), rel=1e-5)


def test_the_twins_are_two_perceptrons() -> None:
    torch.manual_seed(0)
    critic = TwinCritic(3, 2, (5, 4))
    observation, action = torch.randn(6, 3), torch.randn(6, 2)
    found = critic(observation, action)
    for index in range(2):
        hidden = torch.cat([observation, action], 1)
        for layer, (weight, bias) in enumerate(zip(critic.weights, critic.biases, strict=True)):
            hidden = hidden @ weight[index] + bias[index]
            hidden = hidden.relu() if layer < 2 else hidden
        torch.testing.assert_close(found[index], hidden.squeeze(-1))
    assert not torch.allclose(found[0], found[1])


# -- updates ----------------------------------------------------------------------------------------------------------


def test_nothing_is_learnt_before_learning_starts_and_then_a_step_for_each_inserted_one() -> None:
    sac = make_sac(updates_per_step=0.5)
    assert list(sac.update(make_batch(0, [8]))) == []
    assert len(list(sac.update(make_batch(1, [4, 4])))) == 4
    assert len(list(sac.update(make_batch(2, [5])))) == 2
    assert len(list(sac.update(make_batch(3, [5])))) == 3  # the half of a step before is owed


def test_the_target_moves_by_tau_and_only_the_policy_is_published() -> None:
    sac = make_sac(tau=0.25)
    list(sac.update(make_batch(0, [12])))
    before = [each.clone() for each in sac._target.parameters()]
    critic_before = [each.clone() for each in sac._critic.parameters()]
    update = sac.update(make_batch(1, [4]))
    next(update)
    for target, old, critic, old_critic in zip(
        sac._target.parameters(), before, sac._critic.parameters(), critic_before, strict=True
    ):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * critic)
        assert not torch.equal(critic, old_critic)
    assert sac.model.state_dict().keys() == {
        f"policy.{index}.{name}" for index in (0, 2) for name in ("weight", "bias")
    }


def test_the_targets_follow_critics_that_have_moved_before_the_actors_loss_overflows() -> None:
    sac = make_sac(tau=0.25)
    sac.insert(random_batch(0, [1] * 8, [True] * 8, size=3, actions=np.zeros((8, 2), np.float32)), sac._replay)
    with torch.no_grad():
        sac._log_alpha.fill_(70.0)  # the square of the actor's gradient overflows; ended episodes have no next value
    policy, critic, target = (
        [each.detach().clone() for each in module.parameters()] for module in (sac.model, sac._critic, sac._target)
    )
    with pytest.raises(NonFiniteLoss):
        sac.learn(sac.draw()[1])
    assert all(torch.equal(*each) for each in zip(policy, sac.model.parameters(), strict=True))
    assert sac._log_alpha == 70.0
    for old_target, new_target, old, new in zip(
        target, sac._target.parameters(), critic, sac._critic.parameters(), strict=True
    ):
        assert not torch.equal(old, new)
        torch.testing.assert_close(new_target, 0.75 * old_target + 0.25 * new)


def test_the_temperature_moves_the_entropy_towards_its_target() -> None:
    for target_entropy, rises in ((5.0, True), (-20.0, False)):
        sac = make_sac(target_entropy=target_entropy)
        metrics = list(sac.update(make_batch(0, [32])))
        assert (metrics[-1]["learner/temperature"] > metrics[0]["learner/temperature"]) is rises


def test_a_resumed_learner_goes_on_from_the_same_state() -> None:
    first = make_sac()
    list(first.update(make_batch(0, [20])))
    second = make_sac(seed=1, learning_rate=0.5)
    second.load_state_dict(first.state_dict())
    for one, other in ((first.model, second.model), (first._critic, second._critic), (first._target, second._target)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert second._log_alpha == first._log_alpha
    assert second._optimizers["actor_optimizer"].param_groups[0]["lr"] == 0.5
    assert list(second.update(make_batch(1, [8]))) == []  # its replay, in memory, is empty: it fills it again


def test_an_endpoint_answers_an_action_and_no_value() -> None:
    factory, signature = describe_policy_model(SPEC, EXPERIENCE)
    answer = make_sac().model.predict(torch.zeros(2, 3))
    assert {each.name for each in signature.outputs} == answer.keys() == {"action", "mean", "log_std"}
    assert factory.factory.endswith("GaussianActor")


def test_a_replay_that_holds_no_segment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.replay_mb"):
        make_sac(replay_mb=1e-4)
