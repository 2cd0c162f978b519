"""Actions of a Box and of several choices: an actor's against the learner's network and an oracle; what is refused."""

import math
from dataclasses import replace
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from registered import arrays_of
from rl_setting import EXPERIENCE, segment
from shoal.actor.environment import require_matching_spaces
from shoal.actor.policy import MlpPolicy, make_policy
from shoal.actor.segment_builder import SegmentBuilder
from shoal.errors import ConfigError, InvalidSegment, WeightsError
from shoal.flows.rl_policy import describe_policy_model, inspect_environment
from shoal.models.action_distribution import SquashedGaussian
from shoal.models.actor_critic import ActorCritic
from shoal.rl.spec import RLSpec, experience_spec, network_kwargs
from shoal.wire import (
    DropReason,
    ExperienceSpec,
    MessageLimits,
    PolicySpec,
    Segment,
    decode,
    pack_segment,
    unpack_segment,
)

LOW = np.array([[-2.0, 0.0], [10.0, -1e-3]], np.float32)
HIGH = np.array([[2.0, 0.1], [11.0, 1e3]], np.float32)
OBSERVES = Box(-10, 10, (4,), np.float32)
SPACES = {
    "box": Box(LOW, HIGH),
    "choices": MultiDiscrete([3, 2, 4]),
    "grid": MultiDiscrete([[3, 2], [4, 5]]),
    "binary": MultiBinary(3),
    "one": Discrete(2),
}
SPEC = RLSpec(hidden=(8,), segment_length=16, algorithm={"name": "ppo"})
SPECS = {name: experience_spec(OBSERVES, space, SPEC) for name, space in SPACES.items()}
BOX, CHOICES = SPECS["box"], SPECS["choices"]


def make_model(experience: ExperienceSpec = BOX, log_std: float = 0.0) -> ActorCritic:
    """With weights far from those of a fresh one, whose outputs are nearly 0."""
    torch.manual_seed(3)
    model = ActorCritic(**network_kwargs(SPEC, experience))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.7)
        if model.log_std is not None:
            model.log_std += log_std
    return model


def load(model: ActorCritic, experience: ExperienceSpec = BOX, seed: int = 0, **changes: np.ndarray) -> MlpPolicy:
    policy = make_policy(experience.policy, seed, action_shape=experience.action.shape)
    policy.load(1, arrays_of(model) | changes)
    return policy


def act_repeatedly(
    model: ActorCritic, experience: ExperienceSpec, are_together: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    policy, observations = load(model, experience), np.random.default_rng(1).normal(size=(300, 4)).astype(np.float32)
    if are_together:
        actions, log_probabilities = policy.act_batch(observations, range(300))
    else:
        actions, log_probabilities = zip(*(policy.act(each) for each in observations), strict=True)
    return observations, np.array(actions), np.array(log_probabilities)


@pytest.mark.parametrize(
    ("name", "log_std"), [("box", -3.0), ("box", 0.0), ("box", 2.0), ("choices", 0.0), ("grid", 0.0), ("binary", 0.0)]
)
@pytest.mark.parametrize("are_together", [False, True])
def test_an_actor_chooses_within_the_space_by_the_learners_probabilities(
    name: str, log_std: float, are_together: bool
) -> None:
    """Tolerance: float32 means and log_stds, whose errors a small standard deviation magnifies."""
    space, experience = SPACES[name], SPECS[name]
    model = make_model(experience, log_std)
    observations, actions, log_probabilities = act_repeatedly(model, experience, are_together)
    assert all(space.contains(action.astype(space.dtype)) for action in actions)
    with torch.no_grad():
        outputs, _ = model(torch.from_numpy(observations))
        learners, entropy = model.distribution.evaluate(outputs, torch.from_numpy(actions.astype(space.dtype)))
    np.testing.assert_allclose(log_probabilities, learners, rtol=1e-3, atol=1e-3)
    if name == "box":
        assert log_std < 0 or np.ptp(actions, 0).min() > 0.5 * (HIGH - LOW).min()
        return
    sizes = experience.policy.action_sizes
    assert actions.reshape(300, -1).max(0).tolist() == [size - 1 for size in sizes]  # each value occurs
    logits = np.split(outputs.numpy().astype(np.float64), np.cumsum(sizes)[:-1], 1)
    chances = [np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in logits]
    np.testing.assert_allclose(entropy, sum(-(p * np.log(p)).sum(1) for p in chances), rtol=1e-4)


def test_actions_at_their_bounds_have_finite_densities() -> None:
    _, actions, log_densities = act_repeatedly(make_model(log_std=6.0), BOX)
    assert ((actions >= LOW) & (actions <= HIGH)).all()
    assert np.isfinite(log_densities).all()


def test_actions_are_distributed_as_the_outputs_tell() -> None:
    """The fraction below the middle is that of a Gaussian below 0; three standard errors of 4000 draws."""
    model = make_model(log_std=-0.5)
    policy, observation = load(model, seed=5), np.full(4, 0.3, np.float32)
    actions = np.array([policy.act(observation)[0] for _ in range(4000)])
    with torch.no_grad():
        means, log_stds = model.distribution.split(model(torch.from_numpy(observation)[None])[0])
    expected = [0.5 * math.erfc(float(m / s) / math.sqrt(2)) for m, s in zip(means[0], log_stds[0].exp(), strict=True)]
    below = (actions < (LOW.astype(np.float64) + HIGH) / 2).mean(0).ravel()
    np.testing.assert_allclose(below, expected, atol=3 * 0.5 / math.sqrt(4000))


def test_noise_goes_on_within_an_episode_and_is_normal_at_each_step() -> None:
    """Of 4000 streams at once: correlations by lag, and by the oracle of each part's d^lag; five standard errors."""
    decays = (0.0, 0.5, 0.9)
    spec = PolicySpec(
        "mlp_squashed_gaussian", "tanh", (("w", "b"),), action_low=(-1, -1), action_high=(1, 1), noise_decays=decays
    )
    policy = make_policy(spec, 0, action_shape=(2,))
    policy.load(1, {"w": np.zeros((4, 3), np.float32), "b": np.float32([0.3, -0.2, -1.0, -2.0])})
    observations, streams = np.zeros((4000, 3), np.float32), list(range(4000))

    def draw() -> np.ndarray:
        actions = np.array(policy.act_batch(observations, streams)[0])
        return (np.arctanh(actions.astype(np.float64)) - [0.3, -0.2]) / np.exp([-1.0, -2.0])

    steps = np.stack([draw() for _ in range(4)])
    for lag in range(4):
        found = (steps[0] * steps[lag]).mean(0)
        np.testing.assert_allclose(found, np.mean([each**lag for each in decays]), atol=5 * 2**0.5 / 4000**0.5)
    for stream in streams:
        policy.reset(stream)
    assert np.abs((steps[3] * draw()).mean(0)).max() < 5 / 4000**0.5
    alone = np.array([policy.act(observations[0], stream)[0] for stream in ("a", "b") for _ in range(2)])
    assert policy._noises.keys() == {*streams, "a", "b"}
    assert np.isfinite(alone).all()


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


@pytest.mark.parametrize("name", ["box", "choices", "grid", "binary"])
def test_an_endpoint_answers_the_action_at_the_mean_or_the_most_probable_of_each(name: str) -> None:
    experience = SPECS[name]
    with torch.no_grad():
        answer = make_model(experience).predict(torch.randn(5, 4))
    _, signature = describe_policy_model(SPEC, experience)
    for each in signature.outputs:
        assert list(answer[each.name].shape[1:]) == each.shape[1:]
    if name == "box":
        center, half = (LOW.astype(np.float64) + HIGH) / 2, (HIGH.astype(np.float64) - LOW) / 2
        expected = center + half * np.tanh(answer["mean"].numpy().reshape(5, 2, 2))
        np.testing.assert_allclose(answer["action"], expected, rtol=1e-5)
        return
    logits = np.split(answer["logits"].numpy(), np.cumsum(experience.policy.action_sizes)[:-1], 1)
    np.testing.assert_array_equal(answer["action"].reshape(5, -1), np.stack([each.argmax(1) for each in logits], 1))


@pytest.mark.parametrize(
    ("name", "tensor"), [("box", "log_std"), ("box", "policy.2.bias"), ("choices", "policy.2.bias")]
)
def test_weights_that_do_not_fit_the_action_are_refused_by_name(name: str, tensor: str) -> None:
    with pytest.raises(WeightsError, match=tensor):
        load(make_model(SPECS[name]), SPECS[name], **{tensor: np.zeros(3, np.float32)})


# -- the spec ---------------------------------------------------------------------------------------------------------


def test_a_run_of_one_choice_and_flat_numbers_says_nothing_new_on_the_wire() -> None:
    spec = experience_spec(OBSERVES, Discrete(2), SPEC)
    assert msgspec.to_builtins(spec)["policy"].keys() == {"kind", "activation", "layers"}


def test_a_box_of_doubles_is_narrowed_to_float32_within_its_bounds() -> None:
    space = Box(np.array([0.1]), np.array([0.3]), dtype=np.float64)
    policy = experience_spec(OBSERVES, space, SPEC).policy
    assert 0.1 <= policy.action_low[0] < policy.action_high[0] <= 0.3


@pytest.mark.parametrize(
    ("space", "algorithm", "problem"),
    [
        (Box(-np.inf, 1, (2,)), "ppo", "finite bounds"),
        (Box(0, 9, (2,), np.int64), "ppo", "finite bounds"),
        (Box(1, 1, (1,)), "ppo", "finite bounds"),
        (Box(0, 1, (0,)), "ppo", "finite bounds"),
        (MultiDiscrete([3, 2], start=[1, 0]), "ppo", "count from 0"),
        (Box(-1, 1, (1,)), "dqn", "dqn needs a Discrete action space.*algorithm=impala or .*algorithm=sac"),
        (Discrete(2), "sac", "sac needs a Box action space.*algorithm=impala or .*algorithm=dqn"),
        (SPACES["choices"], "dqn", "dqn needs a Discrete.*algorithm=impala or algorithm=ppo"),
        (SPACES["choices"], "sac", "sac needs a Box.*algorithm=impala or algorithm=ppo"),
    ],
)
def test_a_space_that_an_algorithm_cannot_learn_is_refused_with_what_fits(
    space: Any, algorithm: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        experience_spec(OBSERVES, space, RLSpec(algorithm=algorithm))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "others", "problem"),
    [
        ("box", (Box(LOW, HIGH + 1), Box(LOW.ravel(), HIGH.ravel()), Discrete(2)), "this run with a Box of"),
        (
            "choices",
            (SPACES["grid"], SPACES["binary"], MultiDiscrete([3, 2, 5]), Discrete(4), Box(0, 1, (3,))),
            r"this run with choices of \[3, 2, 4\]",
        ),
        (
            "one",
            (Discrete(3), Discrete(2, start=1), Box(-1, 1, (1,))),
            r"acts with .*, and this run with Discrete\(2\)",
        ),
    ],
)
def test_another_space_than_the_runs_is_refused_at_the_actor(name: str, others: tuple[Any, ...], problem: str) -> None:
    game = gymnasium.Env()
    game.observation_space, game.action_space = OBSERVES, SPACES[name]
    require_matching_spaces(game, "G", SPECS[name])
    for other in others:
        game.action_space = other
        with pytest.raises(ConfigError, match=problem):
            require_matching_spaces(game, "G", SPECS[name])
    game.observation_space, game.action_space = Box(-10, 10, (4, 2)), SPACES[name]
    with pytest.raises(ConfigError, match="observes Box"):
        require_matching_spaces(game, "G", SPECS[name])


class Parts(gymnasium.Env):  # type: ignore[misc]
    action_space = Discrete(2)
    observation_space = gymnasium.spaces.Dict(
        b=Box(-1, 1, (2, 2), np.float32), a=gymnasium.spaces.Tuple((Discrete(3), Box(0, 9, (1,))))
    )

    def reset(self, seed: int | None = None, options: object = None) -> Any:
        return {"a": (np.int64(2), np.full(1, 7, np.float32)), "b": np.eye(2, dtype=np.float32)}, {}

    def step(self, action: int) -> Any:
        return self.reset()[0], 0.0, True, False, {}


def test_observations_of_several_parts_are_flattened() -> None:
    experience, observation = inspect_environment(RLSpec(env=f"{__name__}:Parts"))
    assert experience.observation.shape == (8,)
    assert observation.tolist() == [1, 0, 0, 1, 0, 0, 1, 7]


# -- the segments -----------------------------------------------------------------------------------------------------


def receive(spec: ExperienceSpec = BOX, **changes: object) -> Segment:
    """A segment of 8 steps, of a Box unless `changes` say otherwise, after its way over the wire."""
    actions = np.broadcast_to((LOW + HIGH) / 2, (8, 2, 2)).copy()
    frames = pack_segment(replace(segment(8, actions=actions), **changes), 0)  # type: ignore[arg-type]
    return unpack_segment(decode(frames, MessageLimits()), frames[1:], spec)  # type: ignore[arg-type]


def test_a_density_may_be_above_1_and_a_probability_may_not() -> None:
    dense = np.full(8, 5.0, np.float32)
    assert receive(log_probabilities=dense).log_probabilities[0] == 5.0
    with pytest.raises(InvalidSegment) as caught:
        receive(EXPERIENCE, log_probabilities=dense, actions=np.zeros(8, np.int64))
    assert caught.value.reason is DropReason.INVALID_RANGE


WIDE, UNEQUAL = np.broadcast_to((LOW + HIGH) / 2, (8, 2, 2)).copy(), np.zeros((8, 3), np.int64)
WIDE[5, 0, 1] = 0.5  # another number of the action may be so large
UNEQUAL[4, 1] = 2  # of two values; its neighbours have more


@pytest.mark.parametrize(
    ("spec", "actions", "reason", "problem"),
    [
        (BOX, WIDE, DropReason.INVALID_RANGE, r"number 1 of step 5 is 0\.5, expected within \[0, 0\.1\]"),
        (CHOICES, UNEQUAL, DropReason.INVALID_RANGE, r"number 1 of step 4 is 2, expected within \[0, 1\]"),
        (BOX, np.zeros(8, np.int64), DropReason.INVALID_DTYPE, "int64, expected float32"),
        (BOX, np.zeros((8, 4), np.float32), DropReason.INVALID_SHAPE, r"\[8, 4\]"),
        (BOX, np.full((8, 2, 2), np.nan, np.float32), DropReason.NON_FINITE, "actions"),
    ],
)
def test_actions_that_are_not_of_the_space_are_dropped_for_a_reason(
    spec: ExperienceSpec, actions: np.ndarray, reason: DropReason, problem: str
) -> None:
    with pytest.raises(InvalidSegment, match=problem) as caught:
        receive(spec, actions=actions)
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
