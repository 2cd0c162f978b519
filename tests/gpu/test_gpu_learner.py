"""Updates of every algorithm on a CUDA device, of vectors and of frames, are the CPU's, and what is published stays."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rl_setting import segment
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner import model_arrays
from shoal.rl.spec import RLSpec, experience_spec
from shoal.weights import WeightSnapshot
from shoal.weights.store import decode_tensors

# Weights of a recurrent core lie with all others in one vector, which cuDNN does not like and computes with.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")]
REPLAYED = ("dqn", "r2d2", "sac")


@pytest.mark.parametrize("shape", [(4,), (12, 12, 2)], ids=["vector", "frames"])
@pytest.mark.parametrize("name", ["impala", "ppo", "dqn", "r2d2", "sac"])
def test_updates_on_a_device_are_those_on_the_cpu(device: str, name: str, shape: tuple[int, ...]) -> None:
    found = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        words = [f"algorithm={name}", f"learner.device={place}"]
        words += ["core=gru", "core_size=8"] if name == "r2d2" else []
        if name in REPLAYED:
            words += ["algorithm.replay_mb=1", "algorithm.learning_starts=1", "algorithm.batch_size=16"]
        actions = Box(-1, 1, (2,)) if name == "sac" else Discrete(3)
        spec = RLSpec(hidden=(8,), segment_length=8).override(words)
        kind = np.uint8 if len(shape) > 1 else np.float32
        experience = experience_spec(Box(0, 255, shape, kind), actions, spec)
        algorithm = make_algorithm(spec, experience)
        random = np.random.default_rng(0)
        observations = random.integers(0, 256, (9, *shape)).astype(kind) / (1 if kind is np.uint8 else 256)
        taken = random.uniform(-0.9, 0.9, (8, 2)).astype(np.float32) if name == "sac" else random.integers(0, 3, 8)
        one = segment(8, observations=observations.astype(kind), actions=taken)
        batch = ExperienceBatch.from_segments(1, [one] * 4)
        if name == "r2d2":
            batch.extras["state"] = np.zeros((4, 8), np.float32)
        for _ in range(3):
            metrics = list(algorithm.update(batch))
            assert all(np.isfinite(list(each.values())).all() for each in metrics)
        assert all(each.device.type == torch.device(place).type for each in algorithm.model.parameters())
        taken = WeightSnapshot.of(1, model_arrays(algorithm.model))
        own = {key: each.clone().cpu().numpy() for key, each in algorithm.model.state_dict().items()}
        assert list(algorithm.update(batch))  # at once: what was published is of before
        for key, value in decode_tensors(taken.payload).items():
            np.testing.assert_array_equal(value, own[key], err_msg=key)
        found.append(model_arrays(algorithm.model))
    for key, value in found[0].items():  # Adam makes a step of a gradient that is nothing but rounding: a few weights
        assert np.linalg.norm(found[1][key] - value) <= 1e-2 * np.linalg.norm(value), key
