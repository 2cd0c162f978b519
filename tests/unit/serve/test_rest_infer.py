"""Inference over HTTP: JSON, binary tensors, some of each; what was asked for beside the tensors; compression."""

import gzip
import json
import re
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registered import tensors
from serving.asgi import Client, Reply, client, refused
from serving.fake_host import FakeHost, FakeModel
from shoal.open_inference.datatypes import DATATYPES
from shoal.serve.messages.infer_call import Arrays
from shoal.serve.spec.model_options import ModelOptions

X = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]]
X_BYTES = np.array(X, dtype="<f4").tobytes()


def double(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": inputs["x"] * 2, "n": np.arange(len(inputs["x"]))}


def two_inputs(**options: Any) -> FakeModel:
    inputs = tensors(x=[-1, 3], mask=("BOOL", [-1]))
    outputs = tensors(y=[-1, 3], n=("INT64", [-1]))
    return FakeModel("m", inputs, outputs, double, options=ModelOptions(**options))


def subject(model: FakeModel | None = None, **settings: Any) -> Client:
    return client(FakeHost(model or two_inputs()), **settings)


def x(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6.5], **changes}


def mask(**changes: Any) -> dict[str, Any]:
    return {"name": "mask", "shape": [2], "datatype": "BOOL", "data": [True, False], **changes}


def binary_x(size: object = 24, **changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": size}, **changes}


def request(*inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": list(inputs or (x(), mask())), **more}


def test_an_answer_names_its_version_in_body_and_header() -> None:
    reply = subject().infer(request(id="abc"))
    assert (reply.status, reply.headers["shoal-model-version"]) == (200, "7")
    assert reply.body == {
        "model_name": "m",
        "model_version": "7",
        "id": "abc",
        "outputs": [
            {"name": "y", "shape": [2, 3], "datatype": "FP32", "data": [2.0, 4.0, 6.0, 8.0, 10.0, 13.0]},
            {"name": "n", "shape": [2], "datatype": "INT64", "data": [0, 1]},
        ],
    }


def test_nested_data_is_the_same_as_flat_in_any_order() -> None:
    flat = subject().infer(request()).body
    assert subject().infer(request(x(data=X), mask())).body == flat
    assert subject().infer(request(mask(), x())).body == flat


def test_a_model_is_given_what_was_asked_for_and_nothing_else() -> None:
    model = two_inputs()
    headers = {
        "shoal-track": "candidate",
        "shoal-sticky": "user-1",
        "traceparent": "00-ab-cd-01",
    }  # nothing is traced here
    reply = subject(model, token="t").infer(
        request(outputs=[{"name": "n"}]),
        "/v2/models/m/versions/7/infer",
        headers={"authorization": "Bearer t", **headers},
    )
    assert reply.status == 200
    (call,) = model.calls
    assert {name: (array.dtype.name, array.shape) for name, array in call.inputs.items()} == {
        "x": ("float32", (2, 3)),
        "mask": ("bool", (2,)),
    }
    assert (call.num_rows, call.version, call.track, call.sticky) == (2, 7, "candidate", "user-1")
    assert (call.tenant, call.outputs, call.trace) == ("administrator", {"n"}, None)
    subject(model := two_inputs()).infer(request())
    (call,) = model.calls
    seen = call.version, call.deadline_s, call.track, call.sticky, call.outputs, call.trace
    assert seen == (None, None, "", "", None, None)


@pytest.mark.parametrize(
    ("parameters", "headers", "default_s", "within_s"),
    [
        ({"timeout": 5_000_000}, {}, None, 5),
        ({}, {"shoal-deadline-ms": "7000"}, None, 7),
        ({}, {"shoal-deadline-ms": "7000.5"}, None, 7.0005),
        ({"timeout": 9_000_000}, {"shoal-deadline-ms": "7000"}, None, 7),
        ({"timeout": 9_000_000}, {}, 3, 9),
        ({"timeout": 0, "priority": 3}, {}, 3, 3),
    ],
)
def test_deadlines(
    parameters: dict[str, Any], headers: dict[str, str], default_s: float | None, within_s: float
) -> None:
    model = two_inputs(deadline_s=default_s)
    before_s = time.monotonic()
    assert subject(model).infer(request(parameters=parameters), headers=headers).status == 200
    deadline_s = model.calls[0].deadline_s
    assert deadline_s is not None
    assert before_s + within_s <= deadline_s <= time.monotonic() + within_s


@pytest.mark.parametrize(
    ("parameters", "headers", "word"),
    [
        ({"timeout": -1}, {}, "timeout = '-1'"),
        ({"timeout": "soon"}, {}, "'soon'"),
        ({"timeout": True}, {}, "True"),
        ({"timeout": 1.5}, {}, "1.5"),
        ({"timeout": 10**300}, {}, "timeout"),
        ({}, {"shoal-deadline-ms": "soon"}, "'soon'"),
        ({}, {"shoal-deadline-ms": "nan"}, "'nan'"),
        ({}, {"shoal-deadline-ms": "1_000"}, "'1_000'"),
        ({}, {"shoal-deadline-ms": "0"}, "'0'"),
        ({}, {"shoal-deadline-ms": "1e300"}, "1e300"),
        ({}, {"shoal-track": "left"}, "'left'"),
        ({}, {"shoal-sticky": "s" * 257}, "257"),
    ],
)
def test_wishes_that_mean_nothing_are_400(parameters: dict[str, Any], headers: dict[str, str], word: str) -> None:
    refused(subject().infer(request(parameters=parameters), headers=headers), 400, word)


def test_a_version_is_answered_by_itself_or_not_at_all() -> None:
    model = FakeModel("m", versions=(3, 7))
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
    reply = subject(model).infer(body, "/v2/models/m/versions/3/infer")
    assert (reply.body["model_version"], reply.headers["shoal-model-version"]) == ("3", "3")
    refused(subject(model).infer(body, "/v2/models/m/versions/6/infer"), 404, "'6'", "3, 7")
    refused(subject(model).infer(body, "/v2/models/other/infer"), 404, "'other'", "'m'")


def test_only_the_outputs_that_are_asked_for() -> None:
    reply = subject().infer(request(outputs=[{"name": "n", "parameters": {"binary_data": False}}]))
    assert [output["name"] for output in reply.body["outputs"]] == ["n"]
    assert len(subject().infer(request(outputs=[])).body["outputs"]) == 2
    refused(subject().infer(request(outputs=[{"name": "z"}])), 422, "'z'", "'y', 'n'")
    refused(subject().infer(request(outputs=[{"name": "n"}] * 10_000)), 422, "output 'n' was asked for twice")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"inputs": {}}', b"{}", b'{"inputs": [' + b"[" * 100_000,
        b'{"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": ' + b"[" * 100_000,
        b'{"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32"}]}',
        b'{"inputs": [{"name": "x", "shape": "1", "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": 1, "shape": [1], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1e2], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1' + b"0" * 5000 + b'], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [], "parameters": {"a": null}}',
    ],
)  # fmt: skip
def test_what_is_not_a_request_is_400(body: bytes) -> None:
    refused(subject().infer(body), 400, "not an inference request")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([x(shape=[2, 4]), mask()], ["'x'", "FP32 [-1, 3]", "FP32 [2, 4]"]),
        ([x(shape=[]), mask()], ["'x'", "[-1, 3]", "[]"]),
        ([x(shape=[0, 3], data=[]), mask()], ["'x'", "1 to 64 rows", "[0, 3]"]),
        ([x(shape=[65, 3]), mask()], ["'x'", "1 to 64 rows", "[65, 3]"]),
        ([x(shape=[10**9, 3]), mask()], ["'x'", "1 to 64 rows", "[1000000000, 3]"]),
        ([x(shape=[1] * 10_000), mask()], ["'x'", "[1, 1, 1, 1, 1, 1, 1, 1, ...]"]),
        ([x(datatype="FP64"), mask()], ["'x'", "FP32", "FP64"]),
        ([x(datatype="NOPE"), mask()], ["'x'", "FP32", "NOPE"]),
        ([x(data=[1, 2, 3]), mask()], ["'x'", "6 values", "[3]"]),
        ([x(data=["1", 2, 3, 4, 5, 6]), mask()], ["'x'", "FP32"]),
        ([x(data=[1e39] * 6), mask()], ["'x'", "beyond FP32"]),
        ([x(data=7), mask()], ["'x'", "array"]),
        ([x(), mask(data=[0, 1])], ["'mask'", "BOOL"]),
        ([x(), mask(shape=[3], data=[True] * 3)], ["'mask'", "2 rows", "3"]),
        ([x()], ["'mask'", "missing", "BOOL [-1]"]),
        ([x(), mask(), {**x(), "name": "z"}], ["'z'", "unknown", "'x', 'mask'"]),
        ([x(), x(), mask()], ["'x'", "twice"]),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_422_and_named(inputs: list[dict[str, Any]], words: list[str]) -> None:
    refused(subject().infer(request(*inputs)), 422, *words)


def test_binary_in_and_out() -> None:
    model = two_inputs()
    binary_mask = {"name": "mask", "shape": [2], "datatype": "BOOL", "parameters": {"binary_data_size": 2}}
    wanted = {"inputs": [binary_x(), binary_mask], "parameters": {"binary_data_output": True}, "id": "i"}
    reply = subject(model).binary(wanted, X_BYTES + b"\1\0")
    header, rest = reply.tensors
    assert header == {
        "model_name": "m",
        "model_version": "7",
        "id": "i",
        "outputs": [
            {"name": "y", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}},
            {"name": "n", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 16}},
        ],
    }
    assert rest == (np.array(X, dtype="<f4") * 2).tobytes() + np.arange(2, dtype="<i8").tobytes()
    assert model.calls[0].inputs["mask"].tolist() == [True, False]
    assert not model.calls[0].inputs["x"].flags.owndata  # a view of the body


def test_json_and_binary_mixed_both_ways() -> None:
    wanted = {
        "inputs": [mask(), binary_x()],
        "outputs": [{"name": "n", "parameters": {"binary_data": True}}, {"name": "y"}],
    }
    header, rest = subject().binary(wanted, X_BYTES).tensors
    y, n = header["outputs"]
    assert y["data"] == [2.0, 4.0, 6.0, 8.0, 10.0, 13.0]
    assert ("data" in n, rest) == (False, np.arange(2, dtype="<i8").tobytes())

    overridden = {
        "inputs": [x(), mask()],
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "n", "parameters": {"binary_data": False}}, {"name": "y"}],
    }
    header, rest = subject().infer(overridden).tensors
    assert ([output.get("data") for output in header["outputs"]], len(rest)) == ([None, [0, 1]], 24)


def test_a_large_answer_goes_out_as_views_of_its_arrays() -> None:
    large = np.arange(60_000, dtype=np.float32).reshape(1, -1)
    model = FakeModel("m", tensors(x=[-1, 1]), tensors(y=[-1, 60_000]), lambda inputs: {"y": large})
    caller = subject(model)
    one = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    reply = caller.infer(request(one, parameters={"binary_data_output": True}))
    assert np.array_equal(np.frombuffer(reply.tensors[1], dtype=np.float32), large[0])
    assert np.shares_memory(np.asarray(caller.sent[2]["body"]), large)


@pytest.mark.parametrize(
    ("header", "rest", "status", "words"),
    [
        ({"inputs": [binary_x(24), mask()]}, X_BYTES[:-1], 400, ["'x'", "binary_data_size = 24", "23"]),
        ({"inputs": [binary_x(20), mask()]}, X_BYTES, 422, ["'x'", "24 bytes", "20"]),
        ({"inputs": [binary_x(24), mask()]}, X_BYTES + b"more", 400, ["4 bytes"]),
        ({"inputs": [binary_x(-1), mask()]}, X_BYTES, 400, ["'x'", "-1"]),
        ({"inputs": [binary_x(2**70), mask()]}, X_BYTES, 400, ["'x'"]),
        ({"inputs": [binary_x("24"), mask()]}, X_BYTES, 400, ["'x'", "24"]),
        ({"inputs": [binary_x(True), mask()]}, X_BYTES, 400, ["'x'", "True"]),
        ({"inputs": [binary_x(24, data=[1.0]), mask()]}, X_BYTES, 400, ["'x'", "one of both"]),
        ({"inputs": [binary_x(24, parameters={}), mask()]}, X_BYTES, 400, ["'x'", "one of both"]),
        ({"inputs": [binary_x(24, shape=[10**9, 3]), mask()]}, X_BYTES, 422, ["'x'", "rows"]),
        ({"inputs": [x(), mask()], "parameters": {"binary_data_output": 1}}, b"", 400, ["binary_data_output"]),
        (request(outputs=[{"name": "y", "parameters": {"binary_data": "yes"}}]), b"", 400, ["binary_data = yes"]),
        (request(outputs=[{"name": "y", "parameters": {"classification": 3}}]), b"", 400, ["'y'", "classification"]),
        ({"inputs": [x(parameters={"shared_memory_region": "r"}), mask()]}, b"", 400, ["'x'", "shared_memory_region"]),
    ],
)  # fmt: skip
def test_binary_bodies_that_do_not_add_up(header: dict[str, Any], rest: bytes, status: int, words: list[str]) -> None:
    refused(subject().binary(header, rest), status, *words)


def test_a_header_longer_than_the_body_is_400() -> None:
    refused(subject().infer(request(), headers={"inference-header-content-length": "9999"}), 400, "9999")
    refused(subject().infer({"inputs": [binary_x(), mask()]}), 400, "'x'", "binary_data_size = 24")


def test_bytes_in_json_and_binary() -> None:
    model = FakeModel("m", tensors(t=("BYTES", [-1, 2])))
    tensor = {"name": "t", "shape": [1, 2], "datatype": "BYTES"}
    for data in (["héllo", ""], [["héllo", ""]]):
        reply = subject(model).infer(request({**tensor, "data": data}))
        assert reply.body["outputs"][0]["data"] == ["héllo", ""]
    packed = struct.pack("<I2sI1s", 2, b"\xff\0", 1, b"a")
    wanted = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(packed)}}]}
    assert subject(model).binary({**wanted, "parameters": {"binary_data_output": True}}, packed).tensors[1] == packed
    refused(subject(model).binary(wanted, packed), 422, "output 't'", "binary_data")
    for bad in (packed[:-1], packed + b"x", struct.pack("<II", 2**32 - 1, 0), b"\0" * 7):
        wanted["inputs"][0]["parameters"] = {"binary_data_size": len(bad)}
        refused(subject(model).binary(wanted, bad), 422, "'t'", "BYTES")


@pytest.mark.parametrize(
    ("model", "body", "seen"),
    [
        (FakeModel(), np.array([1, 2, 3], dtype="<f4").tobytes(), [[1.0, 2.0, 3.0]]),
        (FakeModel("m", tensors(x=("INT16", [-1, -1, 2]))), b"\1\0\2\0\3\0\4\0", [[[1, 2], [3, 4]]]),
        (FakeModel("m", tensors(x=("BYTES", [-1, 1]))), b"\xffany", [[b"\xffany"]]),
    ],
)
def test_a_raw_body_is_one_row_of_the_only_input(model: FakeModel, body: bytes, seen: list[Any]) -> None:
    reply = subject(model).post("/v2/models/m/infer", body, headers={"Inference-Header-Content-Length": "0"})
    assert model.calls[0].inputs["x"].tolist() == seen
    header, _ = reply.tensors
    assert header["outputs"][0]["shape"][0] == 1


@pytest.mark.parametrize(
    ("model", "body", "status"),
    [
        (FakeModel(), b"", 422),
        (FakeModel(), b"12345", 422),
        (two_inputs(), b"1234", 400),
        (FakeModel("m", tensors(x=[-1, -1, -1])), b"1234", 400),
        (FakeModel("m", tensors(x=("BYTES", [-1, 2]))), b"1234", 400),
    ],
)
def test_a_raw_body_that_does_not_tell_its_shape(model: FakeModel, body: bytes, status: int) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    refused(subject(model).post("/v2/models/m/infer", body, headers=headers), status)


def test_a_variable_dimension_may_be_empty_but_the_batch_may_not() -> None:
    model = FakeModel("m", tensors(x=[-1, -1]))
    empty = {"name": "x", "shape": [2, 0], "datatype": "FP32"}
    for data in ([], [[], []]):
        assert subject(model).infer(request({**empty, "data": data})).body["outputs"][0]["shape"] == [2, 0]
    wanted = {"inputs": [{**empty, "parameters": {"binary_data_size": 0}}]}
    assert subject(model).binary(wanted, b"").status == 200
    refused(subject(model).infer(request({**empty, "shape": [0, 2], "data": []})), 422, "'x'", "1 to 64 rows")


WIDE = {"name": "x", "shape": [1, 1000], "datatype": "FP32", "data": [1.5] * 1000}


def wide(**settings: Any) -> Client:
    return subject(FakeModel("m", tensors(x=[-1, 1000])), **settings)


@pytest.mark.parametrize(("coding", "pack", "unpack"), [
    ("gzip", gzip.compress, gzip.decompress), ("deflate", zlib.compress, zlib.decompress),
])  # fmt: skip
def test_compressed_bodies(coding: str, pack: Any, unpack: Any) -> None:
    body = json.dumps(request(WIDE)).encode()
    headers = {"content-encoding": coding, "accept-encoding": coding}
    reply = wide(max_body_bytes=10_000).infer(pack(body), headers=headers)
    assert reply.headers["content-encoding"] == coding
    assert json.loads(unpack(reply.content))["outputs"][0]["data"] == [1.5] * 1000
    refused(wide(max_body_bytes=1000).infer(pack(body), headers=headers), 413, "1000")
    assert wide().infer(body, headers={"content-encoding": "identity"}).status == 200
    binary = wide().infer(request(WIDE, parameters={"binary_data_output": True}), headers={"accept-encoding": coding})
    plain = Reply(200, binary.headers, unpack(binary.content))  # whose header of a length is of the plain answer
    assert plain.tensors[1] == np.full(1000, 1.5, dtype="<f4").tobytes()


def test_answers_are_plain_when_they_are_small_and_for_who_lists_what_it_knows() -> None:
    assert "content-encoding" not in subject().infer(request(), headers={"accept-encoding": "gzip"}).headers
    for accepted in ("gzip, deflate", "br", "identity", ""):
        reply = wide().infer(request(WIDE), headers={"accept-encoding": accepted})
        assert "content-encoding" not in reply.headers
        assert reply.body["outputs"][0]["shape"] == [1, 1000]


@pytest.mark.parametrize("shape", [[2, -1, 2], [-2, -1, 2], [1, 2, 2], [3, 2, 2], [2, 2, 3], [2, 2]])
def test_dimensions_that_the_model_fixes_are_fixed_and_none_is_negative(shape: list[int]) -> None:
    model = FakeModel("m", tensors(x=[2, -1, 2]))
    one = {"name": "x", "shape": shape, "datatype": "FP32", "data": []}
    refused(subject(model).infer(request(one)), 422, "input 'x': expected FP32 [2, -1, 2], got FP32", str(shape))
    right = {**one, "shape": [2, 1, 2], "data": [1, 2, 3, 4]}
    assert subject(model).infer(request(right)).status == 200
    model = FakeModel("m", tensors(x=("INT8", [2, 2])))
    one = {"name": "x", "shape": [1, 2], "datatype": "INT8", "data": [1, 2]}
    refused(subject(model).infer(request(one)), 422, "expected INT8 [2, 2], got INT8 [1, 2]")  # a batch of two


# -- whatever comes, the answer is the protocol's: never a 500, never an exception; a tensor that is wrong is named

MODEL = FakeModel(
    "m",
    tensors(x=[-1, 2], flag=("BOOL", [-1]), text=("BYTES", [-1, -1]), half=("BF16", [-1])),
    tensors(x=[-1, 2], text=("BYTES", [-1, -1])),
)
NAMES = ("x", "flag", "text", "half")
SUBJECT = client(FakeHost(MODEL), max_body_bytes=4096)
NAMED = re.compile(r"^(input|output) '")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
PARAMETERS = st.dictionaries(
    st.sampled_from(["binary_data_size", "binary_data", "binary_data_output", "timeout", "priority", "odd"]),
    st.booleans() | st.integers(-4, 40) | st.floats() | st.text(max_size=3),
    max_size=3,
)
SIZES = st.integers(-2, 4) | st.just(10**12)


def tensor(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """An input that is nearly right."""
    right: dict[str, dict[str, Any]] = {
        "x": {"shape": [2, 2], "datatype": "FP32", "data": [1, 2.5, 3, 4]},
        "flag": {"shape": [2], "datatype": "BOOL", "data": [True, False]},
        "text": {"shape": [2, 1], "datatype": "BYTES", "data": ["a", "é"]},
        "half": {"shape": [2], "datatype": "BF16", "data": [0.1, -3e38]},
    }
    wrong = {
        "shape": st.lists(SIZES, max_size=3) | VALUES,
        "datatype": st.sampled_from(DATATYPES) | VALUES,
        "data": VALUES,
        "parameters": PARAMETERS | VALUES,
        "name": st.text(max_size=3) | VALUES,
    }
    return st.fixed_dictionaries({}, optional=wrong).map(lambda changes: {"name": name, **right[name], **changes})


OUTPUT = st.fixed_dictionaries({"name": st.sampled_from(["x", "text", "z"])}, optional={"parameters": PARAMETERS})
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.tuples(*map(tensor, NAMES)).map(list)},
    optional={
        "id": st.text(max_size=3) | VALUES,
        "parameters": PARAMETERS | VALUES,
        "outputs": st.lists(OUTPUT) | VALUES,
    },
)
# Each input's shape, datatype, and bytes that fit.
FRAME: dict[str, tuple[list[int], str, bytes]] = {
    "x": ([2, 2], "FP32", b"\0" * 16),
    "flag": ([2], "BOOL", b"\1\0"),
    "text": ([2, 1], "BYTES", b"\1\0\0\0a\1\0\0\0b"),
    "half": ([2], "BF16", b"\0" * 4),
}


def framed(sizes: dict[str, int], shapes: dict[str, list[int]], rest: bytes) -> Reply:
    """The answer to a binary request that claims other `sizes` and `shapes` than fit, and goes on with `rest`."""
    inputs = [
        {
            "name": name,
            "shape": shapes.get(name, shape),
            "datatype": datatype,
            "parameters": {"binary_data_size": sizes.get(name, len(data))},
        }
        for name, (shape, datatype, data) in FRAME.items()
    ]
    return SUBJECT.binary({"inputs": inputs, "parameters": {"binary_data_output": True}}, rest)


def judged(reply: Reply) -> None:
    if reply.status == 200:
        return
    assert reply.status in (400, 413, 422), reply.content
    assert list(reply.body) == ["error"]
    if reply.status == 422:
        assert NAMED.match(reply.body["error"]), reply.body


@given(REQUESTS)
def test_requests_that_are_nearly_right(request: dict[str, Any]) -> None:
    judged(SUBJECT.infer(request))


@given(VALUES)
def test_any_json(value: Any) -> None:
    for path in ("/v2/models/m/infer", "/v2/repository/index", "/v2/repository/models/m/load", "/shoal/v1/rollout"):
        reply = SUBJECT.post(path, json.dumps(value).encode())
        assert reply.status in (200, 400, 404, 422), reply.content


@given(st.binary(max_size=200), st.sampled_from(["", "0", "1", "50", "200"]))
def test_any_bytes(body: bytes, header_length: str) -> None:
    headers = {"inference-header-content-length": header_length} if header_length else {}
    judged(SUBJECT.infer(body, headers=headers))


@given(
    st.dictionaries(st.sampled_from(NAMES), st.integers(-1, 40) | st.just(2**63)),
    st.dictionaries(st.sampled_from(NAMES), st.lists(SIZES, max_size=3)),
    st.binary(max_size=80),
)
def test_binary_frames_that_are_nearly_right(sizes: dict[str, int], shapes: dict[str, list[int]], rest: bytes) -> None:
    judged(framed(sizes, shapes, rest))


@given(
    st.dictionaries(st.sampled_from(NAMES), st.lists(SIZES, max_size=3), max_size=1),
    st.binary(max_size=32),
    st.integers(0, 31),
)
def test_binary_frames_that_add_up(shapes: dict[str, list[int]], noise: bytes, at: int) -> None:
    """Some bytes of a right frame are overwritten: every length still fits."""
    right = b"".join(data for _, _, data in FRAME.values())
    judged(framed({}, shapes, (right[:at] + noise + right[at + len(noise) :])[: len(right)]))


def test_what_is_right_is_answered() -> None:
    assert framed({}, {}, b"".join(data for _, _, data in FRAME.values())).status == 200
