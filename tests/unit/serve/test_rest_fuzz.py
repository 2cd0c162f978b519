"""Whatever comes, the answer is the protocol's: never a 500, never an exception; a tensor that is wrong is named."""

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from registered import tensors
from serving.asgi import Reply, client
from serving.fake_host import FakeHost, FakeModel
from shoal.open_inference.datatypes import DATATYPES

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
