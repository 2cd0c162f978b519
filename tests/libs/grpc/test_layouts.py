"""Requests of gRPC that are read by the layout of earlier ones: the same is read, and answered, as without."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from serving.fake_host import FakeHost, FakeModel, tensors
from shoal.errors import InferenceError
from shoal.libs.grpc import codec as grpc_codec
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import (
    MAX_LAYOUTS,
    MAX_LAYOUTS_PER_LENGTH,
    GrpcCodec,
    GrpcInferCall,
    RequestLayout,
    RequestLayoutCache,
)
from shoal.libs.grpc.methods import GrpcCall
from shoal.libs.grpc.service import InferenceServicer
from shoal.open_inference.binary_tensors import to_binary
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.request_schema import RequestSchema
from shoal.serve.messages.infer_call import Arrays
from shoal.serve.protocol.access import AccessControl

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
    model = FakeModel("m", tensors(x=("FP32", [-1, 3])))
    requests = []
    for number in range(5):
        request = pb.ModelInferRequest(model_name="m")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
        request.raw_input_contents.append(np.full(3, number, np.float32).tobytes())
        requests.append(request)
    answers, decoded = asked_of(FakeHost(model), *requests)
    assert decoded == 2
    for number, answer in enumerate(answers):
        (output,) = answer.outputs
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "7", "")
        assert (output.name, output.datatype, list(output.shape)) == ("x", "FP32", [1, 3])
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [number] * 3


async def test_a_layout_goes_when_a_load_has_changed_how_many_rows_a_request_may_have() -> None:
    model = FakeModel("m", tensors(x=("FP32", [-1, 3])))
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(24)])
    request.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    content = request.SerializeToString()
    servicer = InferenceServicer(FakeHost(model), AccessControl(None, []))  # type: ignore[arg-type]

    for _ in range(3):
        await servicer.model_infer(content, GrpcCall({}))
    model.options = model.options.model_copy(update={"max_batch_size": 1})
    with pytest.raises(InferenceError, match="expected 1 to 1 rows") as caught:
        await servicer.model_infer(content, GrpcCall({}))
    assert caught.value.status == 422


def test_of_the_outputs_that_are_asked_for_no_more_are_looked_at_than_the_model_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of some kilobytes, compressed, can name millions."""
    looked_at: list[str] = []

    class Counted(RequestSchema):
        def check_outputs(self, names: Iterable[str]) -> frozenset[str] | None:
            return super().check_outputs(looked_at.append(name) or name for name in names)

    monkeypatch.setattr("shoal.libs.grpc.codec.RequestSchema", Counted)
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(12)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    for _ in range(1000):
        request.outputs.add(name="x")
    with pytest.raises(InferenceError, match="asked for twice"):
        asked_of(FakeHost(FakeModel("m", tensors(x=("FP32", [-1, 3])))), request)
    assert len(looked_at) == 2


def test_a_stream_ends_at_what_is_no_message_and_nothing_behind_it_is_computed() -> None:
    model = FakeModel("m", tensors(x=("FP32", [-1, 3])))
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(12)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
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
    good, bad = (pb.ModelInferRequest(model_name="m", raw_input_contents=[each]) for each in (b"\0\1", b"\0\2"))
    for request in (good, bad):
        request.inputs.add(name="x", datatype="BOOL", shape=[1, 2])
    with pytest.raises(InferenceError, match="expected bytes of 0 and 1 for BOOL") as caught:
        asked_of(FakeHost(model), good, good, bad)
    assert caught.value.status == 422


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
