"""Actions of several choices, and observations of several parts."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from rl_setting import segment
from shoal.actor.environment import require_matching_spaces
from shoal.actor.policy import make_policy
from shoal.errors import ConfigError, InvalidSegment, WeightsError
from shoal.flows.rl_policy import describe_policy_model, inspect_environment
from shoal.models.actor_critic import ActorCritic
from shoal.rl.spec import RLSpec, experience_spec, network_kwargs
from shoal.wire import DropReason, MessageLimits, decode, pack_segment, unpack_segment

SPEC = RLSpec(hidden=(8,), segment_length=16)
OBSERVES = Box(-10, 10, (4,), np.float32)
SPACES = {"discrete": MultiDiscrete([3, 2, 4]), "grid": MultiDiscrete([[3, 2], [4, 5]]), "binary": MultiBinary(3)}


def make_model(experience) -> ActorCritic:
    torch.manual_seed(3)
    model = ActorCritic(**network_kwargs(SPEC, experience))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.7)
    return model


def arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", SPACES)
def test_an_actor_chooses_within_the_space_by_the_learners_probabilities(name: str) -> None:
    space = SPACES[name]
    experience = experience_spec(OBSERVES, space, SPEC)
    model, policy = make_model(experience), make_policy(experience.policy, 0, action_shape=experience.action.shape)
    policy.load(1, arrays(model))
    observations = np.random.default_rng(1).normal(size=(300, 4)).astype(np.float32)
    actions, log_probabilities = zip(*(policy.act(each) for each in observations), strict=True)
    assert all(space.contains(action.astype(space.dtype)) for action in actions)
    with torch.no_grad():
        outputs, _ = model(torch.from_numpy(observations))
        found, entropy = model.distribution.evaluate(outputs, torch.from_numpy(np.array(actions, space.dtype)))
    np.testing.assert_allclose(log_probabilities, found.numpy(), rtol=1e-4, atol=1e-5)
    sizes = experience.policy.action_sizes
    expected, begin = np.zeros(300), 0
    for size in sizes:
        logits = outputs.numpy()[:, begin : begin + size].astype(np.float64)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        expected -= (p * np.log(p)).sum(1)
        begin += size
    np.testing.assert_allclose(entropy.numpy(), expected, rtol=1e-4)
    assert {tuple(action.ravel()) for action in actions[:1]} <= set(np.ndindex(*sizes))
    assert np.array(actions).reshape(300, -1).max(0).tolist() == [size - 1 for size in sizes]  # each value occurs


@pytest.mark.parametrize("name", SPACES)
def test_an_endpoint_answers_the_most_probable_of_each(name: str) -> None:
    experience = experience_spec(OBSERVES, SPACES[name], SPEC)
    _, signature = describe_policy_model(SPEC, experience)
    with torch.no_grad():
        answer = make_model(experience).predict(torch.randn(5, 4))
    assert [list(answer[each.name].shape[1:]) for each in signature.outputs] == [
        each.shape[1:] for each in signature.outputs
    ]
    logits = np.split(answer["logits"].numpy(), np.cumsum(experience.policy.action_sizes)[:-1], 1)
    np.testing.assert_array_equal(answer["action"].reshape(5, -1), np.stack([each.argmax(1) for each in logits], 1))


def test_each_number_has_a_range_of_its_own() -> None:
    experience = experience_spec(OBSERVES, SPACES["discrete"], SPEC)
    actions = np.zeros((8, 3), np.int64)
    actions[4, 1] = 2  # of two values; its neighbours have more
    sent = pack_segment(segment(8, actions=actions), 0)
    with pytest.raises(InvalidSegment, match=r"number 1 of step 4 is 2, expected within \[0, 1\]") as caught:
        unpack_segment(decode(sent, MessageLimits()), sent[1:], experience)  # type: ignore[arg-type]
    assert caught.value.reason is DropReason.INVALID_RANGE


def test_what_does_not_fit_is_refused_by_name() -> None:
    for name, pattern in (("dqn", "dqn needs a Discrete"), ("sac", "sac needs a Box")):
        with pytest.raises(ConfigError, match=pattern + ".*algorithm=impala or algorithm=ppo"):
            experience_spec(OBSERVES, SPACES["discrete"], RLSpec(algorithm=name))
    with pytest.raises(ConfigError, match="count from 0"):
        experience_spec(OBSERVES, MultiDiscrete([3, 2], start=[1, 0]), SPEC)
    experience, game = experience_spec(OBSERVES, SPACES["discrete"], SPEC), gymnasium.Env()
    game.observation_space, game.action_space = OBSERVES, SPACES["discrete"]
    require_matching_spaces(game, "G", experience)
    for other in (SPACES["grid"], SPACES["binary"], MultiDiscrete([3, 2, 5]), Discrete(4), Box(0, 1, (3,))):
        game.action_space = other
        with pytest.raises(ConfigError, match=r"this run with choices of \[3, 2, 4\]"):
            require_matching_spaces(game, "G", experience)
    policy = make_policy(experience.policy, 0, action_shape=(3,))
    with pytest.raises(WeightsError, match=r"policy\.2\.bias is \(3,\), not \(9,\)"):
        policy.load(1, {**arrays(make_model(experience)), "policy.2.bias": np.zeros(3, np.float32)})


def test_observations_of_several_parts_are_flattened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "games_of_parts.py").write_text(
        "import gymnasium, numpy as np\n"
        "from gymnasium.spaces import Box, Dict, Discrete, Tuple\n"
        "class Game(gymnasium.Env):\n"
        "    action_space = Discrete(2)\n"
        "    observation_space = Dict(b=Box(-1, 1, (2, 2), np.float32), a=Tuple((Discrete(3), Box(0, 9, (1,)))))\n"
        "    def reset(self, seed=None, options=None):\n"
        "        return {'a': (np.int64(2), np.full(1, 7, np.float32)), 'b': np.eye(2, dtype=np.float32)}, {}\n"
        "    def step(self, action):\n"
        "        return self.reset()[0], 0.0, True, False, {}\n"
        "gymnasium.register('Parts-v0', entry_point=Game)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experience, observation = inspect_environment(RLSpec(env="games_of_parts:Parts-v0"))
    assert experience.observation.shape == (8,)
    assert observation.tolist() == [1, 0, 0, 1, 0, 0, 1, 7]
