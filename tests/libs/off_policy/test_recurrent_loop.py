"""Recurrent policies behind the gateway: a game of memory is learned from stored states, while an actor is killed."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import msgspec
import numpy as np
import pytest
import torch

import recall_game
import shoal
from rl_setting import EXPERIENCE, TOKEN, serving
from shoal.actor.policy import make_policy
from shoal.libs.off_policy.q_network import RecurrentQNetwork
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, add_core, experience_spec, network_kwargs
from shoal.weights import WeightSnapshot
from waiting import wait_for

SPEC = RLSpec(hidden=(32,)).override(
    [
        "algorithm=r2d2",
        "core_size=32",
        "algorithm.discount=0.95",
        "algorithm.num_steps=3",
        "algorithm.sequence_length=6",
        "algorithm.burn_in=3",
        "algorithm.samples_per_insert=8",
        "algorithm.learning_rate=0.005",
        "algorithm.learning_starts=300",
        "algorithm.target_update_period=20",
        "algorithm.epsilon_steps=1500",
        "algorithm.epsilon=0.01",
        "algorithm.replay_mb=4",
        "learner.batch_steps=64",
        "learner.max_batch_steps=64",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0",
    ]
)


def describe(segment_length: int) -> shoal.wire.ExperienceSpec:
    policy, extras = add_core(SPEC.algorithm.describe_policy(SPEC.hidden), SPEC)  # type: ignore[arg-type]
    return msgspec.structs.replace(EXPERIENCE, policy=policy, extras=extras, segment_length=segment_length)


# The sign is seen in the first segment of an episode, and told in the last step of the second one.
HALVES = describe(recall_game.NUM_STEPS // 2)


def start_actor(address: str, index: int, seed: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, recall_game.__file__, address, TOKEN, f"actor-{index}", str(seed)])


def test_it_recalls_what_only_the_stored_state_tells_while_an_actor_is_killed(tmp_path: Path) -> None:
    with LocalLoop(SPEC, HALVES, tmp_path / "run", TOKEN, target_return=0.9) as loop:

        def has_played() -> bool:
            actors = [each for each in loop.gateway.stats()["actors"] if each["actor_id"] == "actor-1"]
            return any(each["incarnation"] not in incarnations and each["steps"] for each in actors)

        incarnations: set[int] = set()
        steady, killed = start_actor(loop.address, 0, seed=0), start_actor(loop.address, 1, seed=1)
        for seed in (2, 3):
            wait_for(has_played)
            incarnations |= {each["incarnation"] for each in loop.gateway.stats()["actors"]}
            killed.kill()
            killed.wait()
            killed = start_actor(loop.address, 1, seed)
        loop.wait_until_solved(600)
        wait_for(has_played)
        loop.close()
        totals = loop.ledger.get_totals()
    assert [steady.wait(60), killed.wait(60)] == [0, 0]
    assert totals.is_balanced
    assert totals.consumed == loop.learner.counts["consumed"] > 0
    assert set(totals.dropped) <= {"shutdown"}


@pytest.mark.parametrize("name", ["impala", pytest.param("ppo", marks=pytest.mark.soak)])
def test_an_actor_critic_with_a_core_recalls(name: str, tmp_path: Path) -> None:
    overrides = [f"algorithm={name}", "core=gru", "core_size=32", f"segment_length={recall_game.NUM_STEPS}"]
    overrides += ["algorithm.discount=0.95", "algorithm.learning_rate=0.01"]
    overrides += ["learner.batch_steps=256", "learner.max_batch_steps=512", "learner.publish_interval_s=0"]
    spec = RLSpec(hidden=(32,)).override(overrides)
    experience = experience_spec(gymnasium.spaces.Box(-10, 10, (4,)), gymnasium.spaces.Discrete(2), spec)
    with LocalLoop(spec, experience, tmp_path / "run", TOKEN, target_return=0.9) as loop:
        actor = start_actor(loop.address, 0, seed=0)
        loop.wait_until_solved(600)
    assert actor.wait(60) == 0


def test_episodes_at_once_have_a_state_each_which_begins_with_zeros() -> None:
    torch.manual_seed(3)
    network = RecurrentQNetwork(**network_kwargs(SPEC, HALVES))
    newest = WeightSnapshot.of(2, {name: tensor.numpy() for name, tensor in network.state_dict().items()})
    observations = np.random.default_rng(1).uniform(-1, 1, (2, 11, 4)).astype(np.float32)
    with serving(experience=HALVES, queue_capacity=64) as parts:
        parts.store.publish(newest)
        wait_for(lambda: parts.gateway.stats()["weights_version"] == 2)
        with shoal.connect(parts.address, token=TOKEN, actor_id="game") as actor:
            for _ in range(2):  # the second episode under a key begins with zeros, too
                for t in range(5):
                    for key in (0, 1):
                        actor.act(observations[key, t], key)
                for key in (0, 1):
                    actor.end_episode(observations[key, 5], episode=key)
            batch = parts.take(20, 20, 8)
            assert actor.client.drops == {}
    assert batch.lengths.tolist() == [3, 3, 2, 2] * 2
    alone = make_policy(HALVES.policy, seed=0)
    alone.load(1, newest.tensors())
    expected = []
    for key in (0, 1):
        alone.reset()
        for observation in observations[key, :3]:
            alone.act(observation)
        expected.append(alone.get_extras()["state"])
    states = batch.extras["state"]
    assert not states[[0, 1, 4, 5]].any()
    for rows in ([2, 3], [6, 7]):
        np.testing.assert_array_equal(states[rows], expected)
    assert np.abs(expected).max() > 0.01
