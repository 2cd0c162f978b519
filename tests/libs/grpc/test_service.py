"""The methods of the service, called as `app` calls them: no socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from libs.grpc.asking import raw
from serving.fake_host import FakeHost, FakeModel, tensors
from shoal.errors import Closed, InferenceError
from shoal.extend.serve import to_inference_error
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import FIELDS, GrpcCodec, RequestLayoutCache
from shoal.libs.grpc.methods import METHODS, GrpcCall
from shoal.libs.grpc.service import InferenceServicer
from shoal.open_inference.datatypes import DATATYPES, NUMPY_DTYPES
from shoal.open_inference.messages import TensorMetadata
from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.messages.infer_call import Arrays
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.pipeline import LARGE_BYTES
from shoal.serve.spec.api_key import ApiKey
from shoal.serve.spec.model_options import ModelOptions
from unit.serve.test_large_tensors import COUNT, answers, gated, host


def call(
    models: FakeHost, method: str, request: Any, access: AccessControl | None = None, **invocation: Any
) -> tuple[Any, GrpcCall]:
    """The answer of a method, and its call."""
    servicer = InferenceServicer(models, access or AccessControl(None, []))
    made = GrpcCall(**{"metadata": {}, **invocation})
    if method == "ModelInfer":
        return asyncio.run(servicer.model_infer(request, made)), made
    return asyncio.run(servicer.describe(METHODS[method], request, made)), made


def infer(request: pb.ModelInferRequest, *models: FakeModel, **options: Any) -> pb.ModelInferResponse:
    answer, _ = call(FakeHost(*models), "ModelInfer", request.SerializeToString(), **options)
    return pb.ModelInferResponse.FromString(answer)


def typed_values(datatype: str) -> list[Any]:
    if datatype == "BOOL":
        return [True, False, True, True]
    if datatype == "BYTES":
        return [b"", b"\xff\x00", b"plain", b"x" * 300]
    dtype = NUMPY_DTYPES[datatype]
    if dtype.kind == "f":
        return [0.0, -0.5, 1e-30, 3e38]
    info = np.iinfo(dtype)
    return [0, 1, int(info.min), int(info.max)]


def test_every_datatype_is_typed_but_those_that_travel_raw() -> None:
    assert set(DATATYPES) - set(FIELDS) == {"FP16", "BF16"}
    for datatype, field in FIELDS.items():
        request = typed("m", datatype, [2, 2], id="7")
        tensor = request.inputs[0]
        getattr(tensor.contents, field).extend(typed_values(datatype))
        answer = infer(request, FakeModel("m", tensors(x=(datatype, [-1, 2]))))
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "7", "7")
        (output,) = answer.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("x", datatype, [2, 2])
        assert output.contents == tensor.contents
        assert not answer.raw_output_contents


def test_an_answer_is_raw_when_one_of_its_outputs_has_no_typed_field() -> None:
    def half(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"h": inputs["x"].astype(np.float16), "x": inputs["x"]}

    model = FakeModel("m", outputs=tensors(h=("FP16", [-1, 3]), x=("FP32", [-1, 3])), compute=half)
    request = typed(shape=[1, 3])
    request.inputs[0].contents.fp32_contents.extend([1, 2, 3])
    answer = infer(request, model)
    assert [each.name for each in answer.outputs] == ["h", "x"]
    assert list(np.frombuffer(answer.raw_output_contents[0], np.float16)) == [1, 2, 3]
    request.outputs.add(name="x")
    assert list(infer(request, model).outputs[0].contents.fp32_contents) == [1, 2, 3]


def typed(
    model: str = "m", datatype: str = "FP32", shape: Sequence[int] = (2, 3), **fields: Any
) -> pb.ModelInferRequest:
    """A request with one input `x`, without values."""
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    return request


def broken_requests() -> dict[str, tuple[pb.ModelInferRequest, str]]:
    both, wrong_field = raw(), typed()
    both.inputs[0].contents.fp32_contents.append(1.0)
    wrong_field.inputs[0].contents.fp64_contents.extend([1.0] * 6)
    overflow, half = typed("tiny", "INT8", [1]), typed("half", "FP16", [1])
    overflow.inputs[0].contents.int_contents.append(128)
    half.inputs[0].contents.fp32_contents.append(1)
    shared = raw()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    repeated = raw()
    for name in ("x", "x"):
        repeated.outputs.add(name=name)
    text = raw()
    text.parameters["timeout"].string_param = "soon"
    return {
        "nothing at all": (pb.ModelInferRequest(model_name="m"), "input 'x' is missing"),
        "no contents": (typed(), "expected 6 values in fp32_contents for FP32 [2, 3], got 0"),
        "contents of another type": (wrong_field, "expected 6 values in fp32_contents for FP32 [2, 3], got 0"),
        "raw and typed": (both, "expected contents or raw_input_contents, got both"),
        "too many blobs": (typed(raw_input_contents=[b"", b""]), "has 2 entries for 1 inputs"),
        "too few bytes": (typed(raw_input_contents=[b"1234"]), "expected 24 bytes of FP32 [2, 3], got 4"),
        "more values than there are": (
            typed("wide", shape=[1, 4096]),
            "expected 4096 values in fp32_contents for FP32 [1, 4096], got 0",
        ),
        "a negative shape": (typed("wide", shape=[1, -4]), "got FP32 [1, -4]"),
        "a value that does not fit": (overflow, "expected values of INT8"),
        "FP16 in a typed field": (half, "expected FP16 in raw_input_contents"),
        "shared memory": (shared, "shared_memory_region"),
        "an output twice": (repeated, "output 'x' was asked for twice"),
        "a timeout that is a word": (text, "timeout = 'soon': expected microseconds"),
    }


def test_a_wrong_request_is_refused_and_says_why() -> None:
    inputs = {"m": ("FP32", [-1, 3]), "wide": ("FP32", [-1, -1]), "tiny": ("INT8", [-1]), "half": ("FP16", [-1])}
    models = [FakeModel(name, tensors(x=each)) for name, each in inputs.items()]
    for what, (request, words) in broken_requests().items():
        with pytest.raises(InferenceError) as caught:
            infer(request, *models)
        assert caught.value.status in (400, 422), what
        assert words in str(caught.value), what
    for contents in ([], [b""]):  # before anything is allocated for it
        with pytest.raises(InferenceError) as caught:
            infer(typed("wide", shape=[1, 1 << 62], raw_input_contents=contents), *models)
        assert caught.value.status == 413
    assert not any(model.calls for model in models)


def test_metadata_becomes_the_terms_of_the_call() -> None:
    model, key = FakeModel("m", versions=(1, 2)), ApiKey(name="tenant", key="k")  # type: ignore[arg-type]
    metadata = {b"authorization": b"Bearer k", b"shoal-sticky": b"s", b"shoal-track": b"candidate"}
    content = raw(model_version="1").SerializeToString()
    answer, made = call(FakeHost(model), "ModelInfer", content, AccessControl(None, [key]), metadata=metadata)
    assert pb.ModelInferResponse.FromString(answer).model_version == "1"
    assert made.trailing == [(b"shoal-model-version", b"1")]
    (seen,) = model.calls
    assert (seen.tenant, seen.sticky, seen.track, seen.trace) == ("tenant", "s", "candidate", None)
    assert (seen.version, seen.num_rows, seen.outputs) == (1, 2, None)


@pytest.mark.parametrize(
    ("timeout_us", "metadata", "called_s", "expected_s"),
    [
        (0, {}, None, 100),  # the model's own, when the client names none
        (0, {}, 200, 200),
        (30_000_000, {}, 200, 30),
        (30_000_000, {b"shoal-deadline-ms": b"8000"}, 200, 8),
        (30_000_000, {}, 5, 5),
    ],
)
def test_the_earliest_deadline_counts(
    timeout_us: int, metadata: dict[bytes, bytes], called_s: float | None, expected_s: float
) -> None:
    model, request = FakeModel("m", options=ModelOptions(deadline_s=100.0)), raw()
    if timeout_us:
        request.parameters["timeout"].int64_param = timeout_us
    deadline_s = None if called_s is None else time.monotonic() + called_s
    infer(request, model, metadata=metadata, deadline_s=deadline_s)
    assert model.calls[-1].deadline_s == pytest.approx(time.monotonic() + expected_s, abs=2)


STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "FAILED_PRECONDITION",
    413: "RESOURCE_EXHAUSTED",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


@pytest.mark.parametrize(
    ("error", "code", "retry_after"),
    [
        *((InferenceError(status, "w", retry_after_s=1.2), code, b"2") for status, code in STATUSES.items()),
        (InferenceError(422, "input 'K\u00f6ln': 100% wrong\nand more"), "INVALID_ARGUMENT", None),
        (Closed("w"), "UNAVAILABLE", b"1"),
        (KeyError("w" * 10_000), "INTERNAL", None),
    ],
)
def test_an_error_has_the_status_for_it(error: Exception, code: str, retry_after: bytes | None) -> None:
    subject = GrpcCall({})
    subject.set_error(to_inference_error(error))
    trailers = dict(subject.build_trailers())
    assert trailers[b"grpc-status"] == b"%d" % grpc.StatusCode[code].value[0]
    assert len(trailers[b"grpc-message"]) <= 2000
    assert trailers.get(b"retry-after") == retry_after


def test_a_message_of_a_status_is_escaped() -> None:
    subject = GrpcCall({})
    for text, message in (("no: \udcff.txt", rb"no: \udcff.txt"), ("K\u00f6ln 100%\n", b"K%C3%B6ln 100%25%0A")):
        subject.set_error(InferenceError(500, text))
        assert dict(subject.build_trailers())[b"grpc-message"] == message


def test_a_key_of_some_models_sees_no_others() -> None:
    models, key = FakeHost(FakeModel("mine"), FakeModel("theirs")), ApiKey(name="some", key="k", models=["mine"])  # type: ignore[arg-type]
    options = {"access": AccessControl("secret", [key]), "metadata": {b"authorization": b"Bearer k"}}
    statistics, _ = call(models, "ModelStatistics", pb.ModelStatisticsRequest(), **options)
    assert {each.name for each in statistics.model_stats} == {"mine"}
    index, _ = call(models, "RepositoryIndex", pb.RepositoryIndexRequest(), **options)
    assert {each.name for each in index.models} == {"mine"}
    for kind in ("Load", "Unload"):
        request = getattr(pb, f"RepositoryModel{kind}Request")(model_name="mine")
        with pytest.raises(InferenceError) as caught:
            call(models, f"RepositoryModel{kind}", request, **options)
        assert caught.value.status == 403
    assert set(models.models_by_name) == {"mine", "theirs"}


def test_a_load_s_parameters_reach_the_host() -> None:
    models = FakeHost(FakeModel("m"), shelf=(FakeModel("new"),))
    request = pb.RepositoryModelLoadRequest(model_name="new")
    request.parameters["version"].int64_param = 3
    request.parameters["config"].string_param = "{}"
    call(models, "RepositoryModelLoad", request)
    assert models.parameters == [{"version": 3, "config": "{}"}]


def test_parameters_of_a_policy_are_read() -> None:
    request = pb.ModelInferRequest(model_name="policy")
    request.parameters["action"].string_param = "sampled"
    request.parameters["seed"].int64_param = 3
    call = GrpcCodec("policy", [], [], 8).decode(request)
    assert (call.action, call.seed) == ("sampled", 3)


@pytest.mark.parametrize("is_raw", [False, True])
def test_an_input_of_float64_takes_float32_and_no_other_takes_another(is_raw: bool) -> None:
    wide, narrow = ([TensorMetadata("x", datatype, [-1, 2])] for datatype in ("FP64", "FP32"))

    def decode(specs: list[TensorMetadata], datatype: str) -> np.ndarray:
        request = typed("m", datatype, [1, 2])
        if is_raw:
            request.raw_input_contents.append(np.array([0.1, 2], NUMPY_DTYPES[datatype]).tobytes())
        else:
            getattr(request.inputs[0].contents, {"FP32": "fp32_contents", "FP64": "fp64_contents"}[datatype]).extend(
                [0.1, 2]
            )
        codec = GrpcCodec("m", specs, specs, 4)
        layouts = RequestLayoutCache()
        content = request.SerializeToString()
        for _ in range(3):  # a third request would be read by its layout
            layouts.learn(content, request, codec, codec.decode(request))
        layout = layouts.find(content)
        return (layout.decode(content) if layout else codec.decode(request)).inputs["x"]

    for datatype, first in (("FP64", 0.1), ("FP32", np.float64(np.float32(0.1)))):
        decoded = decode(wide, datatype)
        assert (decoded.dtype, decoded.tolist()) == (np.float64, [[first, 2]])
    assert decode(narrow, "FP32").dtype == np.float32
    with pytest.raises(InferenceError, match=r"expected FP32 \[-1, 2\], got FP64 \[1, 2\]"):
        decode(narrow, "FP64")


def test_a_batch_may_be_in_another_dimension_or_absent() -> None:
    def decode(shape: list[int], rows: int, **options: Any) -> int:
        request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(24)])
        request.inputs.add(name="x", datatype="FP32", shape=[2, 3])
        specs = [TensorMetadata("x", "FP32", shape)]
        return GrpcCodec("m", specs, specs, rows, **options).decode(request).num_rows

    assert decode([-1, 3], 8) == 2
    assert decode([2, -1], 8, batch_dim={"x": 1}) == 3
    assert decode([2, 3], 0) == 1


@pytest.mark.parametrize("model", ["numbers", "texts"])
def test_others_are_answered_while_a_large_message_is_read(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    gate = gated(monkeypatch, GrpcCodec, "decode", lambda message: message.ByteSize() > LARGE_BYTES)
    request = pb.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="x", datatype="FP32" if model == "numbers" else "BYTES", shape=[1, COUNT])
    if model == "numbers":
        tensor.contents.fp32_contents.extend([1.0] * COUNT)
    else:
        request.raw_input_contents.append(bytes(4 * COUNT))
    other = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(12)])
    other.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    servicer = InferenceServicer(host(), AccessControl(None, []))
    many, few = answers(
        servicer.model_infer(request.SerializeToString(), GrpcCall({})),
        servicer.model_infer(other.SerializeToString(), GrpcCall({})),
        gate,
    )
    assert list(pb.ModelInferResponse.FromString(many).outputs[0].shape) == [1, 1]
    assert pb.ModelInferResponse.FromString(few).model_name == "m"


def test_a_refused_call_is_counted_with_its_address_and_model() -> None:
    access = AccessControl("the-token", [])
    servicer = InferenceServicer(FakeHost(FakeModel("m", tensors(x=("FP32", [-1, 3])))), access)
    invocation = GrpcCall({b"shoal-from": b"10.0.0.9", b"authorization": b"Bearer another"})
    with pytest.raises(InferenceError) as caught:
        asyncio.run(servicer.model_infer(pb.ModelInferRequest(model_name="m").SerializeToString(), invocation))
    assert caught.value.status == 401
    assert access.get_auth_failures() == (AuthFailure("", 401, 1, "10.0.0.9", "m"),)
