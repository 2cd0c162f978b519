"""Normalised observations and rewards: the statistics, the weights that contain them, and the learner that has both."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rl_setting import random_batch, segment
from shoal.actor.policy import make_policy
from shoal.errors import ConfigError
from shoal.flows.rl_policy import describe_policy_model
from shoal.registry.manifest import find_callable
from shoal.rl.algorithms.algorithm import Algorithm, make_algorithm
from shoal.rl.algorithms.normalization import ExperienceMoments, Normalizer, sum_discounted
from shoal.rl.experience.queue import ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner, model_arrays
from shoal.rl.spec import RLSpec, experience_spec
from shoal.weights import WeightStore
from shoal.wire import Segment

A = ("a", 1)
OFFSETS = np.array([3.0, 0.0, -2.0, 0.0])
SCALES = np.array([1e-3, 1.0, 50.0, 1.0])
ACTIONS = {"sac": Box(-1, 1, (2,), np.float32)}
BASE = RLSpec(hidden=(16,)).override(
    ["normalize_observations=true", "normalize_rewards=true", "segment_length=16", "learner.batch_steps=64"]
)
SMALL_REPLAY = ["algorithm.replay_mb=1", "algorithm.learning_starts=1", "algorithm.batch_size=8"]
CASES = {
    "impala": [],
    "ppo": ["hidden=[]"],
    "ppo with a core": ["algorithm=ppo", "core=lstm", "core_size=8", "hidden=[8,8]"],
    "impala with a core": ["core=gru", "core_size=8"],
    "dqn": ["algorithm=dqn", *SMALL_REPLAY],
    "dqn of two layers": ["algorithm=dqn", "hidden=[8,8]", *SMALL_REPLAY],
    "r2d2": ["algorithm=r2d2", "core_size=8", *SMALL_REPLAY, "algorithm.sequence_length=8", "algorithm.burn_in=4"],
    "sac": ["algorithm=sac", *SMALL_REPLAY],
}


def make_case(name: str) -> tuple[RLSpec, object]:
    spec = BASE.override(CASES[name])
    actions = ACTIONS.get(spec.algorithm.name, Discrete(2))
    return spec, experience_spec(Box(-1e4, 1e4, (4,), np.float32), actions, spec)


def draw_segment(random: np.random.Generator, spec: RLSpec, **changes: object) -> Segment:
    """Observations far from 0, each number on a scale of its own; one never varies."""
    observations = (random.normal(size=(17, 4)) + OFFSETS) * SCALES
    observations[:, 3] = 0.1
    made = segment(16, observations=observations.astype(np.float32), rewards=np.full(16, 100, np.float32), **changes)
    if spec.algorithm.name == "sac":
        made = replace(made, actions=random.uniform(-0.9, 0.9, (16, 2)).astype(np.float32))
    if spec.state_size:
        made = replace(made, extras={"state": np.zeros((1, spec.state_size), np.float32)})
    return made


@pytest.mark.parametrize("huge", [1e12, -1e12, 1e30])
@pytest.mark.parametrize("position", [0, 700])
@pytest.mark.parametrize("num_rows", [2, 100, 512])
def test_a_huge_number_counts_as_the_largest_other(huge: float, position: int, num_rows: int) -> None:
    rows = np.random.default_rng(0).normal(5.0, 2.0, (2048, 2)).astype(np.float32)
    rows[position, 1] = huge
    moments = ExperienceMoments((2,))
    for first in range(0, len(rows), num_rows):
        moments.add(rows[first : first + num_rows])
    others = np.delete(rows, position, 0).astype(np.float64)
    np.testing.assert_allclose(moments.mean, others.mean(0), rtol=5e-3)
    np.testing.assert_allclose(moments.deviation, others.std(0), rtol=2e-2)


def draw_ordinary(kind: str, random: np.random.Generator, num_rows: int) -> np.ndarray:
    if kind == "lognormal":
        return random.lognormal(0.0, 3.0, num_rows)
    if kind == "penalty and prize":
        rows = np.full(num_rows, -1e-3)
        rows[random.integers(num_rows)] = 1e4
        return rows
    part, value, noise = {
        "rare prize": (0.01, 1e4, 0.0),
        "sparse feature": (0.05, 1.0, 1e-4),
        "large": (0.02, 1e6, 1.0),
        "single": (1 / num_rows, 1e7, 0.0),
    }[kind]
    return np.where(random.random(num_rows) < part, value, noise * random.normal(size=num_rows))


@pytest.mark.parametrize("num_rows", [32, 512])
@pytest.mark.parametrize("kind", ["lognormal", "penalty and prize", "rare prize", "sparse feature", "large", "single"])
def test_sparse_and_skewed_rows_have_plain_moments(kind: str, num_rows: int) -> None:
    random = np.random.default_rng(0)
    moments = ExperienceMoments(())
    seen = np.zeros(0)
    for _ in range(6):
        rows = draw_ordinary(kind, random, num_rows)
        seen = np.append(seen, rows)
        moments.add(rows)
        np.testing.assert_allclose(moments.mean, seen.mean(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(moments.deviation, seen.std() or 1.0, rtol=1e-9)


def test_a_huge_reward_does_not_enter_the_sums_after_it() -> None:
    spec, experience = make_case("impala")
    batches = [random_batch(0, [16] * 8) for _ in range(2)]
    batches[0].rewards[3] = 1e12
    batches[1].rewards[3] = np.abs(np.delete(batches[1].rewards, 3)).max()
    found = []
    for batch in batches:
        normalizer = Normalizer(spec, experience)
        normalizer.learn(batch, np.ones(8, bool))
        found.append(normalizer._moments["rewards"].deviation)
    assert found[0] == found[1]


def test_moments_of_parts_are_those_of_the_whole() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(1e6, 1e-1, (1000, 3))
    rows[:, 2] = 0.1
    moments = ExperienceMoments((3,))
    for part in np.split(rows.astype(np.float32), [1, 7, 500]):
        moments.add(part)
    wide = rows.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(moments.mean, wide.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation[:2], np.where(wide.std(0) > 1, wide.std(0), 1.0)[:2])
    assert moments.deviation[2] == 1.0  # what has not varied, but for rounding
    small = ExperienceMoments((2,))
    small.add(wide[:, :2] - 1e6)
    np.testing.assert_allclose(small.deviation, wide[:, :2].std(0), rtol=1e-9)


def test_discounted_sums_begin_anew_with_each_segment() -> None:
    found = sum_discounted(np.array([1, 1, 1, 2, 2], np.float32), np.array([3, 2]), 0.5)
    assert found.tolist() == [1.0, 1.5, 1.75, 2.0, 3.0]


@pytest.mark.parametrize("name", CASES)
def test_published_weights_compute_from_observations_what_the_learners_do_from_normalised_ones(
    name: str, tmp_path: Path
) -> None:
    """What the learner computes, the NumPy policy of an actor, and the endpoint's model by its factory."""
    torch.manual_seed(0)
    spec, experience = make_case(name)
    random = np.random.default_rng(1)
    queue = ExperienceQueue(64, Ledger())
    learner = Learner(spec, experience, queue, WeightStore(), tmp_path)
    for _ in range(3):
        for _ in range(4):
            seq = queue.ledger.get_account(A).next_seq
            assert queue.put(A, seq, draw_segment(random, spec))
        assert learner.step()
    batch = ExperienceBatch.from_segments(0, [draw_segment(random, spec)])
    normalizer = learner.algorithm.normalizer
    normalized = normalizer.normalize(batch)
    assert np.abs(normalized.observations[:, :3]).max() < 6
    assert np.abs(normalized.observations[:, 3]).max() < 1e-6
    assert 0 < np.abs(normalized.rewards).max() < 2
    snapshot = learner.snapshot()
    factory, _ = describe_policy_model(spec, experience)
    served = find_callable("model", factory.factory)(**factory.kwargs)
    served.load_state_dict({key: torch.tensor(each) for key, each in snapshot.tensors().items()})
    states = [torch.zeros(17, spec.state_size)] if spec.state_size else []
    expected = learner.model.predict(torch.from_numpy(normalized.observations), *states)
    of_rewards = {"value", "q_values"} if not spec.state_size else {"value"}
    for key, each in served.predict(torch.from_numpy(batch.observations), *states).items():
        wanted = expected[key]
        if key in of_rewards:
            wanted = wanted * float(normalizer._moments["rewards"].deviation)
        torch.testing.assert_close(each, wanted, rtol=1e-3, atol=1e-4)
    policy = make_policy(experience.policy, 0, "actor-0", experience.action.shape)
    policy.load(1, snapshot.tensors())
    if not spec.state_size:
        outputs = learner.model(torch.from_numpy(normalized.observations))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        found, wanted = policy.compute_outputs(batch.observations), outputs.detach().numpy()
        wanted = wanted[:, : found.shape[1]]
        if spec.algorithm.name == "dqn":  # an actor computes the advantages alone
            found, wanted = (each - each.mean(1, keepdims=True) for each in (found, wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    again = Learner(spec, experience, ExperienceQueue(64, Ledger()), WeightStore(), tmp_path / "other")
    again.algorithm.load_state_dict(copy.deepcopy(learner.algorithm.state_dict()))
    for key, each in again.snapshot().tensors().items():
        np.testing.assert_array_equal(each, snapshot.tensors()[key])


OFF_POLICY = ("dqn", "r2d2", "sac")


def learn_scaled(name: str, scale: float) -> Algorithm:
    """Batches whose rewards are so many times as large."""
    torch.manual_seed(0)
    spec, experience = make_case(name)
    algorithm = make_algorithm(spec.override(["normalize_rewards=null"]), experience)
    random = np.random.default_rng(1)
    for _ in range(3):
        rewards = (scale * random.normal(size=16)).astype(np.float32)
        batch = ExperienceBatch.from_segments(0, [replace(draw_segment(random, spec), rewards=rewards)] * 2)
        assert list(algorithm.update(algorithm.prepare(batch)))
        algorithm.normalizer.learn(batch, np.ones(2, bool))
    return algorithm


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
@pytest.mark.parametrize("name", OFF_POLICY)
def test_rewards_of_any_size_teach_the_same(name: str, scale: float) -> None:
    one, other = learn_scaled(name, 1.0), learn_scaled(name, scale)
    before, after = (each.normalizer.fold(model_arrays(each.model)) for each in (one, other))
    for key, each in before.items():
        factor = scale if key.endswith("value_scale") else 1.0
        np.testing.assert_array_equal(after[key], factor * each)


def test_what_is_dropped_and_what_is_first_do_not_spoil_the_statistics(tmp_path: Path) -> None:
    spec, experience = make_case("impala")
    random = np.random.default_rng(1)
    queue = ExperienceQueue(64, Ledger())
    learner = Learner(spec, experience, queue, WeightStore(), tmp_path, used_version=500)
    good = [draw_segment(random, spec, version=500) for _ in range(6)]
    stale = replace(draw_segment(random, spec), observations=np.full((17, 4), 1e4, np.float32))
    nan = draw_segment(random, spec, version=500)
    nan = replace(nan, observations=np.full((17, 4), 1e4, np.float32), rewards=np.full(16, np.nan, np.float32))
    for seq, each in enumerate([good[0], stale, *good[1:3], *good[3:], nan]):
        assert queue.put(A, seq, each)
        if seq % 4 == 3:
            assert learner.step()
    assert queue.ledger.get_account(A).dropped == {"stale_consumption": 1, "non_finite": 1}
    seen = np.concatenate([each.observations for each in good]).astype(np.float64)
    moments = learner.algorithm.normalizer._moments["observations"]
    np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-9)
    assert moments.count == len(seen)
    learner.save()
    resumed = Learner(spec, experience, ExperienceQueue(64, Ledger()), WeightStore(), tmp_path)
    np.testing.assert_array_equal(resumed.algorithm.normalizer._moments["observations"].mean, moments.mean)


def test_without_the_options_weights_are_published_as_they_are() -> None:
    spec = BASE.override(["normalize_observations=false", "normalize_rewards=false"])
    experience = experience_spec(Box(-1, 1, (4,), np.float32), Discrete(2), spec)
    algorithm = make_algorithm(spec, experience)
    batch = ExperienceBatch.from_segments(0, [segment(16)])
    assert algorithm.prepare(batch) is batch
    arrays = model_arrays(algorithm.model)
    assert all(each is arrays[key] for key, each in algorithm.normalizer.fold(arrays).items())


NETWORK = """
import torch
class Net(torch.nn.Module):
    def __init__(self, observation_size, num_actions):
        super().__init__()
        self.body = torch.nn.Linear(observation_size, num_actions + 1)
    def forward(self, x):
        found = self.body(torch.tanh(x))
        return found[:, :-1], found[:, -1]
"""


def test_a_network_of_ones_own_has_the_statistics_as_buffers_of_its_graph(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    (tmp_path / "net.py").write_text(NETWORK)
    spec = BASE.override([f"model={tmp_path}/net.py:Net"])
    experience = experience_spec(Box(-1e4, 1e4, (4,), np.float32), Discrete(2), spec)
    algorithm = make_algorithm(spec, experience)
    batch = ExperienceBatch.from_segments(0, [draw_segment(np.random.default_rng(1), spec)])
    normalized = algorithm.prepare(batch)
    policy = make_policy(experience.policy)
    policy.load(1, algorithm.normalizer.fold(model_arrays(algorithm.model)))
    expected = algorithm.model(torch.from_numpy(normalized.observations))[0].detach().numpy()
    np.testing.assert_allclose(policy.compute_outputs(batch.observations), expected, rtol=1e-4, atol=1e-5)


def test_frames_are_not_normalised() -> None:
    with pytest.raises(ConfigError, match=r"normalize_observations = True: .* observes frames"):
        experience_spec(Box(0, 255, (8, 8, 3), np.uint8), Discrete(2), BASE)
