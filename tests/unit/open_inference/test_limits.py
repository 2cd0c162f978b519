"""What a request may cost: heads, the pace of bodies, shapes, compression."""

import gzip
import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from shoal.errors import InferenceError
from shoal.open_inference import inference_pb2 as pb
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.request_schema import MAX_ELEMENTS, RequestSchema
from shoal.serve.grpc.codec import GrpcCodec, InferRequestHeader
from shoal.serve.grpc.request_cache import RequestLayoutCache
from shoal.serve.http.codec import HttpCodec
from shoal.serve.protocol.request_limits import RequestLimits

LIMITS = RequestLimits(max_body_bytes=100, max_headers=3, max_header_bytes=40, max_path_chars=10)


def refused(call: Callable[[], object]) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        call()
    return caught.value


def test_a_head_within_its_limits_passes_and_each_limit_has_its_status() -> None:
    headers = [(b"a", b"b" * 10)] * 3
    LIMITS.check_head("/v2/health", headers)
    assert refused(lambda: LIMITS.check_head("/v2/health/", headers)).status == 414
    assert refused(lambda: LIMITS.check_head("/", [*headers, (b"", b"")])).status == 431
    error = refused(lambda: LIMITS.check_head("/", [(b"a", b"b" * 40)]))
    assert error.status == 431
    assert "41 bytes" in str(error)


def test_no_tensor_of_open_size_has_more_elements_than_allowed() -> None:
    inputs = [TensorMetadata("x", "FP32", [-1, -1]), TensorMetadata("y", "FP32", [-1, 1 << 25])]
    expectation = RequestSchema(inputs, inputs, max_rows=4)
    expectation.check_tensor("x", "FP32", [4, MAX_ELEMENTS // 4], {})
    expectation.check_tensor("y", "FP32", [4, 1 << 25], {})  # as its model wants it
    error = refused(lambda: expectation.check_tensor("x", "FP32", [1, 1 << 62], {}))
    assert error.status == 413
    assert "'x'" in str(error)


def test_no_size_is_excused_by_another_that_is_zero() -> None:
    inputs = [TensorMetadata("x", "FP32", [-1, -1, -1])]
    expectation = RequestSchema(inputs, inputs, max_rows=4)
    expectation.check_tensor("x", "FP32", [4, 0, MAX_ELEMENTS // 4], {})
    assert refused(lambda: expectation.check_tensor("x", "FP32", [1, 0, 2**63 - 1], {})).status == 413


@pytest.mark.parametrize("encoding", ["JSON", "gRPC", "raw gRPC"])
def test_an_input_of_float64_takes_float32_and_no_other_takes_another(encoding: str) -> None:
    wide, narrow = ([TensorMetadata("x", datatype, [-1, 2])] for datatype in ("FP64", "FP32"))

    def decode(specs: list[TensorMetadata], datatype: str) -> np.ndarray:
        if encoding == "JSON":
            tensor = {"name": "x", "datatype": datatype, "shape": [1, 2], "data": [0.1, 2]}
            return HttpCodec("m", specs, specs, 4).decode(msgspec.json.encode({"inputs": [tensor]})).inputs["x"]
        request = pb.ModelInferRequest(model_name="m")
        sent = request.inputs.add(name="x", datatype=datatype, shape=[1, 2])
        if encoding == "gRPC":
            getattr(sent.contents, {"FP32": "fp32_contents", "FP64": "fp64_contents"}[datatype]).extend([0.1, 2])
        else:
            request.raw_input_contents.append(np.array([0.1, 2], NUMPY_DTYPES[datatype]).tobytes())
        codec, layouts, content = GrpcCodec("m", specs, specs, 4), RequestLayoutCache(), request.SerializeToString()
        for _ in range(3):  # a third request would be read by its layout
            layouts.learn(content, request, InferRequestHeader.from_message(request), codec, codec.decode(request))
        layout = layouts.find(content)
        return (layout.decode_inputs(content) if layout else codec.decode(request)).arrays["x"]

    for datatype, first in (("FP64", 0.1), ("FP32", np.float64(np.float32(0.1)))):
        found = decode(wide, datatype)
        assert found.dtype == np.float64
        assert found.tolist() == [[first, 2]]
    assert decode(narrow, "FP32").dtype == np.float32
    assert "expected FP32 [-1, 2], got FP64 [1, 2]" in str(refused(lambda: decode(narrow, "FP64")))


def test_what_arrives_fast_enough_has_time() -> None:
    assert LIMITS.body_deadline_s(0) == 10.0
    assert LIMITS.body_deadline_s(32 * 1024 * 6) == 16.0


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"Deflate", zlib.compress)])
def test_compressed_bodies(encoding: bytes, compress: Callable[[bytes], bytes]) -> None:
    assert LIMITS.decompress(compress(b"x" * 100), encoding) == b"x" * 100
    assert refused(lambda: LIMITS.decompress(compress(b"x" * 10_000_000), encoding)).status == 413
    assert refused(lambda: LIMITS.decompress(compress(b"x" * 100)[:-6], encoding)).status == 400
    assert refused(lambda: LIMITS.decompress(b"no such thing", encoding)).status == 400


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"Deflate", zlib.compress)])
@pytest.mark.parametrize("is_compressed", [False, True])  # the second member of a gzip file too: no client sends one
def test_nothing_may_follow_a_compressed_body(
    encoding: bytes, compress: Callable[[bytes], bytes], is_compressed: bool
) -> None:
    behind = compress(b"x") if is_compressed else b"x"
    error = refused(lambda: LIMITS.decompress(compress(b"x" * 100) + behind, encoding))
    assert error.status == 400
    assert f"{len(behind)} bytes after" in str(error)


def test_another_encoding_is_refused() -> None:
    error = refused(lambda: LIMITS.decompress(b"", b"br"))
    assert error.status == 415
    assert "'br'" in str(error)
