"""`shoal bench`: when requests are sent, what is made of their answers, and of an endpoint that stalls or fails."""

import asyncio
import itertools
import json
import socket
import socketserver
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import rl_setting
import typed
from answering import run_app, run_server
from certificates import Authority
from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.errors import InferenceError
from shoal.libs.bench.gateway import make_segment
from shoal.libs.bench.sender import INCOMPLETE, LOST, OK, UNANSWERED, LoadSender, draw_arrivals
from shoal.wire import (
    ExperienceSpec,
    ExtraSpec,
    MessageLimits,
    SegmentMessage,
    TensorSpec,
    decode,
    pack_segment,
    unpack_segment,
)

ANSWER = b"HTTP/1.1 200 OK\r\nShoal-Model-Version: 7\r\ncontent-length: 3\r\n\r\nabc"
REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
STALL_S = 0.5


def read(*pieces: bytes) -> tuple[str, str, bytes, bool]:
    """The answer in these bytes, of which each piece comes by itself."""

    async def exchange() -> tuple[str, str, bytes, bool]:
        reader = asyncio.StreamReader()
        writer: Any = SimpleNamespace(write=lambda data: None)
        asked = asyncio.create_task(LoadSender("", [], 1.0, 1).exchange(reader, writer, b"", []))
        for piece in pieces:
            reader.feed_data(piece)
            await asyncio.sleep(0)
        return await asked

    return asyncio.run(exchange())


def test_answers_in_pieces_refused_in_chunks_and_the_last_of_a_connection() -> None:
    for cut in range(1, len(ANSWER)):
        assert read(ANSWER[:cut], ANSWER[cut:]) == (OK, "7", b"abc", False)
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nc\r\n\r\n0\r\n\r\n more\r\n0\r\n\r\n"
    assert read(chunked[:60], chunked[60:]) == (OK, "", b"ok\r\n0\r\n\r\n more", False)
    refused = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    assert read(refused) == ("503", "", b"", True)


def test_arrivals_are_poisson_as_many_as_asked_for_and_the_same_for_a_seed() -> None:
    due_s = draw_arrivals(200.0, 10.0, 110.0, 3)
    assert due_s == sorted(due_s) == draw_arrivals(200.0, 10.0, 110.0, 3)
    assert len(due_s) == 20_000
    assert 10.0 < due_s[0] < due_s[-1] < 110.0
    gaps_s = np.diff(due_s)
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.05)


@contextmanager
def answered_by(answer: Callable[[int], Any]) -> Iterator[str]:
    """The address of a server whose request of a number is answered by an ASGI message, after what is awaited."""
    numbers = itertools.count()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answer(next(numbers))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    with socket.create_server(("127.0.0.1", 0)) as listener, run_app(app, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_stall_is_in_the_latencies_of_an_open_loop_but_of_one_call_of_a_closed_one() -> None:
    async def stall(number: int) -> None:
        nonlocal until_s
        if number == 20:
            until_s = time.monotonic() + STALL_S
        await asyncio.sleep(until_s - time.monotonic())

    def count_slow(**plan: Any) -> int:
        nonlocal until_s
        until_s = 0.0
        with answered_by(stall) as url:
            rows = LoadSender(url, [REQUEST], 1.0, **plan).run()
        assert set(rows.kind) == {OK}
        return int((rows.done_s - rows.due_s > STALL_S / 5).sum())

    until_s = 0.0
    assert count_slow(connections=1) < 30  # one, and on a busy machine some that are slow by themselves
    assert count_slow(connections=1, rate=100.0) >= 30  # all that were due meanwhile, though one was sent
    assert count_slow(connections=100, rate=100.0) >= 30


class _Failing(socketserver.StreamRequestHandler):
    """Answers by the path: in part, not at all, or with a closed connection."""

    def handle(self) -> None:
        while request := self.rfile.readline():
            while self.rfile.readline().strip():
                pass
            if b"/answer" in request:
                self.wfile.write(ANSWER)
            elif b"/part" in request:
                self.wfile.write(ANSWER[:-1])
            if not (b"/answer" in request or b"/never" in request):
                return


def test_each_failure_has_its_name_and_its_version_is_none() -> None:
    payloads = [REQUEST.replace(b"/", b"/" + path, 1) for path in (b"answer", b"part", b"never", b"lose")]
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Failing) as server, run_server(server):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        sender = LoadSender(url, payloads, 0.4, connections=100, rate=20.0, timeout_s=0.2)
        rows = sender.run()
    found = [(each.payload, each.kind, each.version) for each in rows]
    assert found.count((0, OK, "7")) == found.count((2, UNANSWERED, "-")) == 2
    assert found.count((1, INCOMPLETE, "-")) == found.count((3, LOST, "-")) == 2
    assert not sender.is_full


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    return FakeHost(FakeModel("m", tensors(x=[-1, 3]), versions=(6, 7)), FakeModel("other"))


def bench(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(typed.said(f"bench {line} --json"))
    return found


def test_an_endpoint_by_its_rows_its_versions_and_its_errors(host: FakeHost, tmp_path: Path) -> None:
    model = host.models_by_name["m"]
    (tmp_path / "rows.csv").write_text("x0,x1,x2\n1,2,3\n4,5,6\n")
    (tmp_path / "rows.jsonl").write_text('{"x": [1, 2, 3]}\n{"x": [4, 5, 6]}\n')
    np.savez(tmp_path / "rows.npz", x=np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    with served(host) as (url, _):
        options = f"{url} --model m --seconds 0.2 --warm-up 0"
        for name in ("rows.csv", "rows.jsonl", "rows.npz"):
            model.calls.clear()
            found = bench(f"{options} --rate 20 --rows-per-request 2 --rows {tmp_path / name}")
            assert found["asked_per_s"] == 20.0
            assert [(each["of"], each["count"]) for each in found["times"]] == [
                ("late when sent", 4), ("version 7", 4), ("all answers", 4)
            ]  # fmt: skip
            assert [call.inputs["x"].tolist() for call in model.calls] == [[[1, 2, 3], [4, 5, 6]]] * 4
        model.calls.clear()
        drawn = bench(f"{options} --callers 2")
        assert drawn["asked_per_s"] is None
        assert len({call.inputs["x"].tobytes() for call in model.calls}) > 1
        model.error = InferenceError(503, "it is full")
        found = bench(f"{options} --rate 20")
        assert found["errors"] == {"503": 4}
        assert "it is full" in found["examples"]["503"]
        assert "503" in typed.said(f"bench {options} --rate 20")
        assert "m, other" in typed.complaint(f"bench {url}")


def test_a_text_has_its_first_token_and_tokens_over_https_and_below_a_path(tmp_path: Path) -> None:
    asked = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = (await receive())["body"]
        answers: dict[str, Any] = {
            "/v2/repository/index": [{"name": "t", "version": "3", "state": "READY", "reason": ""}],
            "/v1/models/t": {"has_chat_template": True},
        }
        headers = [(b"shoal-model-version", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        path = scope["path"].removeprefix("/below")
        if path in answers:
            await send({"type": "http.response.body", "body": json.dumps(answers[path]).encode()})
            return
        asked.append((path, json.loads(body)))
        usage = {"prompt_tokens": 4, "completion_tokens": 5}
        for event in ({"choices": [{"delta": {"content": "a \n\n"}}]}, {"choices": [], "usage": usage}):
            await send(
                {"type": "http.response.body", "body": f"data: {json.dumps(event)}\n\n".encode(), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    authority = Authority(tmp_path)
    authority.sign()
    files = {"ssl_certfile": tmp_path / "server.pem", "ssl_keyfile": tmp_path / "server.key"}
    with socket.create_server(("127.0.0.1", 0)) as listener, run_app(app, listener, **files):
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/below"
        line = f"{url} --ca {authority.ca} --rate 20 --seconds 0.5 --warm-up 0"
        found = bench(f"{line} --text hello --with max_tokens=5")
    assert asked[0][0] == "/v1/chat/completions"
    assert asked[0][1]["messages"] == [{"role": "user", "content": "hello"}]
    assert asked[0][1]["max_tokens"] == 5
    assert found["tokens_per_s"] == 100.0
    assert ("first tokens", 10) in [(each["of"], each["count"]) for each in found["times"]]
    assert found["errors"] == {}


def test_actors_fill_the_queue_of_a_gateway_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", rl_setting.TOKEN)
    with rl_setting.serving(queue_capacity=40) as parts:
        found = bench(f"gateway {parts.address} --actors 20 --seconds 0.5 --warm-up 0")
        assert 20 <= len(parts.queue) <= 40
    assert found["segments"] == {"accepted": found["steps_per_s"] * 0.5 / 16}
    assert found["versions"] == [1]
    assert found["wait_share"] > 0.0
    assert 0.0 < found["slowest_tenth"] <= 1.0


@pytest.mark.parametrize(
    "spec",
    [
        rl_setting.EXPERIENCE,
        msgspec.structs.replace(
            rl_setting.EXPERIENCE,
            observation=TensorSpec("uint8", (8, 8, 1), 0, 255),
            action=TensorSpec("int64", (2,)),
            policy=msgspec.structs.replace(rl_setting.POLICY, action_sizes=(3, 4)),
            extras=(ExtraSpec("masks", TensorSpec("bool", (7,)), "observation"),),
        ),
        msgspec.structs.replace(
            rl_setting.EXPERIENCE,
            observation=TensorSpec("float32", (3,), -3.4e38, 3.4e38),
            action=TensorSpec("float32", (2,)),
            policy=msgspec.structs.replace(rl_setting.POLICY, action_low=(2.0, -5.0), action_high=(3.0, -4.0)),
            extras=(ExtraSpec("state", TensorSpec("float32", (5,)), "segment"),),
        ),
    ],
)
def test_simulated_segments_fit_what_a_run_takes(spec: ExperienceSpec) -> None:
    header, *frames = pack_segment(make_segment(spec), 0)
    message = decode([header, *frames], MessageLimits())
    assert isinstance(message, SegmentMessage)
    assert unpack_segment(message, frames, spec).num_steps == spec.segment_length
