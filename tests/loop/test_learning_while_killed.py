"""Each algorithm learns while one of its actors is killed again and again, and the books balance to the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import aim_game
import sign_game
from rl_setting import TOKEN
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec
from waiting import wait_for

BASE = ["hidden=[16]", "segment_length=32", "learner.take_timeout_s=0.1", "learner.publish_interval_s=0"]
SHORT_QUEUE = ["gateway.queue_capacity=4", "gateway.max_credits=1"]  # of recent weights
OFF_POLICY = ["algorithm.learning_rate=0.01", "algorithm.batch_size=64", "algorithm.learning_starts=200", *SHORT_QUEUE]
DQN = ["algorithm=dqn", "algorithm.discount=0", "algorithm.num_steps=1", "algorithm.epsilon_steps=1000"]
SAC = ["algorithm=sac", "algorithm.discount=0.1", "algorithm.updates_per_step=0.5", "algorithm.initial_temperature=0.1"]
WORDS = {
    "impala": ["learner.batch_steps=64", "algorithm.learning_rate=0.02"],
    "ppo": ["algorithm=ppo", "learner.batch_steps=128", "algorithm.learning_rate=0.01"],
    "ppo synchronous": [
        *("algorithm=ppo", "algorithm.synchronous=true", "learner.take_timeout_s=0.3"),
        *("learner.batch_steps=128", "algorithm.learning_rate=0.01"),
    ],
    "dqn": [*DQN, *OFF_POLICY],
    "sac": [*SAC, *OFF_POLICY],
}
SIGN_SPACES = Box(-1, 1, (4,), np.float32), Discrete(2)
AIM_SPACES = aim_game.AimGame.observation_space, aim_game.AimGame.action_space
NUM_KILLED = 3


def start_actor(game: Any, address: str, index: int, seed: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, game.__file__, address, TOKEN, f"actor-{index}", str(seed)])


@pytest.mark.parametrize(
    "name", ["impala", *(pytest.param(each, marks=pytest.mark.soak) for each in WORDS if each != "impala")]
)
def test_it_learns_while_an_actor_is_killed(name: str, tmp_path: Path) -> None:
    game, spaces, target = (aim_game, AIM_SPACES, 6.0) if name == "sac" else (sign_game, SIGN_SPACES, 7.0)
    spec = RLSpec().override([*BASE, *WORDS[name]])
    with LocalLoop(spec, experience_spec(*spaces, spec), tmp_path / "run", TOKEN, target_return=target) as loop:
        incarnations: set[int] = set()

        def has_played() -> bool:
            """Whether a new incarnation of actor-1 has sent experience."""
            actors = [each for each in loop.gateway.stats()["actors"] if each["actor_id"] == "actor-1"]
            is_new = any(each["steps"] and each["incarnation"] not in incarnations for each in actors)
            incarnations.update(each["incarnation"] for each in actors if each["steps"])
            return is_new

        steady, killed = start_actor(game, loop.address, 0, seed=0), start_actor(game, loop.address, 1, seed=1)
        for seed in range(2, 2 + NUM_KILLED):
            wait_for(has_played)
            killed.kill()
            killed.wait()
            killed = start_actor(game, loop.address, 1, seed)
        wait_for(has_played)
        loop.wait_until_solved(timeout_s=600)
        loop.close()
        totals = loop.ledger.get_totals()
    assert [steady.wait(60), killed.wait(60)] == [0, 0]
    assert totals.is_balanced
    assert totals.queued == 0
    assert totals.consumed == loop.learner.counts["consumed"] > 0
    if name in ("dqn", "sac"):
        assert set(totals.dropped) <= {"shutdown"}  # nothing for its age
