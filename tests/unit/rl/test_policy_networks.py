"""Networks of policies beside the perceptron: convolutions over frames, and the user's own; the actor's against the
learner's."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from registered import arrays_of
from rl_setting import segment
from shoal.actor.policy import make_policy
from shoal.actor.policy_networks import GraphNetwork, compute_features, load_kernels
from shoal.errors import ConfigError, WeightsError
from shoal.flows.rl_policy import describe_policy_model
from shoal.models.actor_critic import ActorCritic
from shoal.plugins.find import load_reference
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.algorithms.segments import to_tensors
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec, network_kwargs
from shoal.wire import ExperienceSpec, MessageLimits, decode, pack_segment, unpack_segment

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


@pytest.mark.parametrize("shape", [(10, 10, 4), (4, 84, 84), (21, 30, 3), (1, 7, 5), (3, 3, 3)])
def test_an_actor_computes_what_the_learners_network_does(shape: tuple[int, ...]) -> None:
    """Tolerance: sums of a few hundred float32 products in another order."""
    experience = describe(*shape)
    model = make_model(experience)
    frame = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    policy = make_policy(experience.policy, 0)
    policy.load(1, arrays_of(model))
    with torch.no_grad():
        features = model.encoder(torch.from_numpy(frame)[None])[0].numpy()
        logits, _ = model(torch.from_numpy(frame)[None])
    found = compute_features(frame[None], experience.policy, load_kernels(experience.policy, 1, arrays_of(model)))[0]
    np.testing.assert_allclose(found, features, rtol=1e-4, atol=1e-4)
    action, log_probability = policy.act(frame)
    assert log_probability == pytest.approx(torch.log_softmax(logits, -1)[0, action].item(), abs=1e-3)


def test_a_layer_is_that_of_the_page() -> None:
    """The sum of the protocol's page, number by number."""
    experience = describe(12, 12, 2)
    model, x = make_model(experience), np.random.default_rng(1).integers(0, 256, (12, 12, 2), np.uint8)
    x = (x * np.float32(1 / 255)).transpose(2, 0, 1)
    tensors = arrays_of(model)
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
    policy.load(1, arrays_of(algorithm.model))
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
    tensors = {**arrays_of(make_model(experience)), "encoder.layers.0.weight": change}
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


# -- a network of the user's own: its contract, its graph against torch, and what is refused


HEAD = "import math\nimport torch\nfrom torch import nn\n"
NETWORKS = HEAD + (
    """
class Base(nn.Module):
    def __init__(self, observation_shape, num_actions, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(math.prod(observation_shape))
        self.trunk = nn.Linear(math.prod(observation_shape), hidden[0])
        self.dropout = nn.Dropout(0.5)
        self.first, self.second = nn.Linear(hidden[0], num_actions), nn.Linear(hidden[0], num_actions)
        self.value = nn.Linear(hidden[0], 1)
        self.register_buffer("scale", torch.tensor(0.5))

    def features(self, x):
        return self.dropout(nn.functional.silu(self.trunk(self.norm(x.flatten(1))))) * self.scale

class Critic(Base):
    def forward(self, x):
        h = self.features(x)
        return self.first(h), self.value(h).squeeze(-1)

class Gaussian(Base):
    def forward(self, x):
        h = self.features(x)
        return self.first(h), self.second(h), self.value(h).squeeze(-1)

class Values(Base):
    def forward(self, x):
        return self.first(self.features(x))

class Actor(Base):
    def forward(self, x):
        h = self.features(x)
        return self.first(h), self.second(h)

class Convolutional(nn.Module):
    def __init__(self, num_actions):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, num_actions))
        self.value = nn.Linear(64, 1)

    def forward(self, x):
        return self.layers(x.permute(0, 3, 1, 2) / 255), self.value(x.flatten(1) / 255).squeeze(-1)
"""
)
FLAT, FRAME = Box(-2, 2, (6,), np.float32), Box(0, 255, (8, 8, 1), np.uint8)
CASES = {
    "impala": ("Critic", FLAT, Discrete(3)),
    "ppo": ("Gaussian", Box(-1, 1, (2, 3), np.float64), Box(-2, 2, (2,))),
    "ppo of several choices": ("Critic", FLAT, MultiDiscrete([2, 3])),
    "impala of frames": ("Convolutional", FRAME, Discrete(4)),
    "dqn": ("Values", Box(0, 255, (4, 4), np.uint8), Discrete(3)),
    "sac": ("Actor", FLAT, Box(-1, 3, (2, 2))),
    "sac of frames": ("Actor", FRAME, Box(-1, 1, (1,))),
}


def make_spec(folder: Path, text: str, name: str, *words: str) -> RLSpec:
    (folder / "my_net.py").write_text(text)
    return RLSpec(segment_length=8, hidden=(16,)).override([f"model={folder}/my_net.py:{name}", *words])


def make_case(folder: Path, case: str) -> tuple[RLSpec, ExperienceSpec]:
    name, observations, actions = CASES[case]
    algorithm = case.split()[0]
    words = [f"algorithm={algorithm}"]
    if algorithm in ("dqn", "sac"):
        words += ["algorithm.learning_starts=1", "algorithm.batch_size=4", "algorithm.replay_mb=1"]
        words += ["algorithm.updates_per_step=0.1" if algorithm == "sac" else "algorithm.samples_per_insert=0.5"]
    spec = make_spec(folder, NETWORKS, name, *words)
    return spec, experience_spec(observations, actions, spec)


@pytest.mark.parametrize("case", CASES)
def test_an_actor_computes_what_the_learner_has_learned(case: str, tmp_path: Path) -> None:
    """After a batch, by new tensors alone. Tolerance: float32 in another order, tanh's inverse of rounded actions."""
    spec, experience = make_case(tmp_path, case)
    policy = make_policy(experience.policy, 0, action_shape=experience.action.shape)
    algorithm, random = make_algorithm(spec, experience), np.random.default_rng(0)
    shape, dtype = experience.observation.shape, experience.observation.numpy_dtype()
    seen = random.integers(0, 2, (9, *shape)).astype(dtype)
    policy.load(1, arrays_of(algorithm.model))
    taken = np.array([policy.act(each)[0] for each in seen[:8]])
    batch = ExperienceBatch.from_segments(1, [segment(8, observations=seen, actions=taken)] * 4)
    before = {name: each.copy() for name, each in arrays_of(algorithm.model).items()}
    assert list(algorithm.update(batch))
    assert any((each != before[name]).any() for name, each in arrays_of(algorithm.model).items())
    policy.load(2, arrays_of(algorithm.model))
    with torch.no_grad():
        found = algorithm.model(torch.from_numpy(seen[:1]))
    outputs = found[0] if isinstance(found, tuple) else found
    if spec.algorithm.name == "dqn":
        policy._base = 1e-12
        assert policy.act(seen[0])[0] == outputs.argmax().item()
        return
    action, log_probability = policy.act(seen[0])
    expected, _ = algorithm.model.distribution.evaluate(outputs, torch.from_numpy(np.array(action)[None]))
    assert log_probability == pytest.approx(expected.item(), abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_it_is_served_from_the_record_alone(case: str, tmp_path: Path) -> None:
    """Without the file, as another process, the registry or a later year has it."""
    spec, experience = make_case(tmp_path, case)
    (tmp_path / "my_net.py").unlink()
    again = RLSpec.from_yaml(spec.to_yaml())
    assert again == spec
    factory, signature = describe_policy_model(again, experience)
    model = load_reference(factory.factory)(**msgspec.json.decode(msgspec.json.encode(factory.kwargs)))
    answers = model.predict(torch.zeros(2, *experience.observation.shape))
    assert [*answers] == [each.name for each in signature.outputs]
    for each in signature.outputs:
        assert [2, *each.shape[1:]] == list(answers[each.name].shape)


def test_the_run_keeps_the_text_that_it_began_with(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, NETWORKS, "Critic")
    (tmp_path / "my_net.py").write_text("changed")
    assert spec.override(["segment_length=4"]).model == spec.model


def test_an_installed_module_is_taken_by_its_name() -> None:
    spec = RLSpec().override(["model=shoal.models.lenet:LeNet"])
    assert spec.model is not None
    assert spec.model.source == ""
    with pytest.raises(ConfigError, match="forward"):
        experience_spec(FLAT, Discrete(2), spec)


def write(forward: str, init: str = "") -> str:
    return HEAD + (
        "class Net(nn.Module):\n    def __init__(self, observation_size, num_actions):\n        super().__init__()\n"
        "        self.a, self.v = nn.Linear(observation_size, num_actions), nn.Linear(observation_size, 1)\n"
        f"        {init}\n    def forward(self, x):\n        {forward}\n"
    )


VALUE = "self.v(x).squeeze(-1)"
REFUSED = {
    "no such file": (None, "there is no such file"),
    "no class": ("x = 1", "there is no class 'Net' in it"),
    "does not run": ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    "no module": ("class Net: pass", "gives a Net"),
    "other arguments": (HEAD + "class Net(nn.Module):\n    def __init__(self, width): pass", "observation_shape"),
    "raises": (write("return 1 / 0"), "forward raised ZeroDivisionError"),
    "no value": (write("return self.a(x)"), r"forward gives a Tensor, expected \(outputs, value\)"),
    "a wide value": (write("return self.a(x), self.v(x)"), r"its value are torch.float32 \[3, 1\]. give float32 \[3\]"),
    "few logits": (write(f"return self.a(x)[:, 1:], {VALUE}"), r"its outputs are torch.float32 \[3, 2\]"),
    "double": (write(f"return self.a(x), {VALUE}", "self.double()"), "is torch.float64. make it float32"),
    "frozen": (write(f"return self.a(x), {VALUE}", "self.requires_grad_(False)"), "has no parameter to learn"),
    "not finite": (write(f"return self.a(x) / 0, {VALUE}"), "are not finite"),
    "random": (write(f"return self.a(x) + torch.randn(3), {VALUE}"), "differ from torch's"),
    "of the batch": (write(f"return self.a(x - x.mean(0)), {VALUE}"), "differ from torch's"),
    "branches": (write(f"return (self.a(x) if x.sum() else -9 - self.a(x)), {VALUE}"), "differ from torch's"),
    "no operation of ONNX": (write(f"return self.a(torch.special.i1(x)), {VALUE}"), "torch.onnx cannot export it"),
    "large constants": (
        write(f"return self.a(x) + (self.c * x[:, :1]).sum(-1, True), {VALUE}", "self.c = torch.zeros(2**22)"),
        "make its constants parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_keep_the_contract_is_refused_by_name(case: str, tmp_path: Path) -> None:
    text, problem = REFUSED[case]
    if text is not None:
        (tmp_path / "my_net.py").write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        experience_spec(FLAT, Discrete(3), RLSpec().override([f"model={tmp_path}/my_net.py:Net"]))
    assert caught.value.field == "model"


@pytest.mark.parametrize("word", ["my_net.py", "my_net", "my net:Net", ":Net"])
def test_a_word_without_a_class_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(ConfigError, match=r"my_net\.py:Net"):
        RLSpec().override([f"model={word}"])


def test_a_box_of_any_rank_needs_a_network_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes a Box of any rank: model=my_net\.py:Net"):
        experience_spec(Box(0, 1, (4, 4)), Discrete(3), RLSpec())
    spec = make_spec(tmp_path, NETWORKS, "Critic")
    assert experience_spec(Box(0, 1, (2, 3, 2, 2)), Discrete(3), spec).policy.kind == "graph_categorical"


@pytest.mark.parametrize("words", [["algorithm=r2d2"], ["algorithm=r2d2", "core=lstm"]])
def test_a_network_of_ones_own_has_no_core(words: list[str], tmp_path: Path) -> None:
    spec = make_spec(tmp_path, NETWORKS, "Values", *words)
    with pytest.raises(ConfigError, match=r"no place for a recurrent core.*algorithm=dqn"):
        experience_spec(FLAT, Discrete(3), spec)


def test_an_actor_without_onnxruntime_is_told_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    _, experience = make_case(tmp_path, "impala")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs onnxruntime .* pip install 'CHECKOUT\[onnx\]'"):
        make_policy(experience.policy)


def test_a_graph_that_onnxruntime_refuses_is_an_error_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"onnxruntime [\d.]+ refuses the graph"):
        GraphNetwork(b"no graph")


@pytest.mark.parametrize("change", [None, np.zeros((3, 16), np.float64), np.zeros((16, 3), np.float32)])
def test_weights_that_do_not_fit_leave_the_old_ones(change: np.ndarray | None, tmp_path: Path) -> None:
    spec, experience = make_case(tmp_path, "impala")
    policy, tensors = make_policy(experience.policy, 0), arrays_of(make_algorithm(spec, experience).model)
    policy.load(1, tensors)
    changed = {**tensors, "network.module.first.weight": change}
    with pytest.raises(WeightsError, match=r"network\.module\.first\.weight"):
        policy.load(2, {name: each for name, each in changed.items() if each is not None})
    assert policy.version == 1
    policy.act(np.zeros(6, np.float32))
