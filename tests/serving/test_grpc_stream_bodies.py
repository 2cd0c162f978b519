"""The bodies of gRPC's streams as a replica gets them in HTTP/1.1: what no client sends, and who reads nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from serving.fake_host import FakeHost, FakeModel, tensors
from serving.grpc_replica import LIMITS, TIMEOUT_S, exchange, served
from shoal.cluster.ports import find_free_port
from shoal.open_inference import inference_pb2 as pb
from shoal.serve.grpc.methods import SERVICE
from shoal.serve.grpc.service import STREAM_WINDOW

POST = f"POST /{SERVICE}/ModelStreamInfer HTTP/1.1"


@pytest.fixture(scope="module")
def http_port() -> int:
    return find_free_port()


FRAME = b"\0\0\0\0\x03\x0a\x01m"  # a request for the model m, without tensors
WRONG: dict[str, tuple[bytes, str, int, bytes]] = {
    "half a head": (b"\0\0", "", 3, b"the stream ends after 2 bytes of a message"),
    "half a message": (FRAME[:-1], "", 3, b"the stream ends after 7 bytes of a message"),
    "no message of protobuf": (b"\0\0\0\0\x02\xff\xff", "", 3, b"not a ModelInferRequest"),
    "what is not compressed": (b"\1" + FRAME[1:], "grpc-encoding: gzip", 3, b"the body is not gzip"),
    "a length of 4 GB": (b"\0\xff\xff\xff\xff", "", 8, b"the message has 4294967295 bytes"),
    "a timeout that is a word": (FRAME, "grpc-timeout: soon", 3, b"grpc-timeout"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_stream_is_refused(what: str, http_port: int) -> None:
    body, header, status, words = WRONG[what]

    async def test() -> None:
        async with served(FakeHost(), http_port):
            answer = await exchange(http_port, POST, body, header)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"grpc-status: %d\r\n" % status in answer
            assert words in answer

    asyncio.run(test())


def test_a_message_that_does_not_come_on_is_not_waited_for(http_port: int) -> None:
    async def test() -> None:
        limits = replace(LIMITS, body_grace_s=0.3)
        async with served(FakeHost(), http_port, limits=limits):
            reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
            writer.write(f"{POST}\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            writer.write(b"8\r\n" + FRAME + b"\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"input 'x' is missing"), TIMEOUT_S)
            assert b"grpc-status:" not in answer
            await asyncio.sleep(0.6)
            writer.write(b"2\r\n" + FRAME[:2] + b"\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"grpc-status: 4\r\n"), TIMEOUT_S)
            writer.close()

    asyncio.run(test())


@pytest.mark.parametrize("header", ["x: y", "grpc-timeout: 500m"])
def test_who_takes_no_answers_is_read_no_further_and_has_left_after_a_while(header: str, http_port: int) -> None:
    """Also when the call's deadline has passed by then, and its status is all that is left to say."""
    made = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(100_000)])
    made.inputs.add(name="x", datatype="UINT8", shape=[1, 100_000])
    message = made.SerializeToString()
    chunk = b"\0" + len(message).to_bytes(4, "big") + message
    chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    model = FakeModel("m", tensors(x=("UINT8", [-1, -1])))

    async def test() -> None:
        async with served(FakeHost(model), http_port, limits=replace(LIMITS, answer_grace_s=1.0)):
            _, writer = await asyncio.open_connection("127.0.0.1", http_port)
            writer.write(f"{POST}\r\nhost: x\r\n{header}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            with suppress(ConnectionError):
                while True:
                    writer.write(chunk)
                    await asyncio.wait_for(writer.drain(), TIMEOUT_S)
            # A deadline may pass before the window is full.
            assert (STREAM_WINDOW if header == "x: y" else 0) < len(model.calls) < 1000
            writer.close()

    asyncio.run(test())
