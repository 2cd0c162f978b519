"""Models whose batch is in another dimension than 0, or nowhere: a module, in all encodings."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from registered import arrays_of
from serving.replica_set import ask, serving_one
from shoal.client.payload import decode_answer, encode_inputs
from shoal.client.retry import Reply
from shoal.errors import ConfigError, InferenceError
from shoal.open_inference.messages import ModelMetadata
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.serve.http.codec import HttpCodec
from shoal.serve.model.predictor import Predictor
from shoal.serve.protocol.model_metadata import to_tensor_metadata
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.batch_layout import BatchLayout
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

RNG = np.random.default_rng(0)
STATED = {"batch_dim": {"state": 1, "rate": None}, "max_batch_size": 8}


def fp32(name: str, *shape: int) -> TensorSignature:
    return TensorSignature(name=name, datatype="FP32", shape=[*shape])


class Detector(nn.Module):
    """As detectors of voices are: a state of two layers with the batch between, and a rate for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, state: torch.Tensor, rate: torch.Tensor) -> Any:
        state = state + self.scale * x.sum(-1)[None, :, None] * rate
        return state.sum((0, 2)), state


DETECTOR = Signature(
    inputs=[fp32("x", -1, 4), fp32("state", 2, -1, 3), TensorSignature(name="rate", datatype="INT64", shape=[])],
    outputs=[fp32("score", -1), fp32("state", 2, -1, 3)],
)


def detector_inputs(rows: int, rate: int = 2) -> dict[str, np.ndarray]:
    state = RNG.random((2, rows, 3), np.float32)
    return {"x": RNG.random((rows, 4), np.float32), "state": state, "rate": np.array(rate)}


def detect(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.inference_mode():
        score, state = Detector()(*[torch.from_numpy(each) for each in inputs.values()])
    return {"score": score.numpy(), "state": state.numpy()}


def weights(module: nn.Module) -> WeightSnapshot:
    return WeightSnapshot.of(1, arrays_of(module))


def split_first(options: dict[str, Any], requests: list[dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
    """The detector's answers to requests in the model's shapes, in the order of its outputs."""
    if options.get("batch_dim"):
        options = {**options, "batch_dim": {**options["batch_dim"], "state": 1}}
    factory = ModelFactory(factory=f"{__name__}:Detector")
    model = Predictor(factory, DETECTOR, ModelOptions.parse(options)).load(weights(Detector()))
    layout = model._layout
    taken = [layout.to_batch_first(each, len(each["x"]) if layout.shared_inputs else 1) for each in requests]
    return [list(layout.to_model_shapes(each).values()) for each in model.predict_batch(taken)]


@pytest.mark.parametrize(("options", "rows"), [(STATED, [1, 3]), ({"max_batch_size": 0}, [3])])
def test_rows_are_joined_and_split_along_the_stated_dimension(options: dict[str, Any], rows: list[int]) -> None:
    requests = [detector_inputs(each) for each in rows]
    for answer, request in zip(split_first(options, requests), requests, strict=True):
        for actual, expected in zip(answer, detect(request).values(), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


# -- an endpoint ------------------------------------------------------------------------------------------------------


class Grey(nn.Module):
    """One picture, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert picture.shape == (3, 2, 2)
        grey = self.scale * picture.mean(0)
        return grey, grey.mean()


GREY = Signature(inputs=[fp32("picture", 3, 2, 2)], outputs=[fp32("grey", 2, 2), fp32("mean")])
PICTURE = np.arange(12, dtype=np.float32).reshape(3, 2, 2)


def register(name: str, module: type[nn.Module], signature: Signature) -> None:
    factory = ModelFactory(factory=f"{__name__}:{module.__name__}")
    Registry().register(name, weights(module()), model=factory, signature=signature)


def tensor(name: str, array: np.ndarray) -> dict[str, Any]:
    datatype = "INT64" if array.dtype == np.int64 else "FP32"
    return {"name": name, "shape": [*array.shape], "datatype": datatype, "data": array.ravel().tolist()}


async def test_a_model_for_one_picture_is_served_as_it_is() -> None:
    register("grey", Grey, GREY)
    async with serving_one("grey", model={"max_batch_size": 0}) as (_, replica):
        metadata = (await ask(replica, "GET", "/v2/models/grey")).body
        assert [each["shape"] for each in (*metadata["inputs"], *metadata["outputs"])] == [[3, 2, 2], [2, 2], []]
        config = (await ask(replica, "GET", "/v2/models/grey/config")).body
        assert config["max_batch_size"] == 0
        assert config["input"][0]["dims"] == [3, 2, 2]
        assert "dynamic_batching" not in config
        answers = await asyncio.gather(
            *[ask(replica, "POST", "/v2/models/grey/infer", {"inputs": [tensor("picture", PICTURE)]}) for _ in range(3)]
        )
        for answer in answers:
            grey, mean = answer.body["outputs"]
            assert (grey["shape"], grey["data"]) == ([2, 2], [4, 5, 6, 7])
            assert (mean["shape"], mean["data"]) == ([], [5.5])
        batch = await ask(replica, "POST", "/v2/models/grey/infer", {"inputs": [tensor("picture", PICTURE[None])]})
        assert batch.status == 422
        assert "expected FP32 [3, 2, 2], got FP32 [1, 3, 2, 2]" in batch.body["error"]
        statistics = (await ask(replica, "GET", "/v2/models/grey/stats")).body["model_stats"][0]
        assert {each["batch_size"] for each in statistics["batch_stats"]} == {1}


async def test_a_state_with_the_batch_between_goes_through_an_endpoint() -> None:
    register("detector", Detector, DETECTOR)
    requests = [detector_inputs(1), detector_inputs(2), detector_inputs(2, rate=3)]

    async def infer(replica: EndpointReplica, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        request = {"inputs": [tensor(name, array) for name, array in inputs.items()]}
        answer = await ask(replica, "POST", "/v2/models/detector/infer", request)
        assert answer.status == 200, answer.body
        outputs = answer.body["outputs"]
        return {each["name"]: np.array(each["data"], np.float32).reshape(each["shape"]) for each in outputs}

    async with serving_one("detector", models={"detector": STATED}) as (_, replica):
        answers = await asyncio.gather(*[infer(replica, each) for each in requests])
        for inputs, outputs in zip(requests, answers, strict=True):
            for name, expected in detect(inputs).items():
                np.testing.assert_allclose(outputs[name], expected, rtol=1e-5)
        uneven = {**requests[0], "x": requests[1]["x"]}
        refused = await ask(
            replica, "POST", "/v2/models/detector/infer", {"inputs": [tensor(*each) for each in uneven.items()]}
        )
        assert refused.status == 422
        assert "input 'state': expected 2 rows, as of 'x', got 1" in refused.body["error"]
        config = (await ask(replica, "GET", "/v2/models/detector/config")).body
        assert config["max_batch_size"] == 0
        assert config["input"][1]["dims"] == [2, -1, 3]
        assert json.loads(config["parameters"]["batch_dim"]["string_value"]) == {"state": 1, "rate": None}


def test_binary_bodies_have_the_models_shapes() -> None:
    metadata = ModelMetadata("detector", ["1"], "", *map(to_tensor_metadata, (DETECTOR.inputs, DETECTOR.outputs)))
    for max_rows, batch_dim in ((0, {}), (8, {"state": 1, "rate": None})):
        codec = HttpCodec("detector", metadata.inputs, metadata.outputs, max_rows, batch_dim)
        sent = detector_inputs(3)
        headers, body = encode_inputs(metadata, sent, None, "", binary=True)
        call = codec.decode(body, int(headers["inference-header-content-length"]))
        assert call.num_rows == (3 if max_rows else 1)
        for name, array in sent.items():
            np.testing.assert_array_equal(call.inputs[name], array)
        made = codec.encode(call, detect(sent), 1)
        length = {"inference-header-content-length": str(len(made.body))}
        answer = decode_answer(Reply(200, length, b"".join([made.body, *made.parts])))
        np.testing.assert_array_equal(answer["state"], detect(sent)["state"])
    picture = to_tensor_metadata(GREY.inputs)
    raw = HttpCodec("grey", picture, picture, 0).decode(PICTURE.tobytes(), 0)
    np.testing.assert_array_equal(raw.inputs["picture"], PICTURE)


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, r"max_batch_size = 64: 'state' is FP32 \[2, -1, 3\], and dimension 0 of it is not open"),
        ({"batch_dim": {"state": 1}}, r"max_batch_size = 64: 'rate' is INT64 \[\]"),
        ({"batch_dim": {"state": 2, "rate": None}}, r"batch_dim = .*'state' is FP32 \[2, -1, 3\], and dimension 2"),
        ({"batch_dim": {"state": 7, "rate": None}}, r"batch_dim = .*dimension 7"),
        ({"batch_dim": {"stat": 1}}, r"batch_dim = .*the model has no tensor 'stat'. its tensors are rate, score"),
        ({"batch_dim": {"state": None, "rate": None, "x": None}}, "batch_dim = .*leaves no input with the batch"),
    ],
)
def test_a_batch_that_is_not_there_is_refused_by_its_field(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BatchLayout(DETECTOR, ModelOptions.parse(options))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_batch_size": -1}, "max_batch_size = -1"),
        ({"batch_dim": {"x": -1}}, r"batch_dim\.x = -1"),
        ({"batch_dim": {"x": "first"}}, r"batch_dim\.x = 'first'"),
        ({"batch_dim": {"x": 1}, "max_batch_size": 0}, "leave out batch_dim"),
        ({"cuda_graphs": True, "max_batch_size": 0}, "cuda_graphs needs the batch in dimension 0"),
        ({"cuda_graphs": True, "batch_dim": {"x": 1}}, "cuda_graphs needs the batch in dimension 0"),
    ],
)
def test_options_that_no_model_could_have_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelOptions.parse(options)


def test_an_answer_of_another_shape_is_named_in_the_models_shapes() -> None:
    wrong = Signature(inputs=DETECTOR.inputs, outputs=[DETECTOR.outputs[0], fp32("state", 2, -1, 4)])
    options = ModelOptions.parse({**STATED, "warm_up": False})
    predictor = Predictor(ModelFactory(factory=f"{__name__}:Detector"), wrong, options)
    model = predictor.load(weights(Detector()))
    with pytest.raises(InferenceError, match=r"output 'state': expected FP32 \[2, 5, 4\], got FP32 \[2, 5, 3\]"):
        model.predict_batch([predictor.layout.to_batch_first(detector_inputs(5), 5)])


# -- with padding and hooks -------------------------------------------------------------------------------------------


class Cumulative(nn.Module):
    """Sums along time, of [time, batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.cumsum(0)


def double(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert arrays["x"].shape == (3, 3)  # [time, batch], as the model has it
    return {"x": 2 * arrays["x"]}


def test_padding_and_hooks_know_the_stated_dimension() -> None:
    signature = Signature(inputs=[fp32("x", -1, -1)], outputs=[fp32("y", -1, -1)])
    options = ModelOptions.parse(
        {"batch_dim": {"x": 1, "y": 1}, "ragged": "pad", "preprocess": f"{__name__}:double", "warm_up": False}
    )
    predictor = Predictor(ModelFactory(factory=f"{__name__}:Cumulative"), signature, options)
    model, layout = predictor.load(weights(Cumulative())), predictor.layout
    requests = [{"x": np.ones((3, 1), np.float32)}, {"x": np.ones((2, 2), np.float32)}]
    taken = [layout.to_batch_first(each, each["x"].shape[1]) for each in requests]
    assert len({predictor.compute_bucket(each) for each in taken}) == 1
    long, short = [layout.to_model_shapes(each)["y"] for each in model.predict_batch(taken)]
    assert long.tolist() == [[2], [4], [6]]
    assert short.tolist() == [[2, 2], [4, 4]]


def test_requests_of_unequal_shared_values_do_not_share_a_batch() -> None:
    predictor = Predictor(
        ModelFactory(factory=f"{__name__}:Detector"), DETECTOR, ModelOptions.parse({**STATED, "warm_up": False})
    )
    slow, again, fast = (
        predictor.compute_bucket(predictor.layout.to_batch_first(detector_inputs(2, rate), 2)) for rate in (1, 1, 3)
    )
    assert slow == again != fast
