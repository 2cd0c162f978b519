"""What each option of a model does to its answers: precision, compilation, padding, hooks, the device."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from refusals import refused
from registered import arrays_of
from shoal.errors import ConfigError, InferenceError, WeightsError
from shoal.models.decoder import Decoder
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model import device, precision
from shoal.serve.model.formats import torch_forward
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.model.warm_up import time_warm_forwards
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

GENERATOR = np.random.default_rng(0)


def tensor(name: str, *shape: int, datatype: str = "FP32") -> TensorSignature:
    return TensorSignature(name=name, datatype=datatype, shape=[-1, *shape])


def predictor(
    module: str, inputs: list[TensorSignature], outputs: list[TensorSignature], **options: object
) -> Predictor:
    factory = ModelFactory(factory=module if ":" in module else f"{__name__}:{module}")
    return Predictor(factory, Signature(inputs=inputs, outputs=outputs), ModelOptions.parse(options))


def snapshot(module: nn.Module, version: int = 1) -> WeightSnapshot:
    return WeightSnapshot.of(version, arrays_of(module))


class Wide(nn.Module):
    """Layers on both sides of the least size for int8, a convolution, and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.large = nn.Linear(512, 256)
        self.norm = nn.LayerNorm(256)
        self.small = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.norm(self.large(self.conv(x.unsqueeze(1)).flatten(1))))


def wide(version: int = 1, **options: object) -> tuple[nn.Module, LoadedModel]:
    torch.manual_seed(version)
    module = Wide().eval()
    subject = predictor("Wide", [tensor("x", 256)], [tensor("y", 4)], max_batch_size=4, **options)
    return module, subject.load(snapshot(module, version))


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 0.03), ("int8", 0.03)])
def test_a_narrow_precision_answers_nearly_the_same(name: str, tolerance: float) -> None:
    """bf16 has 8 bits of mantissa, int8 7 of magnitude: after two layers each is within a few hundredths of outputs of
    size one, and neither is exact."""
    module, model = wide(precision=name)
    x = GENERATOR.standard_normal((8, 256), np.float32)
    exact = module(torch.from_numpy(x)).detach().numpy()
    (answer,) = model.predict_batch([{"x": x}])
    error = np.abs(answer["y"] - exact).max()
    assert answer["y"].dtype == np.float32
    assert 0 < error < tolerance


def test_many_rows_go_to_the_library_that_is_faster_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_forward, "is_onednn_faster", lambda: True)
    torch.manual_seed(0)
    module = Encoder().eval()
    shape = [tensor("x", 3, 128)]
    model = predictor("Encoder", shape, [tensor("y", 3, 128)], max_batch_size=32).load(snapshot(module))
    x = GENERATOR.standard_normal((32, 3, 128), np.float32)
    calls: list[int] = []

    def counted(rows: torch.Tensor, *others: object) -> torch.Tensor:
        calls.append(rows.numel() // 128)
        return original(rows, *others)

    original = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    (answer,) = model.predict_batch([{"x": x}])
    assert calls[0] == 96
    np.testing.assert_allclose(answer["y"], module(torch.from_numpy(x)).detach(), rtol=1e-4, atol=1e-5)
    calls.clear()
    model.predict_batch([{"x": x[:1]}])
    assert calls == []


def test_int8_changes_large_linear_layers_and_answers_each_row_by_itself() -> None:
    module = Wide()
    changed = precision.PrecisionConverter("int8", module)
    kinds = {name: type(layer).__name__ for name, layer in module.named_children()}
    assert kinds == {"conv": "Conv1d", "large": "Int8Linear", "norm": "LayerNorm", "small": "Linear"}
    assert changed.convert(Wide().state_dict())["large.units"].dtype == torch.int8
    _, model = wide(precision="int8")
    quiet, loud = (scale * GENERATOR.standard_normal((1, 256), np.float32) for scale in (0.01, 100.0))
    alone = model.predict_batch([{"x": quiet}])[0]["y"]
    beside = model.predict_batch([{"x": quiet}, {"x": loud}])[0]["y"]
    np.testing.assert_allclose(beside, alone, rtol=1e-4, atol=1e-5)  # one scale for the batch would leave it nothing


def test_int8_for_a_model_without_a_large_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision = 'int8': the model has no linear layer of 65536 weights"):
        predictor("torch.nn:Identity", [tensor("x", 2)], [tensor("y", 2)], precision="int8")


class Scaled(nn.Module):
    """Computes with the weights of a layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layer.weight * 0.5, self.layer.bias)


def test_int8_is_refused_where_a_module_would_take_the_units_of_its_weights_for_them() -> None:
    subject = predictor(f"{__name__}:Scaled", [tensor("x", 256)], [tensor("y", 256)], precision="int8")
    weights = arrays_of(Scaled().requires_grad_(False))
    with pytest.raises(WeightsError, match=r"cannot answer an example: .* has no attribute 'weight'"):
        subject.load(WeightSnapshot.of(1, weights))


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(128, 2, dim_feedforward=512, batch_first=True)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_torchs_own_transformer_layer_runs_in_every_precision(name: str) -> None:
    """It has a fused path of its own, which reads the weights of its layers."""
    torch.manual_seed(0)
    module = Encoder().eval()
    shape = [tensor("x", 3, 128)]
    model = predictor("Encoder", shape, [tensor("y", 3, 128)], precision=name, max_batch_size=1).load(snapshot(module))
    x = GENERATOR.standard_normal((1, 3, 128), np.float32)
    expected = module(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(model.predict_batch([{"x": x}])[0]["y"], expected, atol=0.06)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_compiled_model_is_not_compiled_again_for_new_weights_or_sizes(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `predict`, two inputs and a dimension of variable size: what could be compiled for one of its values."""
    inputs = [tensor("x", -1), tensor("scale")]
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    subject = predictor("Named", inputs, [tensor("y", -1), tensor("sum")], compile=True, max_batch_size=8)
    torch.manual_seed(1)
    modules = [Named() for _ in range(4)]
    models = [subject.load(snapshot(modules[0], 1))]
    assert counters["stats"]["unique_graphs"] > 0
    graphs = counters["stats"]["unique_graphs"]
    models += [subject.load(snapshot(module, 2)) for module in modules[1:]]
    forward_thread = ThreadPoolExecutor(1, initializer=subject.set_torch_threads)  # loading has a thread of its own
    for rows, length in ((1, 16), (2, 16), (3, 5), (8, 40)):
        request = {
            "x": GENERATOR.standard_normal((rows, length), np.float32),
            "scale": GENERATOR.standard_normal(rows, np.float32),
        }
        for model, module in zip(models, modules, strict=True):
            (answer,) = forward_thread.submit(model.predict_batch, [request]).result()
            expected = module.predict(**{name: torch.from_numpy(array) for name, array in request.items()})
            for name, value in expected.items():
                np.testing.assert_allclose(answer[name], value.detach(), rtol=1e-4, atol=1e-5)
    forward_thread.shutdown()
    assert counters["stats"]["unique_graphs"] == graphs


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "factor", "offset", "power"):  # a file keeps no order of them
            setattr(self, name, nn.Parameter(torch.randn(1)))

    def predict(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.tanh(x * self.weight + self.bias + self.power) * self.factor + self.offset
        y = y * scale.unsqueeze(1)
        return {"sum": y.sum(1), "y": y}


class Tokens(nn.Module):
    """Doubles each token, counts those that are not padding, and gives a table that follows no input."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tokens * 2, (tokens >= 0).sum(1), torch.ones(len(tokens), 3)


TOKENS = [tensor("tokens", -1, datatype="INT64")]
TOKEN_OUTPUTS = [tensor("y", -1, datatype="INT64"), tensor("length", datatype="INT64"), tensor("table", -1)]


def tokens(*lengths: int, num_rows: int = 1) -> list[dict[str, np.ndarray]]:
    return [{"tokens": np.tile(np.arange(length), (num_rows, 1))} for length in lengths]


def test_padded_requests_share_a_batch_and_get_their_own_lengths_back() -> None:
    subject = predictor("Tokens", TOKENS, TOKEN_OUTPUTS, ragged="pad", pad_value=-1)
    requests = [*tokens(2), *tokens(5, num_rows=2), *tokens(4)]
    assert {subject.compute_bucket(request) for request in requests} == {None}
    answers = subject.load(WeightSnapshot.of(1, {})).predict_batch(requests)
    assert [answer["y"].tolist() for answer in answers] == [[[0, 2]], [[0, 2, 4, 6, 8]] * 2, [[0, 2, 4, 6]]]
    assert [answer["length"].tolist() for answer in answers] == [[2], [5, 5], [4]]
    assert [answer["table"].shape for answer in answers] == [(1, 3), (2, 3), (1, 3)]


def test_bucketed_requests_share_a_batch_when_their_shapes_are_equal() -> None:
    subject = predictor("Tokens", TOKENS, TOKEN_OUTPUTS)
    two, also_two, three = tokens(2, 2, 3)
    assert subject.compute_bucket(two) == subject.compute_bucket(also_two) != subject.compute_bucket(three)
    assert (
        predictor("torch.nn:Identity", [tensor("x", 4)], [tensor("y", 4)]).compute_bucket({"x": np.ones((1, 4))})
        is None
    )


def test_a_padded_transformer_answers_as_if_each_request_came_alone() -> None:
    """Its attention is causal: what is padded at the end is never looked at."""
    torch.manual_seed(0)
    module = Decoder(num_tokens=32, context=16, width=16, depth=2, heads=2).eval()
    factory = ModelFactory(
        factory="shoal.models.decoder:Decoder",
        kwargs={"num_tokens": 32, "context": 16, "width": 16, "depth": 2, "heads": 2},
    )
    signature = Signature(inputs=TOKENS, outputs=[tensor("logits", -1, 32)])
    subject = Predictor(factory, signature, ModelOptions(ragged="pad"))
    model = subject.load(snapshot(module))
    requests = tokens(3, 9, 6)
    for request, answer in zip(requests, model.predict_batch(requests), strict=True):
        alone = module(torch.from_numpy(request["tokens"])).detach()
        np.testing.assert_allclose(answer["logits"], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("datatype", "value"), [("UINT8", -1), ("INT64", float("nan")), ("INT8", 200), ("BOOL", 2)])
def test_a_pad_value_that_an_input_cannot_hold_is_refused(datatype: str, value: float) -> None:
    ragged = [tensor("x", -1, datatype=datatype)]
    with pytest.raises(ConfigError, match=f"input 'x' is {datatype}, which cannot hold it"):
        predictor("torch.nn:Identity", ragged, [tensor("y", -1)], ragged="pad", pad_value=value)


def read_numbers(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Preprocess: text to numbers."""
    texts = arrays["text"].ravel().tolist()
    if b"bug" in texts:
        raise KeyError("bug")
    if b"teapot" in texts:
        raise InferenceError(418, "short and stout")
    return {"x": np.array([float(text) for text in texts], np.float32).reshape(arrays["text"].shape)}


def name_numbers(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Postprocess: the sign of each row's sum, by name; what a model gives without a name is `output`."""
    sums = arrays["output"].sum(axis=1)
    if (sums > 1000).any():
        raise ValueError("too large")
    return {"sign": np.where(sums < 0, "negative", "positive"), "sum": sums}


def not_a_dict(arrays: dict[str, np.ndarray]) -> object:
    return list(arrays)


def text(*words: bytes) -> dict[str, np.ndarray]:
    return {"text": np.array([[word, b"1"] for word in words], object)}


TEXT = [tensor("text", 2, datatype="BYTES")]
SIGNS = [tensor("sign", datatype="BYTES"), tensor("sum")]


def hooked(**options: object) -> LoadedModel:
    words = {"preprocess": f"{__name__}:read_numbers", "postprocess": f"{__name__}:name_numbers", **options}
    return predictor("torch.nn:Identity", TEXT, SIGNS, **words).load(WeightSnapshot.of(1, {}))


def test_hooks_run_before_and_after_the_forward_of_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    model = hooked()
    assert "not warmed up, since it rejects an example" in caplog.text  # b"" is no number
    answers = model.predict_batch([text(b"-3"), text(b"2", b"4")])
    assert [answer["sign"].tolist() for answer in answers] == [[b"negative"], [b"positive", b"positive"]]
    assert [answer["sum"].tolist() for answer in answers] == [[-2.0], [3.0, 5.0]]


@pytest.mark.parametrize(
    ("word", "status", "complaint"),
    [
        (b"x", 422, "preprocess .*read_numbers: could not convert string to float"),
        (b"bug", 500, "preprocess .*read_numbers: KeyError: 'bug'"),
        (b"teapot", 418, "^short and stout$"),
        (b"9999", 500, "postprocess .*name_numbers: ValueError: too large"),
    ],
)
def test_a_hook_that_raises_says_whose_fault_it_is(word: bytes, status: int, complaint: str) -> None:
    with refused(status, complaint):
        hooked().predict_batch([text(word)])


def test_a_hook_that_gives_no_arrays_is_an_error_of_the_model() -> None:
    with pytest.raises(InferenceError, match="not_a_dict: expected a dict of arrays, it gave list"):
        hooked(postprocess=f"{__name__}:not_a_dict").predict_batch([text(b"1")])
    with pytest.raises(ConfigError, match="preprocess = 'nowhere': is not of the form module:name"):
        hooked(preprocess="nowhere")


class Half(nn.Module):
    def forward(self, x: torch.Tensor, words: np.ndarray) -> dict[str, object]:
        assert x.dtype == torch.bfloat16
        return {"y": x * 2, "z": x.half(), "echo": words}


@pytest.mark.parametrize("compiled", [False, True])
def test_every_datatype_that_torch_lacks_or_numpy_lacks_passes_through(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16 are bits in arrays of uint16, BYTES are objects."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    inputs = [tensor("x", datatype="BF16"), tensor("words", datatype="BYTES")]
    outputs = [tensor("y", datatype="BF16"), tensor("z", datatype="FP16"), tensor("echo", datatype="BYTES")]
    subject = predictor("Half", inputs, outputs, max_batch_size=2, compile=compiled)
    model = subject.load(WeightSnapshot.of(1, {}))
    bits = torch.tensor([1.5, -2.0]).bfloat16().view(torch.uint16).numpy()
    (answer,) = model.predict_batch([{"x": bits, "words": np.array([b"a", "é"], object)}])
    assert torch.from_numpy(answer["y"]).view(torch.bfloat16).tolist() == [3.0, -4.0]
    assert (answer["z"].dtype, answer["z"].tolist()) == (np.float16, [1.5, -2.0])
    assert answer["echo"].tolist() == [b"a", "é".encode()]
    infinite = torch.tensor([1.0, float("inf")]).bfloat16().view(torch.uint16).numpy()
    with pytest.raises(InferenceError, match="output 'y' is not finite: 1 of its 2 values"):
        model.predict_batch([{"x": infinite, "words": np.array([b"", b""], object)}])


def test_the_device_is_the_faster_one() -> None:
    times = {"cpu": {1: 1e-4, 64: 2e-3}, "cuda": {1: 3e-4, 64: 4e-4}}
    assert device.select_fastest(times) == (
        "cuda",
        "cuda is the fastest: cpu 0.1 ms for 1, 2 ms for 64; cuda 0.3 ms for 1, 0.4 ms for 64 rows",
    )
    assert device.select_fastest({"cpu": {1: 1e-4}, "cuda": {1: 2e-4}})[0] == "cpu"


@pytest.mark.parametrize(
    ("options", "has_cuda", "expected"),
    [
        ({}, False, ["cpu"]),
        ({}, True, ["cpu", "cuda"]),
        ({"device": "cuda"}, True, ["cuda"]),
        ({"cuda_graphs": True}, True, ["cuda"]),
        ({"device": "cpu"}, True, ["cpu"]),
        ({"precision": "int8"}, True, ["cpu"]),
        ({"device": "cuda"}, False, "device = 'cuda': there is no CUDA device here"),
        ({"cuda_graphs": True}, False, "cuda_graphs = True: there is no CUDA device here"),
        ({"cuda_graphs": True, "device": "cpu"}, True, "device = 'cpu': cuda_graphs = True needs a GPU"),
        ({"precision": "int8", "device": "cuda"}, True, "precision = 'int8': device = 'cuda' needs a GPU"),
    ],
)
def test_where_a_model_could_run(options: dict[str, object], has_cuda: bool, expected: list[str] | str) -> None:
    if isinstance(expected, list):
        assert device.devices(ModelOptions.parse(options), has_cuda) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            device.devices(ModelOptions.parse(options), has_cuda)


class SlowAtFirst(nn.Module):
    """Each number of rows takes an hour the first time, and a millisecond for each row from then on."""

    seen: ClassVar[set[int]] = set()
    now_s: ClassVar[float] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SlowAtFirst.now_s += 1e-3 * len(x) if len(x) in self.seen else 3600.0
        self.seen.add(len(x))
        return x


def test_a_first_forward_is_no_measure_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_warm_forwards, "__defaults__", (lambda: SlowAtFirst.now_s,))
    subject = predictor("SlowAtFirst", [tensor("x", 2)], [tensor("y", 2)], max_batch_size=4)
    assert subject.warm_up_times == []
    subject.load(snapshot(nn.Identity()))
    expected = [(1, 0.001), (2, 0.002), (4, 0.004)]
    assert subject.warm_up_times == [(rows, pytest.approx(seconds)) for rows, seconds in expected]
    subject.load(snapshot(nn.Identity(), 2))
    assert len(subject.warm_up_times) == 3


@pytest.mark.parametrize("inputs", [[tensor("x", -1)], [tensor("x", 2)]])
def test_nothing_is_learned_from_an_example_that_may_not_be_typical(inputs: list[TensorSignature]) -> None:
    options = {"warm_up": inputs[0].shape == [-1, -1]}
    subject = predictor("torch.nn:Identity", inputs, [tensor("y", *inputs[0].shape[1:])], **options)
    subject.load(snapshot(nn.Identity()))
    assert subject.warm_up_times == []
