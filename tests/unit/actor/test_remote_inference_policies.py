"""Every kind of policy that an actor can compute, computed at the gateway: the same distribution, the same segment."""

import math
from typing import Any

import numpy as np
import pytest

from rl_setting import EXPERIENCE, RemoteRounds
from shoal.actor.policy import make_policy
from shoal.actor.recurrent_policy import NUM_GATES, RecurrentPolicy
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec, PolicySpec, TensorSpec
from shoal.wire.experience_spec import STATE, ConvolutionSpec, ExtraSpec
from shoal.wire.messages import ActMessage

LAYERS = (("w", "b"),)
RANDOM = np.random.default_rng(3)


def dense(num_outputs: int, num_inputs: int = 4) -> dict[str, np.ndarray]:
    return {
        "w": RANDOM.normal(size=(num_outputs, num_inputs)).astype(np.float32),
        "b": RANDOM.normal(size=num_outputs).astype(np.float32),
    }


FLAT = EXPERIENCE.observation
FRAME = TensorSpec("uint8", (6, 6, 2), 0, 255)
CONVOLUTION = ConvolutionSpec("k", "kb", 2)
KERNEL = {"k": RANDOM.normal(size=(3, 2, 3, 3)).astype(np.float32), "kb": np.zeros(3, np.float32)}
CASES: dict[str, tuple[ExperienceSpec, dict[str, np.ndarray]]] = {
    "categorical": (
        ExperienceSpec(FLAT, TensorSpec("int64", (), 0, 2), 4, PolicySpec("mlp_categorical", "tanh", LAYERS)),
        dense(3),
    ),
    "multi_categorical": (
        ExperienceSpec(
            FLAT,
            TensorSpec("int64", (2,), 0, 2),
            4,
            PolicySpec("mlp_multi_categorical", "tanh", LAYERS, action_sizes=(3, 2)),
        ),
        dense(5),
    ),
    "squashed_gaussian": (
        ExperienceSpec(
            FLAT,
            TensorSpec("float32", (2,), -2, 1),
            4,
            PolicySpec(
                "mlp_squashed_gaussian", "tanh", LAYERS, action_low=(-2, 0), action_high=(1, 1), noise_decays=(0, 0.9)
            ),
        ),
        dense(4),
    ),
    "epsilon_greedy": (
        ExperienceSpec(
            FLAT,
            TensorSpec("int64", (), 0, 2),
            4,
            PolicySpec("mlp_epsilon_greedy", "relu", LAYERS, epsilon="e", epsilon_exponent=7.0),
        ),
        {**dense(3), "e": np.array(0.4, np.float32)},
    ),
    "frames": (
        ExperienceSpec(
            FRAME,
            TensorSpec("int64", (), 0, 1),
            4,
            PolicySpec(
                "mlp_categorical",
                "relu",
                LAYERS,
                convolutions=(CONVOLUTION,),
                channels_last=True,
                observation_scale=0.1,
            ),
        ),
        {**dense(2, 27), **KERNEL},
    ),
}


class Desk(RemoteRounds):
    """Of a policy with these weights."""

    def __init__(self, experience: ExperienceSpec, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(experience, WeightSnapshot.of(7, arrays), seed=5)

    def act(self, rows: dict[str, bytes], step: int, **fields: Any) -> dict[str, Any]:
        """One step of each actor's episode 0, by its id."""
        for name, frame in rows.items():
            key = (name, 1)
            self.inference.add_client(key, ActorProgress(*key))
            self.inference.take_act(key, ActMessage(0, step, 1.0, **fields), [frame])
        return {key[0]: answer for key, answer, _ in self.settle()}


@pytest.mark.parametrize("name", CASES)
def test_a_segment_has_the_log_probabilities_that_the_actor_itself_would_have_sent(name: str) -> None:
    experience, arrays = CASES[name]
    spec = experience.observation
    desk = Desk(experience, arrays)
    names = [f"actor-{number}" for number in range(12)]
    observations = [
        RANDOM.integers(0, 255, (12, *spec.shape)).astype(np.uint8)
        if spec.dtype == "uint8"
        else RANDOM.uniform(-1, 1, (12, *spec.shape)).astype(np.float32)
        for _ in range(3)
    ]
    taken = []
    for step, batch in enumerate(observations):
        ended = {"truncated": True} if step == 2 else {}
        taken.append(desk.act(dict(zip(names, [row.tobytes() for row in batch], strict=True)), step, **ended))
    desk.inference.close()
    assert all(answer.action is None and not answer.reason for answer in taken[2].values())
    assert len(desk.segments) == 12
    assert not getattr(desk.inference._policy, "_noises", {})
    for index, segment in enumerate(desk.segments):
        policy = make_policy(experience.policy, 0, names[index], experience.action.shape)
        policy.load(7, arrays)
        for step in range(2):
            np.testing.assert_array_equal(segment.observations[step], observations[step][index])
            answered = np.array(taken[step][names[index]].action, experience.action.numpy_dtype())
            np.testing.assert_array_equal(segment.actions[step].ravel(), answered.ravel())
            expected = find_log_probability(policy, observations[step][index], segment.actions[step])
            np.testing.assert_allclose(segment.log_probabilities[step], expected, rtol=1e-3, atol=1e-4)
        assert segment.versions.tolist() == [7, 7]
        assert (segment.episode_return, segment.episode_length, segment.truncated) == (3.0, 2, True)


def find_log_probability(policy: object, observation: np.ndarray, action: np.ndarray) -> float:
    """That of an action, as the actor's policy gives it when it samples the same one; a density by its own formula."""
    from shoal.actor.policy import MlpPolicy, SquashedGaussianPolicy

    assert isinstance(policy, MlpPolicy)
    if isinstance(policy, SquashedGaussianPolicy):
        (weight, bias) = policy._layers[0]
        outputs = (weight @ observation + bias).astype(np.float64)
        means, log_stds = outputs[:2], np.clip(outputs[2:], -20, 2)
        low, high = np.array([-2.0, 0.0]), np.array([1.0, 1.0])
        y = np.clip((action - (low + high) / 2) / ((high - low) / 2), -1 + 1e-6, 1 - 1e-6)
        noise = (np.arctanh(y) - means) / np.exp(log_stds)
        return float(-0.5 * (noise**2).sum() - log_stds.sum() - math.log(2 * math.pi))
    for _ in range(100_000):
        sampled, log_probability = policy.act(observation)
        if np.array_equal(np.asarray(sampled), action):
            return log_probability
    raise AssertionError("the actor's policy never takes this action")


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_the_state_of_a_recurrent_policy_stays_here_and_is_that_of_an_actor(core: str) -> None:
    size, gates = 5, NUM_GATES[core]
    policy_spec = PolicySpec("recurrent_categorical", "tanh", LAYERS, core=core, core_tensors=("x", "h", "bx", "bh"))
    state = ExtraSpec(STATE, TensorSpec("float32", (size if core == "gru" else 2 * size,)), "segment")
    experience = ExperienceSpec(FLAT, TensorSpec("int64", (), 0, 2), 4, policy_spec, (state,))
    arrays = {
        **dense(3, size),
        "x": RANDOM.normal(size=(gates * size, 4)).astype(np.float32),
        "h": RANDOM.normal(size=(gates * size, size)).astype(np.float32),
        "bx": RANDOM.normal(size=gates * size).astype(np.float32),
        "bh": RANDOM.normal(size=gates * size).astype(np.float32),
    }
    desk = Desk(experience, arrays)
    observations = RANDOM.uniform(-1, 1, (2, 7, 4)).astype(np.float32)  # of two actors, whose episodes take 6 steps
    for step in range(7):
        rows = {f"a-{index}": observations[index, step].tobytes() for index in range(2)}
        desk.act(rows, step, **({"terminated": True} if step == 6 else {}))
    desk.inference.close()
    assert not desk.inference._policy._states  # type: ignore[union-attr]
    segments = {float(segment.observations[0, 0]): segment for segment in desk.segments}
    assert [segment.num_steps for segment in desk.segments] == [4, 4, 2, 2]
    for index in range(2):
        policy = make_policy(policy_spec, 0)
        assert isinstance(policy, RecurrentPolicy)
        policy.load(7, arrays)
        for step in range(6):
            segment = segments[float(observations[index, step - step % 4, 0])]
            if step % 4 == 0:
                found, expected = segment.extras[STATE], policy.get_extras()[STATE]
                np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
            logits = arrays["w"] @ policy._step(observations[index, step][None], [0])[0] + arrays["b"]
            log_all = logits - np.log(np.exp(logits).sum())
            action = int(segment.actions[step % 4])
            np.testing.assert_allclose(segment.log_probabilities[step % 4], log_all[action], rtol=1e-4, atol=1e-5)
