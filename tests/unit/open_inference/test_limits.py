"""What a request may cost: heads, the pace of bodies, shapes, compression."""

import gzip
import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from shoal.errors import InferenceError
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.request_schema import MAX_ELEMENTS, RequestSchema
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


def test_an_input_of_float64_takes_float32_and_no_other_takes_another() -> None:
    wide, narrow = ([TensorMetadata("x", datatype, [-1, 2])] for datatype in ("FP64", "FP32"))

    def decode(specs: list[TensorMetadata], datatype: str) -> np.ndarray:
        tensor = {"name": "x", "datatype": datatype, "shape": [1, 2], "data": [0.1, 2]}
        return HttpCodec("m", specs, specs, 4).decode(msgspec.json.encode({"inputs": [tensor]})).inputs["x"]

    for datatype, first in (("FP64", 0.1), ("FP32", np.float64(np.float32(0.1)))):
        decoded = decode(wide, datatype)
        assert decoded.dtype == np.float64
        assert decoded.tolist() == [[first, 2]]
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
