"""Tensors of the protocol in JSON and in bytes: every datatype there and back, and what does not fit."""

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.errors import InferenceError
from shoal.open_inference.binary_tensors import from_binary, to_binary
from shoal.open_inference.datatypes import DATATYPES, NUMPY_DTYPES, bf16_bits, bf16_values, to_floats
from shoal.open_inference.json_tensors import from_json, to_json
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.request_schema import MAX_ELEMENTS, RequestSchema
from shoal.registry import manifest
from shoal.serve.http.codec import HttpCodec
from shoal.serve.protocol.request_limits import RequestLimits

SHAPES = arrays.array_shapes(max_dims=3, min_side=0, max_side=5)


def raw(data: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(data))


@st.composite
def tensors(draw: st.DrawFn, *, text: bool = False) -> tuple[str, np.ndarray]:
    """A datatype and an array of it; with `text`, only what JSON can say: no NaN, no infinity, UTF-8."""
    datatype = draw(st.sampled_from(DATATYPES))
    if datatype == "BYTES":
        element: st.SearchStrategy[Any] = (
            st.text(st.characters(exclude_categories=["Cs"])).map(str.encode) if text else st.binary()
        )
        return datatype, draw(arrays.arrays(object, SHAPES, elements=element, fill=st.nothing()))
    if datatype == "BF16":
        finite = st.floats(width=32, allow_nan=not text, allow_infinity=not text).filter(
            lambda value: abs(value) < 3e38
        )
        return datatype, bf16_bits(draw(arrays.arrays(np.float32, SHAPES, elements=finite)))
    options = {"allow_nan": not text, "allow_infinity": not text} if datatype.startswith("FP") else {}
    elements = arrays.from_dtype(NUMPY_DTYPES[datatype], **options)
    return datatype, draw(arrays.arrays(NUMPY_DTYPES[datatype], SHAPES, elements=elements))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tolist() == right.tolist()


@given(tensors(text=True))
def test_json_there_and_back(tensor: tuple[str, np.ndarray]) -> None:
    datatype, array = tensor
    flat = to_json("t", datatype, array)
    assert same(from_json("t", datatype, array.shape, raw(flat)), array)
    nested = np.array([*flat, None], dtype=object)[:-1].reshape(array.shape).tolist()
    if array.size:  # nested lists do not tell the dimensions behind one of size 0
        assert same(from_json("t", datatype, array.shape, raw(nested)), array)


@given(tensors())
def test_bytes_there_and_back(tensor: tuple[str, np.ndarray]) -> None:
    datatype, array = tensor
    data = bytes(to_binary(datatype, array))
    back = from_binary("t", datatype, array.shape, data)
    assert bytes(to_binary(datatype, back)) == data
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    if datatype == "BYTES":
        assert back.tolist() == array.tolist()


def test_numbers_are_not_copied() -> None:
    array = np.arange(30_000, dtype=np.float32).reshape(3, -1)
    assert np.shares_memory(np.asarray(to_binary("FP32", array)), array)
    body = b"x" + array.tobytes()  # not aligned
    read = from_binary("t", "FP32", array.shape, memoryview(body)[1:])
    assert np.shares_memory(read, np.frombuffer(body, dtype=np.uint8))
    assert np.array_equal(read, array)
    assert not read.flags.writeable


def test_any_order_in_memory_is_written_row_by_row() -> None:
    for columns in (4, 10_000):
        array = np.arange(3 * columns, dtype=np.int32).reshape(3, columns)
        assert bytes(to_binary("INT32", array.T)) == array.T.tobytes()
        assert bytes(to_binary("INT32", array.astype(">i4"))) == array.tobytes()


def test_a_false_shape_makes_nothing() -> None:
    """A hundred bytes that claim a thousand million elements cost no memory."""
    shape = (10**9,)
    tracemalloc.start()
    try:
        for read in (
            lambda: from_binary("t", "BYTES", shape, b"\0" * 100),
            lambda: from_binary("t", "FP64", shape, b"\0" * 100),
            lambda: from_json("t", "FP64", shape, raw([1.0] * 40)),
            lambda: from_json("t", "BYTES", shape, raw(["a"] * 40)),
        ):
            with pytest.raises(InferenceError):
                read()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_bf16_ties_go_to_even() -> None:
    tie_down, tie_up = np.array([0x3F808000, 0x3F818000], dtype=np.uint32).view(np.float32)
    assert bf16_bits(np.array([tie_down, tie_up])).tolist() == [0x3F80, 0x3F82]
    nan = np.array([0x7F800001, 0xFF800001], dtype=np.uint32).view(np.float32)  # whose upper bits say infinity
    assert np.isnan(bf16_values(bf16_bits(nan))).all()


@given(st.floats(-3e38, 3e38))
def test_bf16_of_a_number_is_the_nearest_to_it_and_not_to_a_float_near_it(value: float) -> None:
    for number in (np.float32(value), np.float64(value)):
        (bits,) = bf16_bits(np.array([number]))
        (nearest,) = bf16_values(np.array([bits]))
        around = bf16_values(np.array([bits - 1, bits + 1], dtype=np.uint16)) if bits & 0x7FFF else []
        distance = abs(float(nearest) - float(number))
        assert all(distance <= abs(float(each) - float(number)) for each in around if np.isfinite(each))


def test_no_float_between_makes_a_tie_of_a_double() -> None:
    beside = 1.00390625000091  # above the middle of 1 and 1.0078125, which as a float it is
    assert bf16_values(bf16_bits(np.array([beside]))).tolist() == [1.0078125]
    assert bf16_values(from_json("t", "BF16", (1,), raw([beside]))).tolist() == [1.0078125]
    assert bf16_values(to_floats(np.array([beside]), "BF16")).tolist() == [1.0078125]
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    np.testing.assert_array_equal(bf16_values(bf16_bits(odd)), odd)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("UINT8", 256), ("UINT8", -1), ("INT32", 2**31), ("INT64", 2**63), ("UINT64", 2**64), ("INT64", 0.5),
     ("INT8", True), ("BOOL", 1), ("FP16", 65520), ("FP32", 3.5e38), ("FP32", -3.5e38), ("BF16", 3.4e38),
     ("FP32", True), ("BYTES", 1)],
)  # fmt: skip
@pytest.mark.parametrize("number", [1, 100])
@pytest.mark.parametrize("nested", [False, True])
def test_a_value_beyond_its_datatype_is_422(datatype: str, value: float, number: int, nested: bool) -> None:
    data: Any = [value] * number
    with pytest.raises(InferenceError, match=f"'t'.*{datatype}") as caught:
        from_json("t", datatype, (1, number), raw([data] if nested else data))
    assert caught.value.status == 422


@pytest.mark.parametrize(("datatype", "largest"), [("FP16", 65519.0), ("FP32", 3.4028235e38), ("FP64", 1.7e308)])
@pytest.mark.parametrize("number", [1, 100])
def test_the_largest_number_is_one(datatype: str, largest: float, number: int) -> None:
    assert np.isfinite(from_json("t", datatype, (number,), raw([largest] * number))).all()


def test_nested_data_may_be_written_on_many_lines() -> None:
    data = msgspec.Raw(b"[\n" + b" " * 100 + b"[1,\n2],\n\t[3, 4]\r\n]")
    assert from_json("t", "INT8", (2, 2), data).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("shape", "data"),
    [((2, 2), [[1, 2], [3]]), ((2, 2), [[1, 2, 3, 4]]), ((4,), [[1, 2], [3, 4]]), ((2, 2), [[[1], [2]], [[3], [4]]]),
     ((2, 2), [1, 2, 3]), ((2, 2), [[1, 2], 3]), ((10**9, 10**9), [1]), ((2,), [[]]), ((2, 2), "ab"), ((2, 2), None)],
)  # fmt: skip
@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BYTES"])
def test_data_of_another_shape_is_422(shape: tuple[int, ...], data: Any, datatype: str) -> None:
    if datatype == "BYTES" and isinstance(data, list):
        data = _texts(data)
    with pytest.raises(InferenceError, match="'t'") as caught:
        from_json("t", datatype, shape, raw(data))
    assert caught.value.status == 422


def _texts(data: Any) -> Any:
    return [_texts(each) for each in data] if isinstance(data, list) else str(data)


def test_more_values_than_the_shape_has_are_not_even_read() -> None:
    many = msgspec.Raw(b"[" + b"0," * 1_000_000 + b"nonsense]")
    with pytest.raises(InferenceError, match="more values than the shape has"):
        from_json("t", "FP32", (1, 4), many)
    with pytest.raises(InferenceError, match=r"expected 1 values of BYTES \[1\], got \[2\]"):
        from_json("t", "BYTES", (1,), raw([["a"], ["b", "c"]]))


@pytest.mark.parametrize("datatype", [each for each in DATATYPES if each != "BYTES"])
def test_bytes_of_another_size_are_422(datatype: str) -> None:
    itemsize = NUMPY_DTYPES[datatype].itemsize
    for length in (0, 2 * itemsize - 1, 2 * itemsize + 1):
        with pytest.raises(InferenceError, match=f"'t'.*{2 * itemsize} bytes of {datatype}.*, got {length}"):
            from_binary("t", datatype, (2,), b"\0" * length)


def test_a_byte_that_is_no_bool_is_422() -> None:
    with pytest.raises(InferenceError, match=r"'t'.*0 and 1 for BOOL, got 2"):
        from_binary("t", "BOOL", (2,), b"\1\2")


@pytest.mark.parametrize(
    ("size", "data"),
    [(10**9, b"\0" * 100), (1, b""), (1, b"\0" * 3), (1, struct.pack("<I", 1)), (2, struct.pack("<I4s", 4, b"abcd")),
     (1, struct.pack("<I1s1s", 1, b"a", b"b")), (2, struct.pack("<IxI", 1, 2**32 - 1))],
)  # fmt: skip
def test_elements_that_do_not_add_up_are_422(size: int, data: bytes) -> None:
    with pytest.raises(InferenceError, match=f"'t'.*{size} elements of BYTES") as caught:
        from_binary("t", "BYTES", (size,), data)
    assert caught.value.status == 422


@given(st.binary(max_size=64), st.integers(0, 20))
def test_no_bytes_break_the_reader_of_elements(data: bytes, size: int) -> None:
    try:
        array = from_binary("t", "BYTES", (size,), data)
    except InferenceError:
        return
    assert bytes(to_binary("BYTES", array)) == data


def test_the_registry_and_the_protocol_have_the_same_datatypes() -> None:
    assert set(manifest.DATATYPES) == set(DATATYPES)


# -- what a request may cost: heads, the pace of bodies, shapes, compression

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
