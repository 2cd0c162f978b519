"""The whole loop with external actors: continuous actions and frames over the wire; and in one process, to the end."""

import os
import socket as network
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from aim_game import AimGame
from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import TOKEN
from shoal.actor import ActorClient, GameActor, play
from shoal.actor.environment import make_environment
from shoal.errors import Closed, ConfigError, RunError
from shoal.flows.rl_policy import inspect_environment
from shoal.rl.first_game import describe_given
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec, policy_spec
from shoal.wire import ExperienceSpec
from sign_game import SignGame
from waiting import start_thread, wait_for

BASE = ["hidden=[16]", "segment_length=32", "learner.take_timeout_s=0.1", "learner.publish_interval_s=0.01"]
BASE += ["gateway.max_version_lag=300"]  # a stall of the machine is no reason to drop
LEARNERS = {
    "impala": ["learner.batch_steps=64", "algorithm.learning_rate=0.02", "algorithm.entropy_cost=0"],
    "ppo": ["algorithm=ppo", "learner.batch_steps=128", "algorithm.learning_rate=0.01", "algorithm.entropy_cost=0"],
    "dqn": [
        *("algorithm=dqn", "algorithm.learning_rate=0.003", "algorithm.learning_starts=256", "algorithm.discount=0"),
        *("algorithm.num_steps=1", "algorithm.batch_size=64", "algorithm.samples_per_insert=4"),
        *("algorithm.epsilon_steps=1000", "algorithm.epsilon=0.02"),
        *("gateway.queue_capacity=4", "gateway.max_credits=1"),
    ],
    "sac": [
        *("algorithm=sac", "algorithm.learning_rate=0.01", "algorithm.learning_starts=256", "algorithm.discount=0.1"),
        *("algorithm.batch_size=64", "algorithm.updates_per_step=0.5", "algorithm.initial_temperature=0.1"),
        *("gateway.queue_capacity=4", "gateway.max_credits=1"),
    ],
}


class PairGame(AimGame):
    """Eight steps of two choices; each tells in which part of its range the number is: a half, a third. 8 at best."""

    action_space = MultiDiscrete([2, 3])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        seen = float(self._seen[0])
        reward = 0.5 * (action[0] == (seen > 0)) + 0.5 * (action[1] == int((seen + 1) * 1.5))
        self._steps += 1
        return self._observe(), float(reward), False, self._steps == 8, {}


class PictureGame:
    """Eight steps; the right action tells in which half of a noisy frame of bytes the bright spot is. 8 at best, 4 by
    chance."""

    observation_space, action_space = Box(0, 255, (8, 8, 1), np.uint8), Discrete(2)

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        self._steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == int(self._column >= 4))
        self._steps += 1
        return self._observe(), reward, False, self._steps == 8, {}

    def _observe(self) -> np.ndarray:
        row, self._column = self._random.integers(0, 8, 2)
        frame = self._random.integers(0, 60, (8, 8, 1), np.uint8)
        frame[row, self._column] = 255
        return frame


FRAMES = ["learner.batch_steps=128", "algorithm.learning_rate=0.005"]

# A network of the user's own, which actors compute by onnxruntime.
NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_actions):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 32), nn.GELU())
        self.policy, self.value = nn.Linear(32, num_actions), nn.Linear(32, 1)

    def forward(self, x):
        h = self.layers(x.permute(0, 3, 1, 2) / 255)
        return self.policy(h), self.value(h).squeeze(-1)
"""
OWN = ["model={}:Net", "learner.batch_steps=128", "algorithm.learning_rate=0.003", "algorithm.discount=0"]
CASES = {
    "numbers by sac": (AimGame, 6.0, LEARNERS["sac"]),
    "choices by ppo": (PairGame, 6.5, LEARNERS["ppo"]),
    "frames by a network of the user's": (PictureGame, 6.0, OWN),
}
FURTHER_CASES = {
    "numbers by impala": (AimGame, 6.0, LEARNERS["impala"]),
    "numbers by ppo": (AimGame, 6.0, LEARNERS["ppo"]),
    "frames by impala": (PictureGame, 6.0, FRAMES),
    "frames by ppo": (PictureGame, 7.0, ["algorithm=ppo", *FRAMES, "algorithm.learning_rate=0.003"]),
    "frames by dqn": (PictureGame, 7.0, LEARNERS["dqn"]),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(each, marks=pytest.mark.soak) for each in FURTHER_CASES)])
def test_external_actors_teach_a_policy(name: str, tmp_path: Path) -> None:
    game, target, words = (CASES | FURTHER_CASES)[name]
    (tmp_path / "my_net.py").write_text(NETWORK)
    spec = RLSpec().override([*BASE, *(word.format(tmp_path / "my_net.py") for word in words)])
    experience = experience_spec(game.observation_space, game.action_space, spec)

    def run(index: int, address: str) -> None:
        with ActorClient(address, TOKEN, f"actor-{index}", timeout_s=60) as client:
            play(game(), client, seed=index)

    solve(spec, experience, target, run, tmp_path / "run")


BOARD_LEARNERS = {"dqn": [], "r2d2": ["core_size=32", "algorithm.sequence_length=5", "algorithm.burn_in=0"]}


@pytest.mark.parametrize("name", ["dqn", pytest.param("r2d2", marks=pytest.mark.soak)])
def test_a_board_game_is_learned_with_masks(name: str, tmp_path: Path) -> None:
    """One actor is the bundled loop; the other one a game that owns its loop. Both choose free fields alone."""
    words = ["algorithm.num_steps=1", "algorithm.learning_starts=500", "algorithm.epsilon_steps=2000"]
    queue = ["gateway.queue_capacity=16", "gateway.max_credits=4", "algorithm.epsilon=0.02"]
    words = [*BASE, f"algorithm={name}", *words, *queue, "hidden=[64]", *BOARD_LEARNERS[name]]
    spec = RLSpec(env="shoal.libs.games:TicTacToe-v0").override(words)
    experience, _ = inspect_environment(spec)

    def run(index: int, address: str) -> None:
        with ActorClient(address, TOKEN, f"actor-{index}", timeout_s=60) as client:
            game = make_environment(spec.env)
            if index == 0:
                play(game, client, seed=index)
            else:
                play_own_loop(game, client, index)

    solve(spec, experience, 0.6, run, tmp_path / "run")  # by chance 0


def play_own_loop(game: Any, client: ActorClient, seed: int) -> None:
    with GameActor(client, seed, budget_s=10.0) as actor:
        while not actor.finished:
            observation, info = game.reset(seed=seed)
            seed, terminated = seed + 1, False
            while not terminated:
                mask = info["action_mask"]
                action = actor.act(observation, mask=mask)
                assert mask[action]
                observation, reward, terminated, _, info = game.step(action)
                actor.reward(reward)
            actor.end_episode(observation)


TURN_AND_JUMP = {"observation": [1], "action": [{"low": -1, "high": 1}, 2]}


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(each, marks=pytest.mark.soak) for each in ("impala", "sac"))])
def test_numbers_and_choices_of_one_action_are_learned_together(name: str, tmp_path: Path) -> None:
    """Eight steps: half of the reward for the number that is seen, half for whether it is positive. 8 at best."""
    spec = RLSpec(env=TURN_AND_JUMP).override([*BASE, *LEARNERS[name]])
    experience, _ = describe_given(spec)

    def run(index: int, address: str) -> None:
        random = np.random.default_rng(index)
        client = ActorClient(address, TOKEN, f"actor-{index}", timeout_s=60, offers=TURN_AND_JUMP)
        with client, GameActor(client, index, budget_s=10.0) as actor:
            while not actor.finished:
                for seen in random.uniform(-1, 1, 8):
                    turn, jump = actor.act([seen])
                    assert type(jump) is int
                    actor.reward(0.5 * (1 - abs(turn - seen)) + 0.5 * (jump == (seen > 0)))
                actor.end_episode([0.0])

    solve(spec, experience, 6.5, run, tmp_path / "run")  # about 3 by chance


def solve(
    spec: RLSpec, experience: ExperienceSpec, target: float, run: Callable[[int, str], None], folder: Path
) -> None:
    """Two actors reach the target, and none of their segments is dropped."""
    with LocalLoop(spec, experience, folder, TOKEN, target_return=target) as loop:
        threads = [threading.Thread(target=run, args=(index, loop.address), daemon=True) for index in range(2)]
        for thread in threads:
            thread.start()
        assert loop.wait_until_solved(timeout_s=600) > 0
        segments = loop.gateway.stats()["segments"]
        assert segments["balanced"]
        assert not segments["dropped"], segments
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# -- in one process, actors as threads: the books balance to the end


SPEC = RLSpec(hidden=(16,)).override(
    [
        "learner.batch_steps=64",
        "learner.max_batch_steps=64",
        "learner.take_timeout_s=0.1",
        "algorithm.learning_rate=0.02",
        "algorithm.entropy_cost=0.001",
    ]
)
EXPERIENCE = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec(SPEC.hidden))


def actor(loop: LocalLoop, index: int) -> threading.Thread:
    def run() -> None:
        with ActorClient(loop.address, TOKEN, f"actor-{index}", timeout_s=60) as client:
            play(SignGame(), client, seed=index)

    thread = start_thread(run)
    return thread


def test_the_books_balance_while_the_run_goes_on_and_after_it(tmp_path: Path) -> None:
    with LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN) as loop:
        thread = actor(loop, 0)
        for _ in range(20):
            assert loop.gateway.stats()["segments"]["balanced"]
        wait_for(lambda: loop.learner.stats()["updates"] > 3)
        loop.close()
        totals = loop.ledger.get_totals()
        assert totals.is_balanced
        assert totals.queued == 0
        assert totals.consumed == loop.learner.counts["consumed"]
    thread.join(60)


def test_a_loop_that_is_not_solved_in_time_says_how_far_it_came(tmp_path: Path) -> None:
    with (
        LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN, target_return=7.0) as loop,
        pytest.raises(RunError, match="mean return"),
    ):
        loop.wait_until_solved(timeout_s=0.2)


def test_a_loop_that_cannot_start_leaves_nothing_open(tmp_path: Path) -> None:
    with network.create_server(("127.0.0.1", 0)) as server:
        loop = LocalLoop(SPEC.override([f"gateway.port={server.getsockname()[1]}"]), EXPERIENCE, tmp_path, TOKEN)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="another port"), loop:
            pass
        assert len(os.listdir("/proc/self/fd")) < before  # the ledger's file is closed, and the gateway's sockets
        with pytest.raises(Closed):
            loop.store.publish(loop.learner.snapshot())
