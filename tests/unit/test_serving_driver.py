"""The load generator's reading of answers, its arrivals, and the oracle: what a measurement rests on."""

import numpy as np
import pytest
from benchmarks.serving.driver import Plan, arrivals
from benchmarks.serving.exchange import (
    DATA,
    END_STREAM,
    HEADERS,
    SETTINGS,
    STREAM_PATH,
    Answer,
    Grpc,
    GrpcStream,
    Http1,
)
from benchmarks.serving.grpc_call import message
from benchmarks.serving.oracle import FIXED_S, MAX_ROWS, ROW_S, with_window, work_conserving

from shoal.libs.grpc import inference_pb2

BODY = b'{"a": 1}'
ANSWER = b"HTTP/1.1 200 OK\r\nShoal-Model-Version: 7\r\ncontent-length: 8\r\n\r\n" + BODY


def fed(exchange: Http1 | Grpc, pieces: list[bytes]) -> list[Answer]:
    return [answer for piece in pieces if (answer := exchange.feed(piece)[0]) is not None]


@pytest.mark.parametrize("cut", range(1, len(ANSWER)))
def test_an_answer_in_two_pieces(cut: int) -> None:
    http1 = Http1()
    for _ in range(2):  # on one connection
        assert fed(http1, [ANSWER[:cut], ANSWER[cut:]]) == [Answer("ok", 7, BODY)]
        assert not http1.begun


def test_refusals_long_bodies_chunks_and_the_end_of_a_connection() -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    assert fed(Http1(), [head]) == [Answer("refused 503", 0, b"", closing=True)]
    long = b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000
    http1 = Http1()
    assert [answer.kind for answer in fed(http1, [long[:50_000], long[50_000:150_000], long[150_000:]])] == ["ok"]
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    assert [answer.kind for answer in fed(http1, [chunked[:60], chunked[60:]])] == ["ok"]
    http1.feed(ANSWER[:-1])
    assert http1.begun


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


def test_arrivals_are_poisson_and_the_same_for_a_seed() -> None:
    plan = Plan("", 1, [], "", seconds=100.0, connections=1, rate=200.0, seed=3)
    due_s = list(arrivals(plan, 10.0))
    assert due_s == list(arrivals(plan, 10.0))
    gaps_s = np.diff(due_s)
    assert 10.0 < due_s[0] < due_s[-1] < 110.0
    assert len(due_s) == pytest.approx(20_000, abs=600)  # four standard deviations
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.05)


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
