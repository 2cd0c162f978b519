"""PPO against a NumPy oracle that follows the papers' equations, its updates; and a recurrent core in PPO and
IMPALA."""

import gymnasium
import msgspec
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from registered import arrays_of
from rl_setting import EXPERIENCE, random_batch
from shoal.actor.policy import make_policy
from shoal.actor.segment_builder import SegmentBuilder
from shoal.flows.rl_policy import describe_policy_model
from shoal.models.action_distribution import Categorical
from shoal.models.actor_critic import RecurrentActorCritic
from shoal.rl.algorithm_config import PPOConfig
from shoal.rl.algorithms.actor_critic import StepTargets, compute_losses
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.algorithms.impala import Impala
from shoal.rl.algorithms.ppo import PPO
from shoal.rl.algorithms.segments import compute_moments, evaluate_rows, explain_variance, make_grid, to_tensors
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import BatchShare, LearnerGroup
from shoal.rl.spec import RLSpec, experience_spec, policy_spec
from shoal.wire import ExperienceSpec

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
SPEC = RLSpec(hidden=(8,), algorithm={"name": "ppo"})
NUM_ACTIONS = int(EXPERIENCE.action.high or 0) + 1
SIZE = EXPERIENCE.observation.shape[0]


def make_ppo(**fields: object):
    torch.manual_seed(0)
    experience = msgspec.structs.replace(EXPERIENCE, policy=policy_spec(SPEC.hidden))
    return make_algorithm(SPEC.update({"algorithm": fields}), experience)


def oracle_targets(values, batch, config):
    """Segment by segment in float64: log μ, advantages by the sum of equation (16), returns."""
    row = step = 0
    advantages, returns = [], []
    for length, terminated in zip(batch.lengths, batch.terminated, strict=True):
        rows, steps = slice(row, row + length), slice(step, step + length)
        discounts = np.full(length, config.discount)
        if terminated:
            discounts[-1] = 0.0
        deltas = batch.rewards[steps] + discounts * values[row + 1 : row + length + 1] - values[rows]
        for s in range(length):
            factors = [np.prod(discounts[s:t]) * config.lambda_ ** (t - s) for t in range(s, length)]
            advantages.append(np.dot(factors, deltas[s:]))
            returns.append(advantages[-1] + values[row + s])
        row, step = row + length + 1, step + length
    advantages = np.array(advantages)
    if config.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return batch.log_probabilities, advantages, np.array(returns)


@pytest.mark.parametrize("lengths", [[1], [7], [3, 9, 1, 5]])
@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_and_targets_are_those_of_the_equations(lengths: list[int], normalize: bool) -> None:
    ppo, batch = make_ppo(normalize_advantages=normalize), random_batch(3, lengths)
    with torch.no_grad():
        values = ppo.model(to_tensors(batch).observations)[1].double().numpy()
    targets = ppo.compute_targets(to_tensors(batch))
    for mine, theirs in zip(targets, oracle_targets(values, batch, ppo._config), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, **TOLERANCE)


@pytest.mark.parametrize("clip", [0.05, 0.2])
def test_the_loss_is_that_of_the_equation(clip: float) -> None:
    random, config = np.random.default_rng(1), PPOConfig(clip=clip)
    logits, values = random.normal(size=(12, 3)), random.normal(size=12)
    actions = random.integers(0, 3, 12)
    targets = [np.log(random.uniform(0.2, 0.6, 12)), random.normal(size=12), random.normal(size=12)]
    log_policy = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ratios = np.exp(log_policy[np.arange(12), actions] - targets[0])
    gains = np.minimum(ratios * targets[1], np.clip(ratios, 1 - clip, 1 + clip) * targets[1])
    weights = np.minimum(1, config.rho_bar / ratios)
    policy, value = -(weights * gains).mean(), 0.5 * ((values - targets[2]) ** 2).mean()
    entropy = -(np.exp(log_policy) * log_policy).sum(-1).mean()
    tensors = StepTargets(*map(torch.tensor, targets))
    given = [torch.tensor(each) for each in (logits, values, actions)]
    found = compute_losses(*given, tensors, config, Categorical(), PPO.gain)
    expected = [policy + config.value_cost * value - config.entropy_cost * entropy, policy, value, entropy]
    np.testing.assert_allclose([float(each) for each in found[:4]], expected, rtol=1e-9)
    assert float(found.clip_fraction) == pytest.approx((np.abs(ratios - 1) > clip).mean())


def test_a_batch_of_the_newest_weights_counts_each_step_alike() -> None:
    """Then π is the behaviour policy: the first step's ratios are 1, and nothing is clipped."""
    ppo, batch = make_ppo(epochs=1), random_batch(0, [6, 4])
    log_probabilities = batch.log_probabilities + ppo.compute_log_ratios(batch)
    fresh = ExperienceBatch(**{**vars(batch), "log_probabilities": log_probabilities})
    [metrics] = ppo.update(fresh)
    assert metrics["learner/clip_fraction"] == 0.0
    assert metrics["learner/kl"] == pytest.approx(0.0, abs=1e-6)


def test_an_update_has_a_step_for_each_minibatch_of_each_epoch() -> None:
    ppo = make_ppo(epochs=3, minibatch_steps=4)
    assert len(list(ppo.update(random_batch(0, [8, 8])))) == 12
    assert len(list(ppo.update(random_batch(0, [6])))) == 6  # 1.5 minibatches are two
    assert len(list(ppo.update(random_batch(0, [1])))) == 1  # a quarter of a minibatch, three times


def test_the_explained_variance_is_that_of_the_whole_batch_whoever_has_its_parts() -> None:
    random = np.random.default_rng(0)
    values, targets = random.normal(50, 2, 40), random.normal(50, 3, 40)
    parts = [
        compute_moments(torch.tensor(values[at]), torch.tensor(targets[at]), 40) for at in (slice(9), slice(9, 40))
    ]
    found = explain_variance(*(parts[0] + parts[1]).tolist())
    assert found == pytest.approx(1 - (targets - values).var() / targets.var(), rel=1e-6)
    assert explain_variance(0.0, 0.0, 50.0, 2500.0) == 0.0


@pytest.mark.parametrize("name", ["ppo", "impala"])
@pytest.mark.parametrize("reward", [0.001, 1.0, 1000.0])
def test_values_are_returns_of_the_game_whatever_the_size_of_its_rewards(name: str, reward: float) -> None:
    """Rewards of 0 and 2 times `reward` at random, in episodes of a single step."""
    torch.manual_seed(0)
    experience = msgspec.structs.replace(EXPERIENCE, policy=policy_spec(SPEC.hidden))
    algorithm = make_algorithm(RLSpec(hidden=(8,), algorithm={"name": name, "learning_rate": 0.01}), experience)
    random = np.random.default_rng(0)
    for seed in range(6):
        rewards = (reward * random.integers(0, 3, 256)).astype(np.float32)
        batch = random_batch(
            seed, [1] * 256, [True] * 256, rewards=rewards, log_probabilities=np.full(256, np.log(0.5), np.float32)
        )
        assert list(algorithm.update(batch))
    with torch.no_grad():
        _, values = algorithm.model(torch.zeros(1, SIZE))
    assert float(values) == pytest.approx(reward, rel=0.2)


def test_rewards_of_another_size_teach_the_same_policy() -> None:
    """After the first steps, in which the size becomes known."""
    policies = []
    for factor in (1.0, 1000.0):
        ppo = make_ppo(minibatch_steps=64, epochs=4)
        for seed in range(6):
            batch = random_batch(seed, [16] * 16)
            list(ppo.update(ExperienceBatch(**{**vars(batch), "rewards": batch.rewards * np.float32(factor)})))
        with torch.no_grad():
            policies.append(torch.softmax(ppo.model(torch.eye(SIZE))[0], -1))
    assert (policies[0] - policies[1]).abs().max() < 0.15
    assert (policies[0] - 1 / NUM_ACTIONS).abs().max() > 0.02  # they have learnt


def test_the_entropy_counts_less_and_less() -> None:
    ppo = make_ppo(entropy_cost=0.02, entropy_half_steps=32)
    list(ppo.update(random_batch(0, [32])))
    assert ppo._loss_config.entropy_cost == 0.02
    other = make_ppo(entropy_cost=0.02, entropy_half_steps=32)
    other.load_state_dict(ppo.state_dict())
    list(other.update(random_batch(1, [64])))
    assert other._loss_config.entropy_cost == 0.01
    assert other._targets.deviation == pytest.approx(float(other.model.value_scale))


class Bereft(LearnerGroup):
    """The other learner, which has died, had a segment as long as this one's."""

    num_learners = 2

    def _find_share(self, batch: ExperienceBatch) -> BatchShare:
        return BatchShare(batch, np.array([True, False]), np.repeat(batch.lengths, 2))


@pytest.mark.parametrize("words", [["algorithm=impala"], ["algorithm=ppo"], ["algorithm=ppo", "core=gru"]])
def test_a_minibatch_whose_only_learner_has_died_says_nothing_of_the_value_targets(words: list[str]) -> None:
    fields = [*words, "algorithm.epochs=1", "algorithm.minibatch_steps=1", "algorithm.learning_rate=1e-9"]
    spec = SPEC.override(fields)
    states = {"extras": {"state": np.zeros((1, spec.state_size), np.float32)}} if spec.state_size else {}
    batch = random_batch(1, [8], rewards=np.ones(8, np.float32), **states)
    known = []
    for group in (LearnerGroup(), Bereft()):
        torch.manual_seed(0)
        learner = make_algorithm(spec, experience_spec(Box(-10, 10, (SIZE,)), Discrete(NUM_ACTIONS), spec))
        learner.group = group
        list(learner.update(batch))
        known.append(vars(learner._targets))
    assert known[1] == pytest.approx(known[0], rel=1e-4)


def test_one_absurd_reward_does_not_set_the_unit() -> None:
    ppo = make_ppo(epochs=1, minibatch_steps=64)
    for seed in range(20):
        list(ppo.update(random_batch(seed, [16] * 16)))
    before = ppo.value_scale
    batch = random_batch(99, [16] * 16)
    batch.rewards[3] = 1e12
    list(ppo.update(batch))
    assert ppo.value_scale < 20 * before


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
    policy.load(1, arrays_of(algorithm.model))
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
