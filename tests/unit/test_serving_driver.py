"""The load generator's reading of gRPC, and the oracle: what a measurement rests on."""

import numpy as np
import pytest
from benchmarks.serving.exchange import (
    DATA,
    END_STREAM,
    HEADERS,
    SETTINGS,
    STREAM_PATH,
    Answer,
    Grpc,
    GrpcStream,
)
from benchmarks.serving.grpc_call import message
from benchmarks.serving.oracle import FIXED_S, MAX_ROWS, ROW_S, with_window, work_conserving

from shoal.libs.grpc import inference_pb2


def fed(exchange: Grpc, pieces: list[bytes]) -> list[Answer]:
    return [answer for piece in pieces if (answer := exchange.feed(piece)[0]) is not None]


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def test_a_grpc_call_succeeds_when_a_message_came_before_its_end() -> None:
    grpc = Grpc("127.0.0.1:1", "/a/b")
    data, trailers = frame(DATA, 0, 1, b"\0\0\0\0\2ok"), frame(HEADERS, END_STREAM, 1, b"")
    assert grpc.feed(frame(SETTINGS, 0, 0, b"")) == (None, frame(SETTINGS, 1, 0, b""))
    grpc.request(b"")
    assert [answer.kind for answer in fed(grpc, [data[:5], data[5:] + trailers[:3], trailers[3:]])] == ["ok"]
    grpc.request(b"")
    assert [answer.kind for answer in fed(grpc, [frame(HEADERS, END_STREAM, 3, b"")])] == ["refused grpc"]


def test_a_stream_is_a_message_for_a_message() -> None:
    grpc = GrpcStream("127.0.0.1:1", STREAM_PATH)
    assert grpc.request(b"ask") == frame(DATA, 0, 1, b"\0\0\0\0\3ask")
    good, bad = b"\0\0\0\0\3\x12\x01m", b"\0\0\0\0\3\x0a\x01e"
    data = frame(HEADERS, 0, 1, b"") + frame(DATA, 0, 1, good[:4]) + frame(DATA, 0, 1, good[4:])
    assert [answer.kind for answer in fed(grpc, [data[:12], data[12:20], data[20:]])] == ["ok"]
    assert [answer.kind for answer in fed(grpc, [frame(DATA, 0, 1, bad)])] == ["refused grpc"]
    assert fed(grpc, [frame(HEADERS, END_STREAM, 1, b"")]) == [Answer("refused grpc", 0, b"", closing=True)]


def test_the_message_by_hand_is_the_protocols() -> None:
    x = np.arange(300, dtype=np.float32).reshape(1, 300)
    request = inference_pb2.ModelInferRequest.FromString(message("m", "FP32", x))
    [tensor] = request.inputs
    assert (request.model_name, tensor.name, tensor.datatype, list(tensor.shape)) == ("m", "x", "FP32", [1, 300])
    assert request.raw_input_contents[0] == x.tobytes()


def test_the_oracle_by_hand() -> None:
    """The first goes alone; the two that come meanwhile go together; one that finds nobody goes at once."""
    one, two = FIXED_S + ROW_S, FIXED_S + 2 * ROW_S
    expected = [one, one - 0.001 + two, one - 0.002 + two, one]
    assert work_conserving([0.0, 0.001, 0.002, 1.0]).tolist() == pytest.approx(expected)
    full = work_conserving([0.0] * (MAX_ROWS + 1))
    assert full[-1] == pytest.approx(full[0] + one)
    assert with_window([0.0, 1.0], 0.05).tolist() == pytest.approx([0.05 + one] * 2)
    many = np.cumsum(np.random.default_rng(0).exponential(0.004, 500)).tolist()
    assert with_window(many, 0.0).tolist() == pytest.approx(work_conserving(many).tolist())
