"""The learner's device: a CPU as ever, a GPU where there is one, refused by name where there is none."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import segment
from shoal import checkpoint
from shoal.errors import ConfigError
from shoal.rl.algorithms.algorithm import Algorithm, make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner import model_arrays
from shoal.rl.spec import RLSpec, policy_spec
from shoal.wire import ExperienceSpec, TensorSpec

DISCRETE = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec((8,)))
BOX = ExperienceSpec(
    OTHER_MODEL.observation,
    TensorSpec("float32", (2,), -1.0, 1.0),
    16,
    msgspec.structs.replace(policy_spec((8,), True), action_low=(-1.0, -1.0), action_high=(1.0, 1.0)),
)
SPACES = {"impala": DISCRETE, "ppo": DISCRETE, "dqn": DISCRETE, "sac": BOX}


def make(name: str, device: str) -> Algorithm:
    torch.manual_seed(0)
    words = [f"algorithm={name}", f"learner.device={device}"]
    if name in ("dqn", "sac"):
        words += ["algorithm.replay_mb=0.1", "algorithm.learning_starts=1", "algorithm.batch_size=16"]
    return make_algorithm(RLSpec(hidden=(8,)).override(words), SPACES[name])


def make_batch(name: str) -> ExperienceBatch:
    random = np.random.default_rng(0)
    discrete = SPACES[name] is DISCRETE
    return ExperienceBatch.from_segments(
        1,
        [
            segment(
                8,
                observations=random.normal(size=(9, 4)).astype(np.float32),
                actions=random.integers(0, 2, 8) if discrete else random.uniform(-0.9, 0.9, (8, 2)).astype(np.float32),
                rewards=random.normal(size=8).astype(np.float32),
            )
            for _ in range(4)
        ],
    )


def learn(name: str, device: str) -> Algorithm:
    algorithm = make(name, device)
    for _ in range(3):
        assert all(np.isfinite(list(metrics.values())).all() for metrics in algorithm.update(make_batch(name)))
    return algorithm


@pytest.mark.parametrize("name", SPACES)
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert make(name, "auto").device == make(name, "cpu").device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"learner.device = 'cuda': torch finds no GPU where the learner runs"):
        make(name, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", SPACES)
def test_a_gpu_learns_what_a_cpu_learns_and_its_checkpoint_is_read_without_one(name: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = learn(name, "cuda"), learn(name, "cpu")
    assert all(parameter.is_cuda for parameter in on_gpu.model.parameters())
    for key, value in model_arrays(on_gpu.model).items():
        np.testing.assert_allclose(value, model_arrays(on_cpu.model)[key], rtol=1e-2, atol=1e-4)
    checkpoint.save(tmp_path, 1, on_gpu.state_dict())
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    resumed = make(name, "cpu")
    resumed.load_state_dict(loaded.state)
    for key, value in model_arrays(resumed.model).items():
        np.testing.assert_array_equal(value, model_arrays(on_gpu.model)[key])
    assert list(resumed.update(make_batch(name)))
