"""DQN's targets, loss and first priorities against NumPy oracles from the papers, and its updates from the replay."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from registered import arrays_of
from rl_setting import EXPERIENCE, random_batch, segment
from shoal.actor.policy import EpsilonGreedyPolicy, find_ladder_position, make_policy
from shoal.libs.off_policy.dqn import DQN, double_targets, dqn_loss
from shoal.libs.off_policy.q_network import QNetwork
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner
from shoal.rl.spec import RLSpec
from shoal.weights import WeightStore

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
SPEC = RLSpec(
    hidden=(8, 8),
    algorithm={"name": "dqn", "replay_mb": 0.1, "epsilon_exponent": 7, "huber_delta": 1, "batch_size": 128},
)


def make_dqn(folder: Path | None = None, **fields: object) -> DQN:
    torch.set_num_threads(1)  # as the learner does
    torch.manual_seed(0)
    spec = SPEC.update({"algorithm": fields})
    experience = msgspec.structs.replace(EXPERIENCE, policy=spec.algorithm.describe_policy(spec.hidden))
    made = make_algorithm(spec, experience, folder)
    assert isinstance(made, DQN)
    return made


def compute_q(network: QNetwork, observations: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        values: np.ndarray = network(torch.from_numpy(observations)).numpy()
    return values.astype(np.float64)


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_targets_choose_by_one_network_and_value_by_the_other() -> None:
    """Equation 4 of 1509.06461, step by step."""
    random = np.random.default_rng(3)
    returns, discounts = random.normal(size=50), random.choice([0.0, 0.9], 50)
    next_q, next_target_q = random.normal(size=(2, 50, 4))
    expected = [
        returns[i] + discounts[i] * next_target_q[i, max(range(4), key=lambda a: next_q[i, a])] for i in range(50)
    ]
    found = double_targets(*(torch.from_numpy(each) for each in (returns, discounts, next_q, next_target_q)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("delta", [1.0, 2.5])
def test_the_loss_is_huber_s_weighted_and_differentiable(delta: float) -> None:
    random = np.random.default_rng(4)
    q, targets = torch.from_numpy(random.normal(size=(40, 3)) * 3).requires_grad_(), random.normal(size=40)
    actions, weights = random.integers(0, 3, 40), random.random(40)
    losses = dqn_loss(q, *(torch.from_numpy(each) for each in (actions, targets, weights)), delta)
    errors = targets - q.detach().numpy()[np.arange(40), actions]
    huber = np.where(np.abs(errors) <= delta, errors**2 / 2 / delta, np.abs(errors) - delta / 2)
    np.testing.assert_allclose(losses.errors.numpy(), errors, rtol=1e-12)
    assert losses.total.item() == pytest.approx(np.mean(weights * huber), rel=1e-12)
    losses.total.backward()
    expected = np.zeros((40, 3))
    expected[np.arange(40), actions] = -weights * np.clip(errors / delta, -1, 1) / 40
    assert q.grad is not None
    np.testing.assert_allclose(q.grad.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_first_priorities_are_the_errors_of_n_step_targets(num_steps: int) -> None:
    """Segment by segment: a segment's end is bootstrapped from its last observation, unless the episode terminated."""
    dqn = make_dqn(num_steps=num_steps, discount=0.9)
    with torch.no_grad():
        for parameter in dqn._target.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    batch = random_batch(5, [6, 1, 9], [True, False, False])
    q, target_q = compute_q(dqn.model, batch.observations), compute_q(dqn._target, batch.observations)
    expected = []
    row = step = 0
    for length, terminated in zip(batch.lengths, batch.terminated, strict=True):
        for t in range(length):
            end = min(t + num_steps, length)
            target = sum(0.9 ** (k - t) * batch.rewards[step + k] for k in range(t, end))
            if not (terminated and end == length):
                target += 0.9 ** (end - t) * target_q[row + end, q[row + end].argmax()]
            expected.append(target - q[row + t, batch.actions[step + t]])
        row, step = row + length + 1, step + length
    np.testing.assert_allclose(dqn.learn(dqn.make_trial(batch), is_trial=True)[1], expected, **TOLERANCE)


@pytest.mark.parametrize("hidden", [(), (8,), (16, 8, 4)])
@pytest.mark.parametrize("dueling", [True, False])
def test_actors_choose_as_the_network_does(hidden: tuple[int, ...], dueling: bool) -> None:
    spec = RLSpec(hidden=hidden, algorithm={"name": "dqn", "dueling": dueling})
    torch.manual_seed(1)
    network = QNetwork(4, 3, hidden, dueling)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.7 if parameter.ndim > 1 else 0.1)  # a large bias would decide for itself
    network.epsilon.zero_()
    policy = make_policy(spec.algorithm.describe_policy(hidden), seed=0, actor_id="actor-0")
    policy.load(1, arrays_of(network))
    observations = np.random.default_rng(2).normal(size=(50, 4)).astype(np.float32)
    predicted = network.predict(torch.from_numpy(observations))
    assert [policy.act(each) for each in observations] == [(action, 0.0) for action in predicted["action"].tolist()]
    assert len(set(predicted["action"].tolist())) > 1
    np.testing.assert_allclose(predicted["value"].detach(), compute_q(network, observations).max(-1), **TOLERANCE)


def test_the_mean_advantage_is_taken_out_of_the_value() -> None:
    """Equation 9 of 1511.06581."""
    network = QNetwork(4, 3, (8,), dueling=True)
    observations = torch.randn(20, 4)
    features = network.trunk(observations)
    assert network.value is not None
    advantages, values = network.advantage(features).detach().numpy(), network.value(features).detach().numpy()
    expected = values + advantages - advantages.mean(1, keepdims=True)
    np.testing.assert_allclose(network(observations).detach().numpy(), expected, **TOLERANCE)


# -- exploration ------------------------------------------------------------------------------------------------------


def test_each_actor_explores_by_its_id_alone() -> None:
    spec = SPEC.algorithm.describe_policy(SPEC.hidden)
    network = QNetwork(4, 2, (8, 8))
    network.epsilon.fill_(0.4)
    weights = arrays_of(network)

    def epsilon(actor_id: str, seed: int, stream: int = 0) -> float:
        policy = make_policy(spec, seed, actor_id)
        assert isinstance(policy, EpsilonGreedyPolicy)
        policy.load(1, weights)
        return policy.get_epsilon(stream)

    for index, u in enumerate([0, 1 / 2, 1 / 4, 3 / 4, 1 / 8]):
        assert epsilon(f"actor-{index}", seed=1) == epsilon(f"actor-{index}", seed=2)  # restarted
        assert epsilon(f"actor-{index}", seed=1) == pytest.approx(0.4 ** (1 + 7 * u), rel=1e-6)
    of_one = [epsilon("actor-0", seed=1, stream=stream) for stream in (3, 0, 1, 2)]
    assert of_one == [epsilon(f"actor-{index}", seed=1) for index in (3, 0, 1, 2)]
    others = [find_ladder_position(f"player-{name}") for name in ("red", "green", "blue")]
    assert len(set(others)) == 3
    assert all(0 <= u < 1 for u in others)
    assert find_ladder_position("actor-99999999999999999999") < 1


def test_exploration_falls_with_the_steps_of_all_actors() -> None:
    dqn = make_dqn(epsilon=0.1, epsilon_steps=20, learning_starts=10**6)
    seen = [dqn.model.epsilon.item()]
    for _ in range(3):
        list(dqn.update(random_batch(1, [10])))
        seen.append(dqn.model.epsilon.item())
    assert seen == pytest.approx([1.0, 0.55, 0.1, 0.1])


# -- updates ----------------------------------------------------------------------------------------------------------


def test_steps_follow_what_was_inserted_and_none_come_before_learning_starts() -> None:
    dqn = make_dqn(learning_starts=30, batch_size=8, samples_per_insert=2.0, target_update_period=3)
    before = compute_q(dqn.model, np.ones((1, 4), np.float32))
    assert list(dqn.update(random_batch(1, [10, 6]))) == []
    np.testing.assert_array_equal(compute_q(dqn.model, np.ones((1, 4), np.float32)), before)
    assert len(list(dqn.update(random_batch(2, [14])))) == 3  # 2 * 14 of 8 drawn steps, four are left over
    metrics = list(dqn.update(random_batch(3, [2])))  # with them, one more
    assert len(metrics) == 1
    assert metrics[0]["learner/replay_steps"] == 32
    assert all(np.isfinite(list(metrics[0].values())))


def test_the_target_network_is_a_copy_of_every_so_many_steps() -> None:
    dqn = make_dqn(learning_starts=1, batch_size=8, samples_per_insert=1.0, target_update_period=3)
    observation = np.ones((1, 4), np.float32)
    copies = [compute_q(dqn._target, observation)]
    online = []
    for step in range(6):
        assert len(list(dqn.update(random_batch(step, [8])))) == 1
        copies.append(compute_q(dqn._target, observation))
        online.append(compute_q(dqn.model, observation))
    assert [bool((a != b).any()) for a, b in itertools.pairwise(copies)] == [False, False, True] * 2
    np.testing.assert_allclose(copies[3], online[2], rtol=1e-6)


def test_values_approach_those_of_a_chain_that_is_truncated_and_never_ends() -> None:
    """One state, reward 1, always truncated: the value is 1 / (1 - γ) = 2; terminated, it is 1."""
    for terminated, value in ((False, 2.0), (True, 1.0)):
        dqn = make_dqn(discount=0.5, num_steps=2, learning_starts=1, learning_rate=0.02, target_update_period=5)
        batch = random_batch(1, [1] * 64, [terminated] * 64)
        constant = ExperienceBatch(**{**vars(batch), "observations": np.ones((128, 4), np.float32)})
        constant.rewards[:] = 1.0
        for _ in range(15):
            list(dqn.update(constant))
        found = compute_q(dqn.model, np.ones((1, 4), np.float32))
        np.testing.assert_allclose(found, value, atol=0.05)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_restored_learner_goes_on_with_the_replay_only_where_it_is_on_disk(is_on_disk: bool, tmp_path: Path) -> None:
    fields = {"learning_starts": 20, "batch_size": 8, "replay_on_disk": is_on_disk}
    first = make_dqn(tmp_path, **fields)
    list(first.update(random_batch(1, [16, 16])))
    second = make_dqn(tmp_path, **fields)
    second.load_state_dict(first.state_dict())
    assert second._replay.num_steps == (32 if is_on_disk else 0)
    assert second.model.epsilon == first.model.epsilon
    for mine, other in zip(first._target.parameters(), second._target.parameters(), strict=True):
        assert torch.equal(mine, other)
    # With an empty replay it waits for as many steps again.
    assert bool(list(second.update(random_batch(2, [8])))) == is_on_disk
    assert list(second.update(random_batch(3, [16]))) != []


# -- behind the gateway -----------------------------------------------------------------------------------------------

BEHIND_GATEWAY = RLSpec(hidden=(32,)).override(
    [
        *("algorithm=dqn", "algorithm.discount=0", "algorithm.num_steps=1", "algorithm.batch_size=128"),
        *("algorithm.samples_per_insert=8", "algorithm.learning_rate=0.01", "algorithm.learning_starts=200"),
        *("algorithm.epsilon_steps=1000", "algorithm.epsilon=0.02", "algorithm.replay_mb=1"),
        *("learner.batch_steps=64", "learner.max_batch_steps=64", "learner.take_timeout_s=0.1"),
        "learner.publish_interval_s=0",
    ]
)
A = ("a", 1)


class Bench:
    """A learner and its queue."""

    def __init__(self, folder: Path, *words: str) -> None:
        spec, self.queue = BEHIND_GATEWAY.override(words), ExperienceQueue(64, Ledger())
        experience = msgspec.structs.replace(EXPERIENCE, policy=spec.algorithm.describe_policy(spec.hidden))
        self.learner = Learner(spec, experience, self.queue, WeightStore(), folder, 500)

    def put(self, **changes: object) -> None:
        seq = self.queue.ledger.get_account(A).next_seq
        assert self.queue.put(A, seq, segment(16, **changes))

    def learn(self) -> None:
        for _ in range(4):
            self.put()
        assert self.learner.step()


def test_experience_of_any_age_is_consumed_when_it_is_inserted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "gateway.max_version_lag=3")
    bench.learn()  # by version 1; the learner is at 501
    account = bench.queue.ledger.get_account(A)
    assert (account.consumed, account.dropped) == (4, {})
    assert bench.learner.stats()["steps"] == 64
    assert bench.learner.updates == 0  # learning_starts is above it
    assert bench.learner.snapshot().tensors()["epsilon"] < 1
    for _ in range(3):
        bench.learn()
    assert bench.learner.updates == 4  # at 256 steps: 64 inserted ones allow 512 draws, which are 4 steps of 128


def test_a_segment_with_infinite_errors_is_dropped_and_the_others_are_inserted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "algorithm.discount=1", "algorithm.num_steps=3")
    for _ in range(3):
        bench.put()
    bench.put(rewards=np.full(16, 3e38, np.float32), observations=np.full((17, 4), 9, np.float32))
    assert bench.learner.step()
    account = bench.queue.ledger.get_account(A)
    assert (account.consumed, account.dropped) == (3, {"non_finite": 1})
    assert bench.learner.stats()["steps"] == 48
    assert bench.queue.take_unlearnable() == {A: 1}  # the gateway names the actor
    assert not bench.queue.take_unlearnable()
