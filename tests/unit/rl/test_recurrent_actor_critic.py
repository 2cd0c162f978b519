"""IMPALA and PPO with a recurrent core: what the actor computed step by step is what the learner unrolls."""

import gymnasium
import numpy as np
import pytest
import torch

from shoal.actor.policy import make_policy
from shoal.actor.segment_builder import SegmentBuilder
from shoal.flows.rl_policy import describe_policy_model
from shoal.models.actor_critic import RecurrentActorCritic
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.algorithms.impala import Impala
from shoal.rl.algorithms.ppo import PPO
from shoal.rl.algorithms.segments import evaluate_rows, make_grid, to_tensors
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec

FLAT = gymnasium.spaces.Box(-10, 10, (4,), np.float32)
FRAMES = gymnasium.spaces.Box(0, 255, (6, 6, 1), np.uint8)
SPACES = {
    "categorical": (FLAT, gymnasium.spaces.Discrete(3)),
    "multi_categorical": (FLAT, gymnasium.spaces.MultiDiscrete([2, 3])),
    "squashed_gaussian": (FLAT, gymnasium.spaces.Box(-2, 1, (2,), np.float32)),
    "frames": (FRAMES, gymnasium.spaces.Discrete(3)),
}


def make(kind: str = "categorical", core: str = "gru", **algorithm: object) -> tuple[Impala | PPO, ExperienceSpec]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    algorithm = {"name": "impala", **algorithm}
    spec = RLSpec(hidden=(8, 6), core=core, core_size=5, segment_length=4, algorithm=algorithm)  # type: ignore[arg-type]
    experience = experience_spec(*SPACES[kind], spec)
    made = make_algorithm(spec, experience)
    assert isinstance(made, Impala | PPO)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    factory, signature = describe_policy_model(spec, experience)
    assert factory.factory.endswith(":RecurrentActorCritic")
    assert [each.name for each in signature.inputs] == ["observation", "state"]
    assert signature.outputs[-1].name == "next_state"
    return made, experience


def play_episodes(algorithm: Impala | PPO, experience: ExperienceSpec, lengths: list[int]) -> ExperienceBatch:
    """One batch of all segments, by an actor with the algorithm's weights."""
    policy = make_policy(experience.policy, 0, action_shape=experience.action.shape)
    policy.load(1, {name: tensor.numpy() for name, tensor in algorithm.model.state_dict().items()})
    random, segments = np.random.default_rng(1), []

    def observe() -> np.ndarray:
        shape = experience.observation.shape
        return random.integers(0, 256, shape, np.uint8) if len(shape) > 1 else random.normal(size=shape)

    for length in lengths:
        builder, observation = SegmentBuilder(experience), observe()
        policy.reset()
        builder.begin(observation, policy.get_extras())
        for t in range(length):
            action, log_probability = policy.act(observation)
            observation, reward = observe(), float(random.normal())
            segment = builder.step(
                action, log_probability, 1, reward, observation, t == length - 1, False, policy.get_extras()
            )
            segments += [segment] if segment is not None else []
    return ExperienceBatch.from_segments(1, segments)


@pytest.mark.parametrize("core", ["gru", "lstm"])
@pytest.mark.parametrize("kind", SPACES)
def test_the_learner_finds_the_log_probabilities_of_the_actor(kind: str, core: str) -> None:
    """From the stored state of each segment; with zeros for it, those of later segments would be others."""
    algorithm, experience = make(kind, core)
    batch = play_episodes(algorithm, experience, [10, 3, 7])
    assert batch.lengths.tolist() == [4, 4, 2, 3, 4, 3]
    tensors = to_tensors(batch)

    def find_log_probabilities(states: torch.Tensor) -> np.ndarray:
        outputs, values = evaluate_rows(algorithm.model, tensors._replace(states=states))
        assert values.shape == (len(batch.observations),)
        rows = make_grid(tensors.lengths_B).step_rows
        return algorithm.model.distribution.evaluate(outputs[rows], tensors.actions)[0].detach().numpy()

    assert tensors.states is not None
    np.testing.assert_allclose(find_log_probabilities(tensors.states), batch.log_probabilities, rtol=1e-3, atol=1e-4)
    differs = np.abs(find_log_probabilities(torch.zeros_like(tensors.states)) - batch.log_probabilities) > 1e-3
    assert not differs[:4].any()
    assert differs[4]
    assert differs[17]  # the first steps of the segments that begin within an episode


@pytest.mark.parametrize("kind", SPACES)
def test_an_endpoint_answers_what_the_learner_unrolls(kind: str) -> None:
    algorithm, experience = make(kind)
    batch = play_episodes(algorithm, experience, [4])
    model, state = algorithm.model, torch.zeros(1, 5)
    assert isinstance(model, RecurrentActorCritic)
    _, values = evaluate_rows(model, to_tensors(batch))
    for observation, value in zip(batch.observations, values, strict=True):
        answer = model.predict(torch.from_numpy(observation[None].astype(np.float32)), state)
        assert answer["value"].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5)
        state = answer["next_state"]
