"""Actions of a Box: the actor's squashed Gaussian against the learner's and against an oracle; bounds; pairings."""

from __future__ import annotations

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rl_setting import EXPERIENCE, segment
from shoal.actor.environment import require_matching_spaces
from shoal.actor.policy import make_policy
from shoal.actor.segment_builder import SegmentBuilder
from shoal.errors import ConfigError, InvalidSegment, WeightsError
from shoal.flows.rl_policy import describe_policy_model
from shoal.models.action_distribution import SquashedGaussian
from shoal.models.actor_critic import ActorCritic
from shoal.rl.spec import RLSpec, experience_spec, network_kwargs
from shoal.wire import DropReason, ExperienceSpec, MessageLimits, Segment, decode, pack_segment, unpack_segment

LOW = np.array([[-2.0, 0.0], [10.0, -1e-3]], np.float32)
HIGH = np.array([[2.0, 0.1], [11.0, 1e3]], np.float32)
SPEC = RLSpec(hidden=(8,), segment_length=16, algorithm={"name": "ppo"})
OBSERVES = Box(-10, 10, (4,), np.float32)
BOX = experience_spec(OBSERVES, Box(LOW, HIGH), SPEC)


def make_model(log_std: float = 0.0) -> ActorCritic:
    """With weights far from those of a fresh one, whose means are nearly 0."""
    torch.manual_seed(3)
    model = ActorCritic(**network_kwargs(SPEC, BOX))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.7)
        assert model.log_std is not None
        model.log_std += log_std
    return model


def act_repeatedly(model: ActorCritic, num_steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    policy = make_policy(BOX.policy, 0, action_shape=BOX.action.shape)
    policy.load(1, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()})
    observations = np.random.default_rng(1).normal(size=(num_steps, 4)).astype(np.float32)
    actions, log_densities = zip(*(policy.act(each) for each in observations), strict=True)
    return observations, np.array(actions), np.array(log_densities)


@pytest.mark.parametrize("log_std", [-3.0, 0.0, 2.0])
def test_the_log_density_of_an_actor_is_that_of_the_learners_network(log_std: float) -> None:
    """Tolerance: float32 means and log_stds, whose errors a small standard deviation magnifies."""
    model = make_model(log_std)
    observations, actions, log_densities = act_repeatedly(model, 200)
    outputs, _ = model(torch.from_numpy(observations))
    found, _ = model.distribution.evaluate(outputs, torch.from_numpy(actions))
    np.testing.assert_allclose(log_densities, found.detach().numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("log_std", [-3.0, 6.0])
def test_actions_honour_their_bounds(log_std: float) -> None:
    _, actions, log_densities = act_repeatedly(make_model(log_std), 300)
    assert actions.dtype == np.float32
    assert actions.shape == (300, 2, 2)
    assert (actions >= LOW).all()
    assert (actions <= HIGH).all()
    assert np.isfinite(log_densities).all()
    assert log_std < 0 or np.ptp(actions, 0).min() > 0.99 * (HIGH - LOW).min()


def test_actions_are_distributed_as_the_outputs_tell() -> None:
    """The fraction below the middle is that of a Gaussian below 0; three standard errors of 4000 draws."""
    model = make_model(-0.5)
    policy = make_policy(BOX.policy, 5, action_shape=BOX.action.shape)
    policy.load(1, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()})
    observation = np.full(4, 0.3, np.float32)
    actions = np.array([policy.act(observation)[0] for _ in range(4000)])
    with torch.no_grad():
        means, log_stds = model.distribution.split(model(torch.from_numpy(observation)[None])[0])
    expected = [0.5 * math.erfc(float(m / s) / math.sqrt(2)) for m, s in zip(means[0], log_stds[0].exp(), strict=True)]
    found = (actions < (LOW.astype(np.float64) + HIGH) / 2).mean(0).ravel()
    np.testing.assert_allclose(found, expected, atol=3 * 0.5 / math.sqrt(4000))


def test_density_and_entropy_are_those_of_the_equations() -> None:
    random = np.random.default_rng(0)
    low, high = np.array([-1.0, 3.0]), np.array([1.0, 7.0])
    means, log_stds, u = (random.normal(size=(9, 2)) for _ in range(3))
    actions = (low + high) / 2 + (high - low) / 2 * np.tanh(u)
    distribution = SquashedGaussian(low.tolist(), high.tolist())
    outputs = torch.from_numpy(np.concatenate([means, log_stds], 1))
    log_pi, entropy = distribution.evaluate(outputs, torch.from_numpy(actions))
    densities = np.exp(-0.5 * ((u - means) / np.exp(log_stds)) ** 2) / (np.exp(log_stds) * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(log_pi, np.log(densities).sum(1), rtol=1e-9)
    np.testing.assert_allclose(entropy, (0.5 * np.log(2 * np.pi * np.e) + log_stds).sum(1), rtol=1e-9)


def test_an_endpoint_answers_the_action_at_the_mean() -> None:
    with torch.no_grad():
        answer = make_model().predict(torch.randn(3, 4))
    _, signature = describe_policy_model(SPEC, BOX)
    assert {each.name: list(answer[each.name].shape[1:]) for each in signature.outputs} == {
        each.name: each.shape[1:] for each in signature.outputs
    }
    center, half = (LOW.astype(np.float64) + HIGH) / 2, (HIGH.astype(np.float64) - LOW) / 2
    expected = center + half * np.tanh(answer["mean"].numpy().reshape(3, 2, 2))
    np.testing.assert_allclose(answer["action"], expected, rtol=1e-5)


def test_weights_that_do_not_fit_the_action_are_refused_by_name() -> None:
    policy = make_policy(BOX.policy, 0, action_shape=BOX.action.shape)
    arrays = {name: tensor.detach().numpy() for name, tensor in make_model().state_dict().items()}
    for name in ("log_std", "policy.2.bias"):
        with pytest.raises(WeightsError, match=name):
            policy.load(1, {**arrays, name: np.zeros(3, np.float32)})


# -- the spec ---------------------------------------------------------------------------------------------------------


def test_a_box_of_doubles_is_narrowed_to_float32_within_its_bounds() -> None:
    space = Box(np.array([0.1]), np.array([0.3]), dtype=np.float64)
    policy = experience_spec(OBSERVES, space, SPEC).policy
    assert 0.1 <= policy.action_low[0] < policy.action_high[0] <= 0.3


@pytest.mark.parametrize(
    "space", [Box(-np.inf, 1, (2,)), Box(0, np.inf, (1,)), Box(0, 9, (2,), np.int64), Box(1, 1, (1,)), Box(0, 1, (0,))]
)
def test_a_box_without_a_middle_is_refused(space: Box) -> None:
    with pytest.raises(ConfigError, match="finite bounds"):
        experience_spec(OBSERVES, space, SPEC)


def test_a_pairing_that_does_not_fit_is_refused_with_what_fits() -> None:
    with pytest.raises(ConfigError, match=r"dqn needs a Discrete action space.*algorithm=impala or .*algorithm=sac"):
        experience_spec(OBSERVES, Box(-1, 1, (1,)), RLSpec(algorithm="dqn"))
    with pytest.raises(ConfigError, match=r"sac needs a Box action space.*algorithm=impala or .*algorithm=dqn"):
        experience_spec(OBSERVES, Discrete(2), RLSpec(algorithm="sac"))


def test_another_box_than_the_runs_is_refused_at_the_actor() -> None:
    game = gymnasium.Env()
    game.observation_space, game.action_space = OBSERVES, Box(LOW, HIGH)
    require_matching_spaces(game, "G", BOX)
    for other in (Box(LOW, HIGH + 1), Box(LOW.ravel(), HIGH.ravel()), Discrete(2)):
        game.action_space = other
        with pytest.raises(ConfigError, match="this run with a Box of"):
            require_matching_spaces(game, "G", BOX)


# -- the segments -----------------------------------------------------------------------------------------------------


def make_segment(**changes: object) -> Segment:
    actions = np.broadcast_to((LOW + HIGH) / 2, (8, 2, 2)).copy()
    return replace(segment(8, actions=actions), **changes)  # type: ignore[arg-type]


def receive(sent: Segment, spec: ExperienceSpec = BOX) -> Segment:
    frames = pack_segment(sent, 0)
    return unpack_segment(decode(frames, MessageLimits()), frames[1:], spec)  # type: ignore[arg-type]


def test_a_density_may_be_above_1_and_a_probability_may_not() -> None:
    dense = np.full(8, 5.0, np.float32)
    assert receive(make_segment(log_probabilities=dense)).log_probabilities[0] == 5.0
    with pytest.raises(InvalidSegment) as caught:
        receive(segment(8, log_probabilities=dense), EXPERIENCE)
    assert caught.value.reason is DropReason.INVALID_RANGE


def test_each_number_has_bounds_of_its_own() -> None:
    actions = make_segment().actions
    actions[5, 0, 1] = 0.5  # another number of the action may be so large
    with pytest.raises(InvalidSegment, match=r"number 1 of step 5 is 0\.5, expected within \[0, 0\.1\]") as caught:
        receive(make_segment(actions=actions))
    assert caught.value.reason is DropReason.INVALID_RANGE


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        (np.zeros(8, np.int64), DropReason.INVALID_DTYPE),
        (np.zeros((8, 2, 2)), DropReason.INVALID_DTYPE),
        (np.zeros((8, 4), np.float32), DropReason.INVALID_SHAPE),
        (np.full((8, 2, 2), np.nan, np.float32), DropReason.NON_FINITE),
        (np.full((8, 2, 2), -3.0, np.float32), DropReason.INVALID_RANGE),
    ],
)
def test_actions_that_are_not_of_the_box_are_dropped_for_a_reason(actions: np.ndarray, reason: DropReason) -> None:
    with pytest.raises(InvalidSegment) as caught:
        receive(make_segment(actions=actions))
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("action", "reason"), [(np.zeros(4), DropReason.INVALID_SHAPE), ([["a"] * 2] * 2, DropReason.INVALID_DTYPE)]
)
def test_a_builder_refuses_actions_of_another_form(action: object, reason: DropReason) -> None:
    builder = SegmentBuilder(BOX)
    builder.begin(np.zeros(4, np.float32))
    with pytest.raises(InvalidSegment) as caught:
        builder.step(action, 0.0, 1, 0.0, np.zeros(4, np.float32), terminated=True, truncated=False)
    assert caught.value.reason is reason
