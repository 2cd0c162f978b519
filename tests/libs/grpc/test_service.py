"""The methods of the service, called as `app` calls them: no socket."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from libs.grpc.asking import raw, typed
from refusals import refused
from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from shoal.errors import Closed, InferenceError
from shoal.extend.serve import to_inference_error
from shoal.libs.grpc import codec as grpc_codec
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import (
    FIELDS,
    MAX_LAYOUTS,
    MAX_LAYOUTS_PER_LENGTH,
    GrpcCodec,
    GrpcInferCall,
    RequestLayout,
    RequestLayoutCache,
)
from shoal.libs.grpc.methods import METHODS, GrpcCall
from shoal.libs.grpc.service import InferenceServicer
from shoal.open_inference.binary_tensors import to_binary
from shoal.open_inference.datatypes import DATATYPES, NUMPY_DTYPES
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.request_schema import RequestSchema
from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.messages.infer_call import Arrays
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.pipeline import LARGE_BYTES
from shoal.serve.spec.api_key import ApiKey
from shoal.serve.spec.model_options import ModelOptions
from unit.serve.test_peers import COUNT, answers, gated, host


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

    model = FakeModel("m", outputs=tensors(h=("FP16", [-1, 3]), x=[-1, 3]), compute=half)
    request = typed(shape=[1, 3])
    request.inputs[0].contents.fp32_contents.extend([1, 2, 3])
    answer = infer(request, model)
    assert [each.name for each in answer.outputs] == ["h", "x"]
    assert list(np.frombuffer(answer.raw_output_contents[0], np.float16)) == [1, 2, 3]
    request.outputs.add(name="x")
    assert list(infer(request, model).outputs[0].contents.fp32_contents) == [1, 2, 3]


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
        with refused(413):
            infer(typed("wide", shape=[1, 1 << 62], raw_input_contents=contents), *models)
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
        with refused(403):
            call(models, f"RepositoryModel{kind}", request, **options)
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
        request = typed(shape=[2, 3], raw_input_contents=[bytes(24)])
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
    other = typed(shape=[1, 3], raw_input_contents=[bytes(12)])
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
    servicer = InferenceServicer(FakeHost(FakeModel("m", tensors(x=[-1, 3]))), access)
    invocation = GrpcCall({b"shoal-from": b"10.0.0.9", b"authorization": b"Bearer another"})
    with refused(401):
        asyncio.run(servicer.model_infer(pb.ModelInferRequest(model_name="m").SerializeToString(), invocation))
    assert access.get_auth_failures() == (AuthFailure("", 401, 1, "10.0.0.9", "m"),)


# -- requests of gRPC that are read by the layout of earlier ones: the same is read, and answered, as without

SPECS = [TensorMetadata("x", "FP32", [-1, 3]), TensorMetadata("n", "INT64", [-1]), TensorMetadata("t", "BYTES", [-1])]
CODEC = GrpcCodec("m", SPECS, SPECS, 8)
RAW_KEY = 7 << 3 | 2  # of raw_input_contents
UNKNOWN_KEY = bytes([99 << 3 & 127 | 2 | 128, 99 << 3 >> 7])  # of a field 99 that has a length


def arrays_of(num_rows: int, seed: int, text_bytes: int = 2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    texts = np.array([random.bytes(text_bytes) for _ in range(num_rows)], object)
    return {
        "x": random.normal(size=(num_rows, 3)).astype(np.float32),
        "n": random.integers(-9, 9, num_rows),
        "t": texts,
    }


def request_of(arrays: Arrays, **fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", **fields)
    for spec in SPECS:
        request.inputs.add(name=spec.name, datatype=spec.datatype, shape=arrays[spec.name].shape)
        request.raw_input_contents.append(bytes(to_binary(spec.datatype, arrays[spec.name])))
    return request


def read(content: bytes) -> tuple[pb.ModelInferRequest, GrpcInferCall]:
    """As a message is read that nothing is known of."""
    request = pb.ModelInferRequest.FromString(content)
    return request, CODEC.decode(request)


def learn(layouts: RequestLayoutCache, content: bytes, codec: GrpcCodec = CODEC) -> None:
    request, call = read(content)
    layouts.learn(content, request, codec, call)


def learnt(content: bytes) -> RequestLayoutCache:
    layouts = RequestLayoutCache()
    learn(layouts, content)
    learn(layouts, content)
    return layouts


def assert_same(layout: RequestLayout, content: bytes) -> None:
    request, expected = read(content)
    found = layout.decode(content)
    assert (layout.message.model_name, layout.message.model_version) == (request.model_name, request.model_version)
    assert structs.replace(found, inputs={}) == structs.replace(expected, inputs={})
    assert list(found.inputs) == list(expected.inputs)
    for name, array in expected.inputs.items():
        assert found.inputs[name].dtype == array.dtype
        assert found.inputs[name].tobytes() == array.tobytes() or array.dtype.hasobject
        assert found.inputs[name].tolist() == array.tolist() or np.isnan(array).any()


asks = st.fixed_dictionaries(
    {
        "model_version": st.sampled_from(["", "3"]),
        "outputs": st.lists(st.sampled_from(["x", "n", "t"]), unique=True).map(
            lambda names: [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in names]
        ),
        "parameters": st.sampled_from([{}, {"timeout": pb.InferParameter(int64_param=5)}]),
    }
)


@given(asks, st.integers(1, 8), st.integers(0, 200), st.integers(0, 99), st.integers(0, 99))
def test_a_request_of_a_known_layout_is_read_as_by_protobuf(
    fields: dict[str, Any], num_rows: int, text_bytes: int, seed: int, other: int
) -> None:
    layouts = learnt(request_of(arrays_of(num_rows, seed, text_bytes), **fields).SerializeToString())
    content = request_of(arrays_of(num_rows, other, text_bytes), **fields).SerializeToString()
    layout = layouts.find(content)
    assert layout is not None
    assert_same(layout, content)


@given(st.integers(0, 99), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_a_layout_is_found_for_is_read_as_by_protobuf(seed: int, changes: list[tuple[int, int]]) -> None:
    known = request_of(arrays_of(2, seed)).SerializeToString()
    content = bytearray(known)
    for place, value in changes:
        content[place % len(content)] = value
    layout = learnt(known).find(bytes(content))
    if layout is None:
        return
    try:
        read(bytes(content))
    except InferenceError as expected:
        with pytest.raises(InferenceError, match=f"^{re.escape(str(expected))}$") as caught:
            layout.decode(bytes(content))
        assert caught.value.status == expected.status  # noqa: PT017
    else:
        assert_same(layout, bytes(content))


def test_elements_that_come_before_other_fields_have_no_layout() -> None:
    request = request_of(arrays_of(1, 0))
    elements = pb.ModelInferRequest(raw_input_contents=request.raw_input_contents).SerializeToString()
    request.ClearField("raw_input_contents")
    turned = elements + request.SerializeToString()
    assert learnt(turned).find(turned) is None


def test_a_field_that_looks_like_the_elements_has_no_layout() -> None:
    """The elements stand before it, and it is no field of this message, so protobuf reads over it."""
    request = request_of(arrays_of(1, 0))
    elements = pb.ModelInferRequest(raw_input_contents=request.raw_input_contents).SerializeToString()
    content = request.SerializeToString() + UNKNOWN_KEY + bytes([len(elements)]) + elements
    read(content)
    assert content.endswith(elements)
    assert learnt(content).find(content) is None
    behind = request.SerializeToString() + UNKNOWN_KEY + bytes([3]) + b"abc"
    assert learnt(behind).find(behind) is None


def test_requests_with_an_id_or_typed_contents_have_no_layout() -> None:
    named = request_of(arrays_of(1, 0), id="7").SerializeToString()
    assert learnt(named).find(named) is None
    specs = [TensorMetadata("n", "INT64", [-1])]
    codec, layouts = GrpcCodec("m", specs, specs, 8), RequestLayoutCache()
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="n", datatype="INT64", shape=[1]).contents.int64_contents.append(7)
    content = request.SerializeToString()
    for _ in range(2):
        layouts.learn(content, request, codec, codec.decode(request))
    assert layouts.find(content) is None


def test_no_more_is_kept_than_the_limits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = RequestLayoutCache()
    contents = [
        request_of(arrays_of(1, 0, text_bytes), model_version=str(version)).SerializeToString()
        for text_bytes in range(2, 2 + MAX_LAYOUTS // MAX_LAYOUTS_PER_LENGTH + 2)
        for version in range(MAX_LAYOUTS_PER_LENGTH + 2)
    ]
    for content in contents:
        learn(layouts, content)
        learn(layouts, content)
        assert layouts.find(content) is not None
        assert sum(map(len, layouts._by_length.values())) == layouts._num_layouts <= MAX_LAYOUTS
        assert max(map(len, layouts._by_length.values())) <= MAX_LAYOUTS_PER_LENGTH
    monkeypatch.setattr(grpc_codec, "MAX_HEAD_BYTES", 20)
    assert learnt(contents[0]).find(contents[0]) is None


def test_a_layout_of_a_codec_that_is_gone_gives_way() -> None:
    content = request_of(arrays_of(1, 0)).SerializeToString()
    layouts = learnt(content)
    newer = GrpcCodec("m", SPECS, SPECS, 8)
    learn(layouts, content, newer)
    found = layouts.find(content)
    assert found is not None
    assert found.codec is newer
    assert layouts._num_layouts == 1


# -- in the service -----------------------------------------------------------------------------------------------


def asked_of(host: FakeHost, *requests: pb.ModelInferRequest) -> tuple[list[pb.ModelInferResponse], int]:
    """The answers to these, one after the other, and how many were taken apart."""
    decoded = 0

    async def body() -> list[pb.ModelInferResponse]:
        servicer = InferenceServicer(host, AccessControl(None, []))  # type: ignore[arg-type]
        return [
            pb.ModelInferResponse.FromString(await servicer.model_infer(each.SerializeToString(), GrpcCall({})))
            for each in requests
        ]

    class Counted(GrpcCodec):
        def decode(self, request: pb.ModelInferRequest) -> GrpcInferCall:
            nonlocal decoded
            decoded += 1
            return super().decode(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.libs.grpc.service.GrpcCodec", Counted)
        return asyncio.run(body()), decoded


def test_the_third_request_of_a_kind_is_not_taken_apart() -> None:
    model = FakeModel("m", tensors(x=[-1, 3]))
    requests = []
    for number in range(5):
        requests.append(raw("m", np.full((1, 3), number, np.float32)))
    answers, decoded = asked_of(FakeHost(model), *requests)
    assert decoded == 2
    for number, answer in enumerate(answers):
        (output,) = answer.outputs
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "7", "")
        assert (output.name, output.datatype, list(output.shape)) == ("x", "FP32", [1, 3])
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [number] * 3


async def test_a_layout_goes_when_a_load_has_changed_how_many_rows_a_request_may_have() -> None:
    model = FakeModel("m", tensors(x=[-1, 3]))
    request = typed(shape=[2, 3], raw_input_contents=[bytes(24)])
    content = request.SerializeToString()
    servicer = InferenceServicer(FakeHost(model), AccessControl(None, []))  # type: ignore[arg-type]

    for _ in range(3):
        await servicer.model_infer(content, GrpcCall({}))
    model.options = model.options.model_copy(update={"max_batch_size": 1})
    with refused(422, "expected 1 to 1 rows"):
        await servicer.model_infer(content, GrpcCall({}))


def test_of_the_outputs_that_are_asked_for_no_more_are_looked_at_than_the_model_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of some kilobytes, compressed, can name millions."""
    looked_at: list[str] = []

    class Counted(RequestSchema):
        def check_outputs(self, names: Iterable[str]) -> frozenset[str] | None:
            return super().check_outputs(looked_at.append(name) or name for name in names)

    monkeypatch.setattr("shoal.serve.http.codec.RequestSchema", Counted)
    request = typed(shape=[1, 3], raw_input_contents=[bytes(12)])
    for _ in range(1000):
        request.outputs.add(name="x")
    with pytest.raises(InferenceError, match="asked for twice"):
        asked_of(FakeHost(FakeModel("m", tensors(x=[-1, 3]))), request)
    assert len(looked_at) == 2


def test_a_stream_ends_at_what_is_no_message_and_nothing_behind_it_is_computed() -> None:
    model = FakeModel("m", tensors(x=[-1, 3]))
    request = typed(shape=[1, 3], raw_input_contents=[bytes(12)])
    servicer = InferenceServicer(FakeHost(model), AccessControl(None, []))  # type: ignore[arg-type]

    async def contents() -> AsyncIterator[bytes]:
        for content in (request.SerializeToString(), b"\xff\xff", request.SerializeToString()):
            yield content

    async def body() -> None:
        answers = servicer.model_stream_infer(contents(), GrpcCall({}))
        await anext(answers)
        with pytest.raises(InferenceError, match="not a ModelInferRequest"):
            await anext(answers)

    asyncio.run(body())
    assert len(model.calls) == 1


def test_elements_that_are_none_are_refused_by_a_layout_too() -> None:
    model = FakeModel("m", tensors(x=("BOOL", [-1, 2])))
    good, bad = (typed("m", "BOOL", [1, 2], raw_input_contents=[each]) for each in (b"\0\1", b"\0\2"))
    with refused(422, "expected bytes of 0 and 1 for BOOL"):
        asked_of(FakeHost(model), good, good, bad)


@given(st.sampled_from(sorted(NUMPY_DTYPES)), st.integers(1, 4), st.text(max_size=200), st.booleans())
def test_an_answer_is_the_message_that_protobuf_would_make(
    datatype: str, num_rows: int, identifier: str, known: bool
) -> None:
    specs = [TensorMetadata("a", datatype, [-1, 2]), TensorMetadata("b", "FP32", [-1])]
    codec = GrpcCodec("m", [], specs, 8)
    array = np.arange(num_rows * 2).reshape(num_rows, 2)
    values = array.astype("S").astype(object) if datatype == "BYTES" else array.astype(NUMPY_DTYPES[datatype])
    outputs = {"a": values, "b": np.ones(num_rows, np.float32)}
    expected = pb.ModelInferResponse(model_name="m", model_version="5", id=identifier)
    for spec in specs:
        array = outputs[spec.name]
        expected.outputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        expected.raw_output_contents.append(bytes(to_binary(spec.datatype, array)))
    call = GrpcInferCall({}, num_rows, id=identifier, binary=True)
    for _ in range(1 + known):
        content = codec.encode(call, outputs, 5)
    assert pb.ModelInferResponse.FromString(content) == expected
