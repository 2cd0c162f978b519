"""Frames of bytes: the actor's convolutions against the learner's, the spec, and what travels."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rl_setting import segment
from shoal.actor.policy import make_policy
from shoal.actor.policy_networks import compute_features, load_kernels
from shoal.errors import ConfigError, WeightsError
from shoal.flows.rl_policy import describe_policy_model
from shoal.models.actor_critic import ActorCritic
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.algorithms.segments import to_tensors
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec, network_kwargs
from shoal.wire import MessageLimits, decode, pack_segment, unpack_segment

SPEC = RLSpec(hidden=(8,), segment_length=8)


def describe(*shape: int, dtype: type = np.uint8):
    return experience_spec(Box(0, 255, shape, dtype), Discrete(3), SPEC)


def make_model(experience) -> ActorCritic:
    torch.manual_seed(2)
    model = ActorCritic(**network_kwargs(SPEC, experience))
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.normal_(0.0, 0.5)
        for layer in model.encoder.layers:
            layer.bias.normal_(0.0, 0.3)
    return model


def arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("shape", [(10, 10, 4), (4, 84, 84), (21, 30, 3), (1, 7, 5), (3, 3, 3)])
def test_an_actor_computes_what_the_learners_network_does(shape: tuple[int, ...]) -> None:
    """Tolerance: sums of a few hundred float32 products in another order."""
    experience = describe(*shape)
    model = make_model(experience)
    frame = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    policy = make_policy(experience.policy, 0)
    policy.load(1, arrays(model))
    with torch.no_grad():
        features = model.encoder(torch.from_numpy(frame)[None])[0].numpy()
        logits, _ = model(torch.from_numpy(frame)[None])
    found = compute_features(frame[None], experience.policy, load_kernels(experience.policy, 1, arrays(model)))[0]
    np.testing.assert_allclose(found, features, rtol=1e-4, atol=1e-4)
    action, log_probability = policy.act(frame)
    assert log_probability == pytest.approx(torch.log_softmax(logits, -1)[0, action].item(), abs=1e-3)


def test_a_layer_is_that_of_the_page() -> None:
    """The sum of the protocol's page, number by number."""
    experience = describe(12, 12, 2)
    model, x = make_model(experience), np.random.default_rng(1).integers(0, 256, (12, 12, 2), np.uint8)
    x = (x * np.float32(1 / 255)).transpose(2, 0, 1)
    tensors = arrays(model)
    for each in experience.policy.convolutions:
        weight = tensors[each.weight]
        bias = tensors[each.bias]
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
        size = weight.shape[2]
        side = (padded.shape[1] - size) // each.stride + 1
        y = np.empty((len(bias), side, side))
        for o, i, j in np.ndindex(*y.shape):
            rows, columns = i * each.stride, j * each.stride
            y[o, i, j] = bias[o] + (weight[o] * padded[:, rows : rows + size, columns : columns + size]).sum()
        x = np.maximum(0, x + y if each.residual else y)
    frame = np.random.default_rng(1).integers(0, 256, (12, 12, 2), np.uint8)
    found = compute_features(frame[None], experience.policy, load_kernels(experience.policy, 1, tensors))[0]
    np.testing.assert_allclose(found, x.ravel(), rtol=1e-4, atol=1e-4)


def test_frames_rest_as_bytes_until_they_enter_the_network() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 10, 10, 4), np.uint8)
    sent = pack_segment(segment(8, observations=frames), 0)
    received = unpack_segment(decode(sent, MessageLimits()), sent[1:], describe(10, 10, 4))  # type: ignore[arg-type]
    batch = to_tensors(ExperienceBatch.from_segments(1, [received]))
    assert batch.observations.dtype == torch.uint8
    np.testing.assert_array_equal(batch.observations, frames)
    logits, values = make_model(describe(10, 10, 4))(batch.observations)
    assert logits.shape == (9, 3)
    assert values.shape == (9,)


def test_bytes_are_scaled_to_1_and_floats_are_not() -> None:
    assert describe(10, 10, 4).policy.observation_scale == 1 / 255
    assert describe(10, 10, 4, dtype=np.float32).policy.observation_scale == 1.0
    assert describe(10, 10, 4).policy.channels_last
    assert not describe(4, 84, 84).policy.channels_last


@pytest.mark.parametrize("shape", [(), (4, 4), (2, 3, 4, 5), (0, 4, 4)])
def test_other_shapes_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="needs a flat Box"):
        describe(*shape)


@pytest.mark.parametrize(("name", "actions"), [("dqn", Discrete(3)), ("sac", Box(-1, 1, (2,)))])
def test_an_algorithm_with_a_replay_learns_from_frames_as_bytes(name: str, actions: Any) -> None:
    """Its replay holds bytes, a step of the optimizer moves the encoder, and an actor computes the same outputs."""
    spec = (
        RLSpec(hidden=(8,), segment_length=8)
        .override(
            [f"algorithm={name}", "algorithm.batch_size=16", "algorithm.learning_starts=1", "algorithm.replay_mb=1"]
        )
        .override(["algorithm.updates_per_step=0.1" if name == "sac" else "algorithm.samples_per_insert=1"])
    )
    experience = experience_spec(Box(0, 255, (12, 12, 2), np.uint8), actions, spec)
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (9, 12, 12, 2), np.uint8)
    taken = np.zeros(8, np.int64) if name == "dqn" else random.uniform(-1, 1, (8, 2)).astype(np.float32)
    batch = ExperienceBatch.from_segments(1, [segment(8, observations=frames, actions=taken)] * 4)
    algorithm = make_algorithm(spec, experience)
    before = {key: each.clone() for key, each in algorithm.model.state_dict().items()}
    for _ in range(2):  # at first SAC's policy is flat, and gives its encoder no gradient
        assert list(algorithm.update(batch))
    assert algorithm._replay._arrays["observations"].dtype == np.uint8
    assert not torch.equal(algorithm.model.encoder.layers[0].weight, before["encoder.layers.0.weight"])
    policy = make_policy(experience.policy, 0, action_shape=experience.action.shape)
    policy.load(1, {key: each.numpy() for key, each in algorithm.model.state_dict().items()})
    with torch.no_grad():
        outputs = algorithm.model(torch.from_numpy(frames[:1]))
    action, log_probability = policy.act(frames[0])
    if name == "sac":
        expected, _ = algorithm.model.distribution.evaluate(outputs, torch.from_numpy(action[None]))
        assert log_probability == pytest.approx(expected.item(), abs=1e-3)
    else:
        policy._base = 1e-12
        assert policy.act(frames[0])[0] == outputs.argmax().item()


@pytest.mark.parametrize("change", [None, np.zeros((16, 4, 3), np.float32), np.zeros((16, 4, 3, 2), np.float32)])
def test_kernels_that_do_not_fit_are_refused_by_name(change: np.ndarray | None) -> None:
    experience = describe(10, 10, 4)
    tensors = {**arrays(make_model(experience)), "encoder.layers.0.weight": change}
    policy = make_policy(experience.policy, 0)
    with pytest.raises(WeightsError, match=r"encoder\.layers\.0\.weight"):
        policy.load(1, {name: each for name, each in tensors.items() if each is not None})
    assert policy.version == 0


def test_an_endpoint_takes_frames() -> None:
    experience = describe(10, 10, 4)
    factory, signature = describe_policy_model(SPEC, experience)
    assert signature.inputs[0].shape == [-1, 10, 10, 4]
    model = ActorCritic(**msgspec.json.decode(msgspec.json.encode(factory.kwargs)))  # as the registry keeps them
    assert model.predict(torch.zeros(2, 10, 10, 4))["action"].shape == (2,)
