"""Acting with a recurrent core in NumPy: as torch computes it, one state for each episode, and what segments carry; and
a game of memory that is learnt from stored states behind the gateway."""

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
from registered import arrays_of
from rl_setting import EXPERIENCE, TOKEN, serving
from shoal.actor.policy import make_policy
from shoal.actor.recurrent_policy import RecurrentPolicy
from shoal.errors import ConfigError, WeightsError
from shoal.libs.off_policy.q_network import RecurrentQNetwork
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, add_core, experience_spec, network_kwargs
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec
from waiting import wait_for

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order, over an episode


def describe(core: str = "gru", hidden: tuple[int, ...] = (8, 6)) -> ExperienceSpec:
    spec = RLSpec(hidden=hidden, algorithm="r2d2", core=core, core_size=5)  # type: ignore[arg-type]
    described = spec.algorithm.describe_policy(hidden)
    assert described is not None
    policy, extras = add_core(described, spec)
    return msgspec.structs.replace(EXPERIENCE, policy=policy, extras=extras, segment_length=4)


def make_network(core: str = "gru", hidden: tuple[int, ...] = (8, 6), seed: int = 1) -> RecurrentQNetwork:
    torch.manual_seed(seed)
    network = RecurrentQNetwork(4, 2, hidden, core=core, core_size=5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.8 if parameter.ndim > 1 else 0.1)  # a large bias would decide for itself
    network.epsilon.zero_()
    return network


def make(
    core: str = "gru", hidden: tuple[int, ...] = (8, 6), seed: int = 1
) -> tuple[RecurrentPolicy, RecurrentQNetwork]:
    network, policy = make_network(core, hidden, seed), make_policy(describe(core, hidden).policy, seed=0)
    assert isinstance(policy, RecurrentPolicy)
    policy.load(1, arrays_of(network))
    return policy, network


@pytest.mark.parametrize("hidden", [(), (8,), (16, 8, 4)])
@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_actors_choose_and_remember_as_the_network_does(core: str, hidden: tuple[int, ...]) -> None:
    chosen = set()
    for seed in range(5):
        policy, network = make(core, hidden, seed)
        observations = np.random.default_rng(2).normal(size=(30, 4)).astype(np.float32)
        state = torch.zeros(1, 5 if core == "gru" else 10)
        actions = []
        for observation in observations:
            np.testing.assert_allclose(policy.get_extras()["state"], state[0], **TOLERANCE)
            predicted = network.predict(torch.from_numpy(observation[None]), state)
            actions.append(predicted["action"].item())
            assert policy.act(observation) == (actions[-1], 0.0)
            state = predicted["next_state"].detach()
        values, last = network(torch.from_numpy(observations)[:, None], torch.zeros_like(state))  # all steps at once
        assert values[:, 0].argmax(-1).tolist() == actions
        np.testing.assert_allclose(last.detach(), state, **TOLERANCE)
        chosen |= set(actions)
    assert chosen == {0, 1}


def test_each_stream_has_a_state_of_its_own_which_ends_with_its_episode() -> None:
    policy, _ = make()
    observations = np.random.default_rng(3).normal(size=(2, 6, 4)).astype(np.float32)
    for t in range(6):  # interleaved
        for stream in ("red", "blue"):
            policy.act(observations[int(stream == "blue"), t], stream)
    together = [policy.get_extras(stream)["state"] for stream in ("red", "blue")]
    for number, expected in enumerate(together):
        alone, _ = make()
        for observation in observations[number]:
            alone.act(observation)
        np.testing.assert_array_equal(alone.get_extras()["state"], expected)
    policy.reset("red")
    assert not policy.get_extras("red")["state"].any()
    np.testing.assert_array_equal(policy.get_extras("blue")["state"], together[1])
    assert len(policy._states) == 1  # of episodes that are over, nothing stays


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_streams_that_act_together_do_as_each_alone(core: str) -> None:
    together, _ = make(core)
    alone = [make(core)[0] for _ in range(3)]
    observations = np.random.default_rng(5).normal(size=(12, 3, 4)).astype(np.float32)
    for t, rows in enumerate(observations):
        streams = [0, 1, 2] if t % 3 else [2, 0]  # not all of them act each time
        if t == 6:
            together.reset(1)
            alone[1].reset()
        actions, log_probabilities = together.act_batch(rows[streams], streams)
        assert list(zip(actions, log_probabilities, strict=True)) == [alone[each].act(rows[each]) for each in streams]
        for stream in range(3):
            expected = alone[stream].get_extras()["state"]
            np.testing.assert_allclose(together.get_extras(stream)["state"], expected, **TOLERANCE)


def test_newer_weights_go_on_with_the_state() -> None:
    policy, network = make()
    policy.act(np.ones(4, np.float32))
    state = policy.get_extras()["state"].copy()
    policy.load(2, {name: 2 * array for name, array in arrays_of(network).items()})
    assert policy.version == 2
    np.testing.assert_array_equal(policy.get_extras()["state"], state)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("core.rnn.weight_hh_l0", None),
        ("core.rnn.weight_hh_l0", np.zeros((15, 6), np.float32)),
        ("core.rnn.weight_ih_l0", np.zeros((15, 9), np.float32)),
        ("core.rnn.bias_ih_l0", np.zeros(10, np.float32)),
        ("head.advantage.0.weight", np.zeros((6, 4), np.float32)),
        ("trunk.0.bias", None),
        ("head.epsilon", None),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(name: str, array: np.ndarray | None) -> None:
    policy, network = make()
    others = {each: found for each, found in arrays_of(network).items() if each != name}
    with pytest.raises(WeightsError, match="version 2"):
        policy.load(2, others if array is None else {**others, name: array})
    assert policy.version == 1
    policy.act(np.ones(4, np.float32))


def test_a_core_that_is_unknown_here_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"policy\.core"):
        make_policy(msgspec.structs.replace(describe().policy, core="mamba"))


def test_a_core_that_the_algorithm_does_not_take_is_refused_with_what_fits() -> None:
    spec = RLSpec(algorithm="dqn", core="gru")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is not for dqn, whose core is none.*r2d2"):
        add_core(EXPERIENCE.policy, spec)
    with pytest.raises(ConfigError, match="is not for r2d2, whose core is gru or lstm"):
        add_core(EXPERIENCE.policy, RLSpec(algorithm="r2d2", core="none"))  # type: ignore[arg-type]


def test_a_state_above_that_of_a_gru_is_out_of_range() -> None:
    (state,) = describe().extras
    assert (state.tensor.shape, state.tensor.high, state.per) == ((5,), 1.001, "segment")
    assert describe("lstm").extras[0].tensor.shape == (10,)


# -- behind the gateway, while an actor is killed


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


def describe_recall(segment_length: int) -> shoal.wire.ExperienceSpec:
    policy, extras = add_core(SPEC.algorithm.describe_policy(SPEC.hidden), SPEC)  # type: ignore[arg-type]
    return msgspec.structs.replace(EXPERIENCE, policy=policy, extras=extras, segment_length=segment_length)


# The sign is seen in the first segment of an episode, and told in the last step of the second one.
HALVES = describe_recall(recall_game.NUM_STEPS // 2)


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
    newest = WeightSnapshot.of(2, arrays_of(network))
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
