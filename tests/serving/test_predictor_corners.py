"""Networks and hooks that do what most do not: single numbers and bfloat16 as weights, hooks that write in place, and
weights that a module reaches by functions and lists."""

import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from registered import arrays_of, tensors
from shoal.errors import ConfigError, WeightsError
from shoal.registry import ModelFactory, Registry, Signature
from shoal.serve.model import predictor as predictor_module
from shoal.serve.model.formats.module import ModuleTemplate
from shoal.serve.model.formats.template import TemplateConfig
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

SIGNATURE = Signature(
    inputs=tensors(x=[-1, -1]),
    outputs=tensors(y=[-1, -1]),
)
ROWS = np.array([[1.0, 2.0, 3.0]], np.float32)
EMPTY = WeightSnapshot.of(1, {})


class Normed(nn.Module):
    """Batch normalisation counts its batches in a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.scale


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(torch.bfloat16)).float()


class Enclosed(nn.Module):
    """Python copies no function: that of a copy of this computes with the layer of the original."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.compute = lambda x: self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.compute(x)
        return y


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.seen = torch.zeros(1, 3)
        self.layer.register_forward_hook(lambda layer, inputs, output: setattr(self, "seen", output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        y: torch.Tensor = self.head(self.seen)
        return y


class Listed(nn.Module):
    """The list holds the parameters that there were before others took their place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.listed = [self.layer.weight, self.layer.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.listed)


class WeightNormed(nn.Module):
    """By the older of torch's two ways, which keeps a tensor that torch does not copy."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):
            self.layer = nn.utils.weight_norm(nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


class Watched(nn.Linear):
    weights: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.weights.add(self.weight)


def scale_in_place(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays["x"] /= 2
    return arrays


class Toil(nn.Module):
    """Takes 20 µs for each element, by a clock of its own, and keeps the shapes that it has seen."""

    shapes: ClassVar[list[tuple[int, ...]]] = []
    now_s: ClassVar[float] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Toil.now_s += 20e-6 * x.numel()
        self.shapes.append(tuple(x.shape))
        return x.cumsum(1)


def reversed_view(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"x": arrays["x"][..., ::-1]}


def predictor(module: str, shape: list[int], outputs: list[int] | None = None, **options: object) -> Predictor:
    signature = Signature(
        inputs=tensors(x=shape),
        outputs=tensors(y=outputs or shape),
    )
    factory = ModelFactory(factory=module if ":" in module else f"{__name__}:{module}")
    return Predictor(factory, signature, ModelOptions.parse({"max_batch_size": 4, **options}))


def test_a_number_among_the_weights_stays_one() -> None:
    module = Normed().eval()
    arrays = arrays_of(module)
    snapshot = WeightSnapshot.of(1, arrays)
    assert {name: value.shape for name, value in snapshot.tensors().items()} == {
        name: value.shape for name, value in arrays.items()
    }
    model = predictor("Normed", [-1, 3]).load(snapshot)
    expected = module(torch.from_numpy(ROWS)).detach().numpy()
    np.testing.assert_allclose(model.predict_batch([{"x": ROWS}])[0]["y"], expected, rtol=1e-6)


def versions_of(module: type[nn.Module]) -> list[tuple[nn.Module, WeightSnapshot]]:
    made = []
    for version in (1, 2):
        torch.manual_seed(version)
        network = module().eval()
        arrays = arrays_of(network)
        made.append((network, WeightSnapshot.of(version, arrays)))
    return made


@pytest.mark.parametrize("module", [Enclosed, Hooked, Listed, WeightNormed])
def test_however_a_module_reaches_its_weights_they_are_those_of_the_version(module: type[nn.Module]) -> None:
    subject = predictor(module.__name__, [-1, 3], [-1, 2])
    loaded = [(network, subject.load(snapshot)) for network, snapshot in versions_of(module)]
    for network, model in loaded:
        expected = network(torch.from_numpy(ROWS)).detach().numpy()
        np.testing.assert_allclose(model.predict_batch([{"x": ROWS}])[0]["y"], expected, rtol=1e-6)


def test_a_module_is_refused_where_its_weights_would_not_be_those_of_the_version() -> None:
    with pytest.raises(ConfigError, match="compile = True: is not for a module that keeps its weights in a list"):
        predictor("Listed", [-1, 3], [-1, 2], compile=True)
    signature = Signature(inputs=tensors(x=[-1, 3]), outputs=[])
    factory = ModelFactory(factory=f"{__name__}:Enclosed")
    setting = TemplateConfig(factory, signature, ModelOptions(cuda_graphs=True), device="cpu", torch_threads=1)
    with pytest.raises(ConfigError, match="cuda_graphs = True: is not for a module that functions within it hold"):
        ModuleTemplate(setting)


def test_what_versions_are_copied_from_holds_no_weights() -> None:
    subject = predictor("Watched", [-1, 3], [-1, 2])
    gc.collect()
    assert not [*Watched.weights]
    ((network, snapshot), _) = versions_of(Watched)
    expected = network(torch.from_numpy(ROWS)).detach().numpy()
    np.testing.assert_array_equal(subject.load(snapshot).predict_batch([{"x": ROWS}])[0]["y"], expected)


def test_bfloat16_weights_are_registered_and_served() -> None:
    """NumPy has no such numbers."""
    module = Narrow().eval()
    payload = safetensors.torch.save(module.state_dict())
    wanted = predictor("Narrow", [-1, 3], [-1, 2])
    factory = ModelFactory(factory=f"{__name__}:Narrow")
    version = Registry().register(
        "narrow", WeightSnapshot.from_payload(1, payload), model=factory, signature=wanted.signature
    )
    model = wanted.load(version.snapshot())
    expected = module(torch.from_numpy(ROWS)).detach().numpy()
    np.testing.assert_array_equal(model.predict_batch([{"x": ROWS}])[0]["y"], expected)
    with pytest.raises(WeightsError, match="not safetensors"):
        Registry().register(
            "narrow", WeightSnapshot.from_payload(1, payload[:-1]), model=factory, signature=wanted.signature
        )


def test_a_preprocessing_that_writes_in_place_writes_to_what_is_its_own() -> None:
    model = predictor("torch.nn:Identity", [-1, 3], preprocess=f"{__name__}:scale_in_place").load(EMPTY)
    read_only = np.frombuffer(ROWS.tobytes(), np.float32).reshape(1, 3)
    for request in (ROWS.copy(), read_only):
        for _ in range(2):  # a shadow, say, asks with the same arrays
            np.testing.assert_array_equal(model.predict_batch([{"x": request}])[0]["y"], ROWS / 2)


@pytest.mark.parametrize(("shape", "is_known"), [([-1, 3], True), ([-1, -1], False)])
def test_behind_a_preprocessing_views_run_backwards_and_one_size_is_timed(shape: list[int], is_known: bool) -> None:
    subject = predictor("torch.nn:Identity", shape, preprocess=f"{__name__}:reversed_view")
    model = subject.load(EMPTY)
    assert bool(subject.warm_up_times) == is_known
    np.testing.assert_array_equal(model.predict({"x": ROWS.copy()})["y"], ROWS[:, ::-1])


def test_graphs_for_inputs_of_any_length_are_refused() -> None:
    factory = ModelFactory(factory="torch.nn:Identity")
    with pytest.raises(ConfigError, match=r"cuda_graphs = True: needs a graph for each size of 'x'"):
        ModuleTemplate(TemplateConfig(factory, SIGNATURE, ModelOptions(cuda_graphs=True), "cpu", torch_threads=1))


def test_where_padding_is_dear_a_batch_is_computed_in_parts_and_everybody_has_their_own_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock is the model's: what else the machine does changes nothing."""
    monkeypatch.setattr(predictor_module, "time", SimpleNamespace(perf_counter=lambda: Toil.now_s))
    subject = predictor("Toil", [-1, -1], ragged="pad", max_batch_size=8)
    model, draw = subject.load(EMPTY), np.random.default_rng(0)
    for _ in range(20):
        lengths = draw.permutation([2, 120, 3, 119, 4, 118, 5, 117]).tolist()
        requests = [{"x": draw.normal(size=(1, length)).astype(np.float32)} for length in lengths]
        Toil.shapes.clear()
        answers = model.predict_batch(requests)
        for answer, request in zip(answers, requests, strict=True):
            np.testing.assert_allclose(answer["y"], request["x"].cumsum(1), rtol=1e-4, atol=1e-5)
    assert sum(rows for rows, _ in Toil.shapes) == 8
    assert sum(rows * length for rows, length in Toil.shapes) < 0.6 * 8 * 120


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x * by * self.scale


def negate_in_place(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for array in arrays.values():
        np.negative(array, out=array)
    return arrays


def test_a_hook_may_write_to_an_input_that_requests_share() -> None:
    signature = Signature(inputs=tensors(x=[-1, 2], by=[2]), outputs=tensors(y=[-1, 2]))
    options = ModelOptions.parse({"batch_dim": {"by": None}, "preprocess": f"{__name__}:negate_in_place"})
    predictor = Predictor(ModelFactory(factory=f"{__name__}:Product"), signature, options)
    model = predictor.load(WeightSnapshot.of(1, {"scale": np.ones((), np.float32)}))
    request = {"x": np.ones((1, 2), np.float32), "by": np.full(2, 3, np.float32)}
    taken = [predictor.layout.to_batch_first(request, 1)] * 2
    assert [answer["y"].tolist() for answer in model.predict_batch(taken)] == [[[3.0, 3.0]]] * 2
    assert request["by"].tolist() == [3.0, 3.0]


def test_auto_takes_a_device_that_answers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A version that cannot be loaded, or does not answer, on a GPU is served from the CPU; bad weights select none."""
    original = predictor_module.open_template

    class OutOfMemory:
        def load(self, snapshot: WeightSnapshot) -> None:
            raise torch.OutOfMemoryError("out of memory")

    def open_template(setting: TemplateConfig) -> object:
        return OutOfMemory() if setting.device == "cuda" else original(setting)

    monkeypatch.setattr(predictor_module, "has_cuda", lambda _: True)
    monkeypatch.setattr(predictor_module, "open_template", open_template)
    subject = predictor("Normed", [-1, 3])
    with pytest.raises(WeightsError, match="missing"):
        subject.load(EMPTY)
    assert list(subject._templates) == ["cpu", "cuda"]
    state = arrays_of(Normed())
    (answer,) = subject.load(WeightSnapshot.of(2, state)).predict_batch([{"x": ROWS}])
    np.testing.assert_allclose(answer["y"], 2 * ROWS, rtol=1e-4)
    assert "cuda cannot be measured: it does not answer an example (the GPU's memory is too small for" in caplog.text
    assert list(subject._templates) == ["cpu"]
