"""A network of the user's own: its contract, its graph against torch, and what is refused before a run starts."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from rl_setting import segment
from shoal.actor.policy import make_policy
from shoal.actor.policy_networks import GraphNetwork
from shoal.errors import ConfigError, WeightsError
from shoal.flows.rl_policy import describe_policy_model
from shoal.plugins.find import load_reference
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec

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


def arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_an_actor_computes_what_the_learner_has_learned(case: str, tmp_path: Path) -> None:
    """After a batch, by new tensors alone. Tolerance: float32 in another order, tanh's inverse of rounded actions."""
    spec, experience = make_case(tmp_path, case)
    policy = make_policy(experience.policy, 0, action_shape=experience.action.shape)
    algorithm, random = make_algorithm(spec, experience), np.random.default_rng(0)
    shape, dtype = experience.observation.shape, experience.observation.numpy_dtype()
    seen = random.integers(0, 2, (9, *shape)).astype(dtype)
    policy.load(1, arrays(algorithm.model))
    taken = np.array([policy.act(each)[0] for each in seen[:8]])
    batch = ExperienceBatch.from_segments(1, [segment(8, observations=seen, actions=taken)] * 4)
    before = {name: each.copy() for name, each in arrays(algorithm.model).items()}
    assert list(algorithm.update(batch))
    assert any((each != before[name]).any() for name, each in arrays(algorithm.model).items())
    policy.load(2, arrays(algorithm.model))
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
    policy, tensors = make_policy(experience.policy, 0), arrays(make_algorithm(spec, experience).model)
    policy.load(1, tensors)
    changed = {**tensors, "network.module.first.weight": change}
    with pytest.raises(WeightsError, match=r"network\.module\.first\.weight"):
        policy.load(2, {name: each for name, each in changed.items() if each is not None})
    assert policy.version == 1
    policy.act(np.zeros(6, np.float32))
