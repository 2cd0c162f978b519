"""Acting with a recurrent core in NumPy: as torch computes it, one state for each episode, and what segments carry."""

import msgspec
import numpy as np
import pytest
import torch

from rl_setting import EXPERIENCE
from shoal.actor.policy import make_policy
from shoal.actor.recurrent_policy import RecurrentPolicy
from shoal.errors import ConfigError, WeightsError
from shoal.libs.off_policy.q_network import RecurrentQNetwork
from shoal.rl.spec import RLSpec, add_core
from shoal.wire import ExperienceSpec

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


def arrays(network: RecurrentQNetwork) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


def make(
    core: str = "gru", hidden: tuple[int, ...] = (8, 6), seed: int = 1
) -> tuple[RecurrentPolicy, RecurrentQNetwork]:
    network, policy = make_network(core, hidden, seed), make_policy(describe(core, hidden).policy, seed=0)
    assert isinstance(policy, RecurrentPolicy)
    policy.load(1, arrays(network))
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
    policy.load(2, {name: 2 * array for name, array in arrays(network).items()})
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
    others = {each: found for each, found in arrays(network).items() if each != name}
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
