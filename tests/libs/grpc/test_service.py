"""The methods of the service, called as `app` calls them: no socket."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from serving.fake_host import FakeHost, FakeModel, tensors
from shoal.errors import InferenceError
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import GrpcCodec, InferRequestHeader
from shoal.libs.grpc.methods import GrpcCall
from shoal.libs.grpc.request_cache import RequestLayoutCache
from shoal.libs.grpc.service import InferenceServicer, Invocation
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.messages import TensorMetadata
from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.infer_call import LARGE_BYTES
from unit.serve.test_large_tensors import COUNT, answers, gated, host


def test_parameters_of_a_policy_are_read() -> None:
    request = pb.ModelInferRequest(model_name="policy")
    request.parameters["action"].string_param = "sampled"
    request.parameters["seed"].int64_param = 3
    header = InferRequestHeader.from_message(request)
    assert (header.action, header.seed) == ("sampled", 3)


@pytest.mark.parametrize("is_raw", [False, True])
def test_an_input_of_float64_takes_float32_and_no_other_takes_another(is_raw: bool) -> None:
    wide, narrow = ([TensorMetadata("x", datatype, [-1, 2])] for datatype in ("FP64", "FP32"))

    def decode(specs: list[TensorMetadata], datatype: str) -> np.ndarray:
        request = pb.ModelInferRequest(model_name="m")
        sent = request.inputs.add(name="x", datatype=datatype, shape=[1, 2])
        if is_raw:
            request.raw_input_contents.append(np.array([0.1, 2], NUMPY_DTYPES[datatype]).tobytes())
        else:
            getattr(sent.contents, {"FP32": "fp32_contents", "FP64": "fp64_contents"}[datatype]).extend([0.1, 2])
        codec, layouts, content = GrpcCodec("m", specs, specs, 4), RequestLayoutCache(), request.SerializeToString()
        for _ in range(3):  # a third request would be read by its layout
            layouts.learn(content, request, InferRequestHeader.from_message(request), codec, codec.decode(request))
        layout = layouts.find(content)
        return (layout.decode_inputs(content) if layout else codec.decode(request)).arrays["x"]

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
        servicer.model_infer(request.SerializeToString(), Invocation({})),
        servicer.model_infer(other.SerializeToString(), Invocation({})),
        gate,
    )
    assert list(pb.ModelInferResponse.FromString(many).outputs[0].shape) == [1, 1]
    assert pb.ModelInferResponse.FromString(few).model_name == "m"


def test_a_refused_call_is_counted_with_its_address_and_model() -> None:
    access = AccessControl("the-token", [])
    servicer = InferenceServicer(FakeHost(FakeModel("m", tensors(x=("FP32", [-1, 3])))), access)
    invocation = Invocation({b"shoal-from": b"10.0.0.9", b"authorization": b"Bearer another"})
    with pytest.raises(InferenceError) as caught:
        asyncio.run(servicer.model_infer(pb.ModelInferRequest(model_name="m").SerializeToString(), invocation))
    assert caught.value.status == 401
    assert access.get_auth_failures() == (AuthFailure("", 401, 1, "10.0.0.9", "m"),)


def test_half_a_pair_of_utf_16_in_a_status_is_escaped() -> None:
    call = GrpcCall([])
    call.set_error(InferenceError(500, "no such file: \udcff.txt"))
    assert dict(call.build_trailers())[b"grpc-message"] == rb"no such file: \udcff.txt"
