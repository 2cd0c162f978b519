"""Members as lanes of a vector equal the same members alone: outputs, gradients, running statistics."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Literal

import pytest
import torch
from member_case import loss, make_batches, make_model, make_small_convolution, train_alone
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import ConfigError
from shoal.libs.population import Population
from shoal.libs.population.engines.engine import EngineMisfit
from shoal.libs.population.engines.lanes.lane_network import LaneNetwork, load_kernels
from shoal.libs.population.engines.lanes.layer_graph import read_layer_graph
from shoal.models.lenet import LeNet

QUICK = ("-O1",)  # compiles in half of the time; the results are the same but for their last digits
TOLERANCE = 1e-4  # of the largest number: float32, sums in another order, behind several batch norms


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of all tests of this file: what one has compiled serves the others."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def shared_libraries(shoal_home: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(libraries))


def build_members(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    models = [make() for _ in range(count)]
    for model in models:
        for name, each in [*model.named_parameters(), *model.named_buffers()]:
            if "running_var" in name:
                each.data.uniform_(0.5, 2)
            elif each.dim() == 1 and each.is_floating_point():
                each.data.add_(torch.randn(each.shape) * 0.3)
    return models


def stack(models: list[nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers [k, ...], copies."""
    parameters = [dict(model.named_parameters()) for model in models]
    buffers = [dict(model.named_buffers()) for model in models]
    return (
        {name: torch.stack([each[name].detach() for each in parameters]).requires_grad_() for name in parameters[0]},
        {name: torch.stack([each[name] for each in buffers]) for name in buffers[0]},
    )


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(index) for index in range(count)]


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    difference, largest = (found - expected).abs().max(), expected.abs().max()
    assert difference <= TOLERANCE * (largest + 1e-2), f"{what}: {difference:.1e} of {largest:.1e}"


def check_members(network: LaneNetwork, models: list[nn.Module], inputs: Tensor, is_own: bool = False) -> None:
    """Two passes in training, so that no workspace remembers the first, and an evaluation."""
    k = len(models)
    parameters, buffers = stack(models)
    evaluated = network.forward(parameters, buffers, inputs, is_own=is_own, generators=None)
    for step in range(2):
        outputs = network.forward(parameters, buffers, inputs, is_own=is_own, generators=generators(k))
        slopes = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(step))
        found = dict(zip(parameters, torch.autograd.grad((outputs * slopes).sum(), parameters.values()), strict=True))
        for index, model in enumerate(models):
            samples = inputs[index] if is_own else inputs
            if step == 0:
                assert_equal(evaluated[index], model.eval()(samples), "evaluation")
            model.train().zero_grad()
            expected = model(samples)
            (expected * slopes[index]).sum().backward()
            assert_equal(outputs[index], expected, "outputs")
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                if not is_before_norm(model, name):
                    assert_equal(found[name][index], parameter.grad, name)
            for name, buffer in model.named_buffers():
                assert_equal(buffers[name][index].float(), buffer.float(), name)


def is_before_norm(model: nn.Module, name: str) -> bool:
    """Whether it is a bias that batch norm takes away: its gradient is zero but for rounding."""
    layers = list(model.children())
    index = [f"{each}.bias" for each, _ in model.named_children()]
    at = index.index(name) if name in index else -1
    follows = layers[at + 1 : at + 2]
    return at >= 0 and bool(follows) and isinstance(follows[0], nn.BatchNorm1d | nn.BatchNorm2d)


@pytest.fixture(scope="module")
def lenet(libraries: Path) -> LaneNetwork:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(libraries))
        return LaneNetwork(LeNet(), torch.zeros(1, 1, 28, 28), QUICK)


@pytest.mark.parametrize("k", [1, 3, None, 11], ids=["one", "three", "all lanes", "more than lanes"])
def test_lenet_equals_its_members_alone(lenet: LaneNetwork, k: int | None) -> None:
    k = k or lenet.num_lanes
    check_members(lenet, build_members(LeNet, k), torch.randn(4, 1, 28, 28))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm and pooling": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(5, 7, 3, padding=1, bias=False), nn.BatchNorm2d(7, momentum=None), nn.ReLU()),
            *(nn.Conv2d(7, 4, 3), nn.BatchNorm2d(4, affine=False), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)),
        ),
        (3, 10, 8),
    ),
    "strides and odd kernels": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, (3, 5), stride=(2, 3), padding=(1, 2)), nn.ReLU()),
            *(nn.Conv2d(3, 6, (2, 1), stride=1), nn.ReLU()),
            *(nn.Conv2d(6, 5, 4, stride=2, padding=3), nn.Tanh(), nn.Conv2d(5, 2, 1)),
        ),
        (2, 13, 17),
    ),
    "poolings": (
        lambda: nn.Sequential(
            *(nn.MaxPool2d(2), nn.Conv2d(1, 4, 3, padding=2), nn.MaxPool2d(3, 2, padding=1), nn.Sigmoid()),
            *(nn.AvgPool2d(3, 1, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2)),
            *(nn.GELU(), nn.AvgPool2d(2), nn.SiLU(), nn.Flatten(), nn.Linear(3, 2), nn.GELU()),
        ),
        (1, 21, 19),
    ),
    "norm first": (
        lambda: nn.Sequential(
            *(nn.BatchNorm2d(2), nn.Conv2d(2, 13, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(13), nn.MaxPool2d(2, 1)),
            *(nn.ReLU(), nn.Conv2d(13, 17, 3, padding=1), nn.BatchNorm2d(17), nn.SiLU()),
        ),
        (2, 5, 6),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_equal_torch(name: str) -> None:
    make, shape = NETWORKS[name]
    network = LaneNetwork(make(), torch.zeros(1, *shape), QUICK)
    check_members(network, build_members(make, 3), torch.randn(5, *shape))
    check_members(network, build_members(make, 3), torch.randn(3, 4, *shape), is_own=True)
    check_members(network, build_members(make, network.num_lanes + 1), torch.randn(6, *shape))


@pytest.mark.soak
@pytest.mark.parametrize("width", [4, 16])
def test_vectors_of_other_cpus(width: int) -> None:
    make, shape = NETWORKS["norm and pooling"]
    network = LaneNetwork(make(), torch.zeros(1, *shape), (*QUICK, f"-DSHOAL_LANES={width}"))
    assert network.num_lanes == width
    check_members(network, build_members(make, 5), torch.randn(5, *shape))


def test_a_nan_member_leaves_the_others_untouched_to_the_bit(lenet: LaneNetwork) -> None:
    models = build_members(LeNet, 4)
    inputs, slopes = torch.randn(2, 1, 28, 28), torch.randn(4, 2, 10)
    found = []
    for is_broken in (False, True):
        parameters, _ = stack(models)
        if is_broken:
            with torch.no_grad():
                parameters["conv1.weight"][1, 2, 0, 2, 2] = float("nan")
                parameters["conv2.bias"][1] = float("inf")
        outputs = lenet.forward(parameters, {}, inputs, generators=generators(4))
        found.append([outputs, *torch.autograd.grad((outputs * slopes).sum(), parameters.values())])
    others = torch.tensor([0, 2, 3])
    for healthy, broken in zip(*found, strict=True):
        assert torch.equal(healthy[others], broken[others])
    broken = models[1]
    with torch.no_grad():
        for name, parameter in broken.named_parameters():
            parameter.copy_(parameters[name][1])
    expected = broken(inputs)
    gradients = torch.autograd.grad((expected * slopes[1]).sum(), broken.parameters())
    for one, other in zip(found[1], [expected, *gradients], strict=True):
        torch.testing.assert_close(one[1], other, rtol=1e-4, atol=1e-5, equal_nan=True)


class Functional(nn.Module):
    """A straight line in functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.output = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.first(x)), (1, 2))
        x = functional.avg_pool2d(torch.tanh(self.second(x)), kernel_size=2, stride=(1, 1), padding=1)
        x = functional.adaptive_avg_pool2d(x.relu(), (4, 1)).view(x.size(0), -1)
        output: Tensor = self.output(torch.sigmoid(x))
        return output


def test_functions_and_methods_are_layers() -> None:
    network = LaneNetwork(Functional(), torch.zeros(1, 1, 3, 4), QUICK)
    check_members(network, build_members(Functional, 2), torch.randn(3, 1, 3, 4))


@pytest.mark.parametrize("order", ["shared", "own"])
def test_members_of_a_population_equal_solo_runs(order: Literal["shared", "own"]) -> None:
    factory, rates = partial(make_small_convolution, 0.4), [0.05, 0.1, 0.02]
    batches = make_batches(4, *([3] if order == "own" else []), 6)
    values = {"optimizer.learning_rate": rates}
    with Population(
        factory, loss, members=3, seed=5, threads=1, hyper_parameters=values, order=order, engine="lanes", chunk=3
    ) as population:
        losses = torch.stack([population.step(batch) for batch in batches], 1)
        states = [population.member_state_dict(member) for member in range(3)]
    for member, rate in enumerate(rates):
        model, generator = make_model(factory, 5 + member), torch.Generator().manual_seed(5 + member)
        own = batches if order == "shared" else [(inputs[member], classes[member]) for inputs, classes in batches]
        alone = train_alone(model, own, "sgd", generator, {"lr": rate})
        torch.testing.assert_close(losses[member], alone, rtol=1e-4, atol=1e-5)
        for name, value in states[member].items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


class Skipping(nn.Module):
    """No chain."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        sum_: Tensor = x + self.layer(x)
        return sum_


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Conv2d(2, 4, 3, groups=2)], "because layer 0 has groups"),
        ([nn.Conv2d(2, 4, 3, dilation=2)], "because layer 0 is dilated"),
        ([nn.Conv2d(2, 4, 3), nn.Softmax(1)], "because layer 1 is a Softmax"),
        ([nn.Conv2d(2, 4, 9)], "because layer 0 has a kernel of [9, 9], larger than its image of [8, 8]"),
        ([nn.Conv2d(2, 4, 3), nn.MaxPool2d(4, ceil_mode=True)], "because layer 1 rounds its size up (ceil_mode)"),
        ([nn.Flatten(), nn.Linear(128, 4)], "because it has no convolution"),
        ([nn.BatchNorm2d(2, track_running_stats=False)], "because layer 0 has no running statistics"),
        ([nn.Conv2d(2, 2, 3), Skipping()], "because layer add does not follow the layer before it alone"),
    ],
)
def test_a_model_that_does_not_fit_says_why(layers: list[nn.Module], reason: str) -> None:
    with pytest.raises(EngineMisfit, match=re.escape(reason)):
        LaneNetwork(nn.Sequential(*layers), torch.zeros(1, 2, 8, 8))


def test_inputs_of_another_shape_or_type_are_an_error(lenet: LaneNetwork) -> None:
    parameters, buffers = stack(build_members(LeNet, 1))
    for inputs in (torch.zeros(2, 1, 28, 27), torch.zeros(2, 1, 28, 28, dtype=torch.float64)):
        with pytest.raises(ValueError, match="are no float32 samples"):
            lenet.forward(parameters, buffers, inputs, generators=None)


def test_gradients_are_found_twice_where_the_graph_is_retained(lenet: LaneNetwork) -> None:
    parameters, buffers = stack(build_members(LeNet, 2))
    outputs = lenet.forward(parameters, buffers, torch.randn(2, 1, 28, 28), generators=generators(2)).sum()
    other = lenet.forward(parameters, buffers, torch.randn(2, 1, 28, 28), generators=generators(2)).sum()
    first = torch.autograd.grad(outputs, parameters.values(), retain_graph=True)
    torch.autograd.grad(other, parameters.values())
    second = torch.autograd.grad(outputs, parameters.values())
    assert all(map(torch.equal, first, second))


class Penalty:
    """The slope of outputs by the inputs, which `inputs` makes and `loss` needs."""

    def inputs(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor]:
        self.x = batch[0].clone().requires_grad_()
        return (self.x,)

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.sum(), self.x, create_graph=True)
        return loss(outputs, batch) + slope.square().sum()


def test_members_with_a_gradient_penalty_are_no_lanes() -> None:
    (batch,) = make_batches(1, 6)
    penalty = Penalty()
    steps = {}
    for engine in ("auto", "looped", "vmap"):
        settings: dict[str, Any] = {"members": 3, "threads": 1, "inputs": penalty.inputs, "engine": engine}
        with Population(make_small_convolution, penalty.loss, **settings) as population:
            population.step(batch)
            steps[engine] = [population.member_state_dict(member) for member in range(3)]
            choice = population.choice
        if engine == "auto":
            assert "its inputs need gradients" in choice.reasons["lanes"]
    for engine in ("auto", "vmap"):
        torch.testing.assert_close(steps[engine], steps["looped"])
    settings["engine"] = "lanes"
    with (
        Population(make_small_convolution, penalty.loss, **settings) as population,
        pytest.raises(ConfigError, match="its inputs need gradients: engine=auto takes another"),
    ):
        population.step(batch)


def test_a_model_in_double_precision_does_not_fit() -> None:
    with pytest.raises(EngineMisfit, match="not all float32"):
        LaneNetwork(LeNet().double(), torch.zeros(1, 1, 28, 28, dtype=torch.float64))


def test_without_a_compiler_members_are_looped_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with Population(make_small_convolution, loss, members=2, threads=1) as population:
        population.step(make_batches(1, 4)[0])
        choice = population.choice
    assert choice.engine == "looped"
    assert "there is no C++ compiler: install g++, or set CXX" in choice.reasons["lanes"]


def test_a_compiler_that_is_missing_or_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "nocompiler -x")
    with pytest.raises(EngineMisfit, match="CXX = 'nocompiler -x' is no program"):
        load_kernels("")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(EngineMisfit, match="the compiler failed: false"):
        load_kernels("int x;")


def test_a_library_is_compiled_once(shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(shoal_home))
    source = 'extern "C" int answer() { return 42; }'
    assert load_kernels(source).answer() == 42
    compiled = list((shoal_home / "kernels").glob("*.so"))
    before = compiled[0].stat().st_mtime_ns
    assert load_kernels(source).answer() == 42
    assert list((shoal_home / "kernels").glob("*.so")) == compiled
    assert compiled[0].stat().st_mtime_ns == before


def test_threads_build_networks_while_others_call_modules() -> None:
    """fx.Tracer would record the calls of other threads."""
    model = LeNet()
    samples = torch.zeros(1, 1, 28, 28)
    is_done = Event()

    def call() -> int:
        count = 0
        while not is_done.is_set():
            model(samples)
            count += 1
        return count

    with ThreadPoolExecutor(3) as threads:
        calls = threads.submit(call)
        chains = [threads.submit(lambda: [read_layer_graph(LeNet(), (1, 28, 28)) for _ in range(20)]) for _ in range(2)]
        try:
            found = [each for chain in chains for each in chain.result()]
        finally:
            is_done.set()
        assert calls.result() > 0
    assert all(each == found[0] for each in found)
