"""A share of each sample is of what others have shown, from a replay of its own."""

from __future__ import annotations

from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
import torch

from rl_setting import EXPERIENCE, random_batch, segment
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.spec import RLSpec, add_core, experience_spec
from shoal.wire import ExperienceSpec, Segment

SIZE, REWARD = 5, 77.0  # of the shown steps alone


class FakeShown:
    """Demonstrations that came without a gateway."""

    def __init__(self, share: float, *segments: Segment) -> None:
        self.share, self.generation, self._segments = share, 1, segments
        self.offline_steps = 0

    def take_offline_steps(self) -> int:
        return self.offline_steps

    def get_segments(self) -> tuple[Segment, ...]:
        return self._segments


def make_case(name: str) -> tuple[RLSpec, ExperienceSpec, dict[str, Any]]:
    """A spec, its experience, and what its segments have beyond observations and rewards."""
    algorithm = {"name": name, "replay_mb": 0.2, "batch_size": 8, "learning_starts": 8}
    if name == "sac":
        spec = RLSpec(hidden=(8,), algorithm=algorithm)  # type: ignore[arg-type]
        box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        experience = experience_spec(gymnasium.spaces.Box(-10, 10, (4,), np.float32), box, spec)
        return spec, experience, {"actions": np.zeros((8, 2), np.float32)}
    if name == "dqn":
        return RLSpec(hidden=(8,), algorithm=algorithm), EXPERIENCE, {}  # type: ignore[arg-type]
    sequences = {"sequence_length": 4, "burn_in": 2, "num_steps": 3}
    spec = RLSpec(hidden=(8, 6), core="gru", core_size=SIZE, algorithm=algorithm | sequences)  # type: ignore[arg-type]
    policy, extras = add_core(spec.algorithm.describe_policy(spec.hidden), spec)  # type: ignore[arg-type]
    experience = msgspec.structs.replace(EXPERIENCE, policy=policy, extras=extras)
    return spec, experience, {"extras": {"state": np.ones((1, SIZE), np.float32)}}


@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_a_quarter_of_a_sample_was_shown_and_has_priorities_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    spec, experience, fields = make_case(name)
    algorithm: Any = make_algorithm(spec, experience)
    algorithm.demonstrations = FakeShown(
        0.25, segment(behaviour="human", rewards=np.full(8, REWARD, np.float32), **fields)
    )
    assert algorithm.take_demonstrations() is False
    algorithm.insert(random_batch(1, [8], **fields), algorithm._replay)
    arrays = algorithm.draw().arrays if name == "sac" else algorithm.draw()[1].arrays
    returns = arrays["returns"] if "returns" in arrays else arrays["rewards"][:, 0]
    assert (np.abs(returns) > 50).tolist() == [False] * 6 + [True] * 2
    if name != "sac":
        rows = algorithm.draw()[0]
        assert (rows >= 0).tolist() == [True] * 6 + [False] * 2
    before = algorithm._shown._tree.total
    for seed in (2, 3):  # the errors of the first are those of the insertion
        *_, metrics = algorithm.update(random_batch(seed, [8], **fields))
    assert metrics["learner/demonstration_share"] == 0.25
    if name != "sac":  # which draws uniformly
        assert algorithm._shown._tree.total != before
    algorithm.demonstrations.generation, algorithm.demonstrations._segments = 2, ()  # all were dropped
    algorithm.take_demonstrations()
    *_, metrics = algorithm.update(random_batch(4, [8], **fields))
    assert "learner/demonstration_share" not in metrics


@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_it_learns_from_what_was_shown_alone_before_any_game_has_played(name: str) -> None:
    torch.manual_seed(0)
    spec, experience, fields = make_case(name)
    algorithm: Any = make_algorithm(spec, experience)
    algorithm.demonstrations = FakeShown(0.25, segment(behaviour="human", **fields))
    algorithm.demonstrations.offline_steps = 3
    before = [each.detach().clone() for each in algorithm.model.parameters()]
    assert algorithm.take_demonstrations() is True
    assert any(not torch.equal(*each) for each in zip(before, algorithm.model.parameters(), strict=True))
    assert algorithm._replay.num_steps == 0
    algorithm.demonstrations.offline_steps = 0
    assert algorithm.take_demonstrations() is False
    arrays = {"rewards": np.full(8, 77.0, np.float32)}
    algorithm.insert(random_batch(1, [8], **fields, **arrays), algorithm._replay)  # and then draws from both again
    algorithm.draw()
