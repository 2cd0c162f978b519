"""Calls of gRPC that end before their answer, streams, and the end of the server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from serving.fake_host import FakeHost, FakeModel
from serving.grpc_asking import TIMEOUT_S, raw, run, served, until
from shoal.open_inference import inference_pb2 as pb
from shoal.serve.call import InferCall, Prediction
from shoal.serve.protocol.access import Access
from shoal.serve.protocol.grpc_server import METHODS, SERVICE, GrpcServer
from shoal.serve.protocol.grpc_service import STREAM_WINDOW, InferenceServicer

# -- ends before the answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "deadline", "stream cancelled", "stream deadline"])
def test_a_call_that_nobody_waits_for_leaves_the_model(how: str) -> None:
    async def test() -> None:
        model = FakeModel("m")
        model.hold = asyncio.Event()
        async with served(FakeHost(model)) as ask:
            timeout_s = 0.5 if "deadline" in how else TIMEOUT_S
            if "stream" in how:
                call = ask("ModelStreamInfer", iter([raw(), raw(), raw()]), timeout=timeout_s)
                waiting = asyncio.ensure_future(anext(aiter(call)))
            else:
                call = ask("ModelInfer", raw(), timeout=timeout_s)
                waiting = asyncio.ensure_future(call)  # type: ignore[arg-type]
            await until(lambda: model.waiting == (3 if "stream" in how else 1))
            if "cancelled" in how:
                call.cancel()
            try:
                answer = await waiting
            except (grpc.aio.AioRpcError, asyncio.CancelledError, StopAsyncIteration):
                pass
            else:  # the server's word within the stream came before the client's own about its end
                assert (how, answer.error_message) == ("stream deadline", "the deadline has passed")
            await until(lambda: model.waiting == 0)

    run(test())


# -- streams ----------------------------------------------------------------------------------------------------------


class Reversing(FakeModel):
    """Answers a full house of calls, the last one first."""

    def __init__(self, num_calls: int) -> None:
        super().__init__("m")
        self._num_calls, self._stack = num_calls, list[asyncio.Event]()

    async def infer(self, call: InferCall) -> Prediction:
        event = asyncio.Event()
        self._stack.append(event)
        if len(self._stack) == self._num_calls:
            self._stack[-1].set()
        await event.wait()
        number = self._stack.index(event)
        if number:
            self._stack[number - 1].set()
        return await super().infer(call)


def test_a_stream_fills_batches_and_is_answered_in_its_order() -> None:
    async def test() -> None:
        model = Reversing(16)
        async with served(FakeHost(model)) as ask:
            requests = [raw(id=str(number)) for number in range(16)]
            answers = [each async for each in ask("ModelStreamInfer", iter(requests))]
            assert [each.infer_response.id for each in answers] == [str(number) for number in range(16)]
            assert all(each.infer_response.parameters["triton_final_response"].bool_param for each in answers)

    run(test())


def test_a_stream_has_a_bounded_number_of_requests_in_hand() -> None:
    async def test() -> None:
        model = FakeModel("m")
        model.hold = asyncio.Event()
        async with served(FakeHost(model)) as ask:
            num_requests = 3 * STREAM_WINDOW
            call = ask("ModelStreamInfer", iter([raw() for _ in range(num_requests)]))
            answers = asyncio.ensure_future(_collected(call))
            await until(lambda: model.waiting == STREAM_WINDOW)
            await ask("ServerLive")  # the server goes on, and reads no further
            assert model.waiting == STREAM_WINDOW
            model.hold.set()
            assert len(await answers) == num_requests

    run(test())


async def _collected(call: Any) -> list[pb.ModelStreamInferResponse]:
    return [each async for each in call]


def test_an_error_in_a_stream_is_an_answer_and_the_stream_goes_on() -> None:
    async def test() -> None:
        async with served(FakeHost()) as ask:
            requests = [raw(id="a"), raw("nobody", id="b"), raw(id="c")]
            answers = await _collected(ask("ModelStreamInfer", iter(requests)))
            assert [each.infer_response.id for each in answers] == ["a", "b", "c"]
            assert [bool(each.error_message) for each in answers] == [False, True, False]
            assert "no model 'nobody'" in answers[1].error_message
            assert not answers[1].infer_response.outputs

    run(test())


def test_a_bug_in_a_stream_is_an_answer_too() -> None:
    async def test() -> None:
        model = FakeModel("m")
        model.error = KeyError("x")
        async with served(FakeHost(model)) as ask:
            (answer,) = await _collected(ask("ModelStreamInfer", iter([raw(id="a")])))
            assert "failed" in answer.error_message

    run(test())


def test_closing_twice_is_closing_once_and_lets_what_is_in_hand_finish() -> None:
    async def test() -> None:
        model = FakeModel("m")
        model.hold = asyncio.Event()
        server = GrpcServer(
            InferenceServicer(FakeHost(model), Access(None, [])), "127.0.0.1", 0, max_message_bytes=1024
        )
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            method = METHODS["ModelInfer"]
            make = channel.unary_unary(
                f"/{SERVICE}/ModelInfer", method.request.SerializeToString, method.response.FromString
            )
            call = asyncio.ensure_future(make(raw(), timeout=TIMEOUT_S))  # type: ignore[arg-type]
            await until(lambda: model.waiting == 1)
            closing = asyncio.ensure_future(server.close(TIMEOUT_S))
            model.hold.set()
            assert (await call).model_version == "7"
            await closing
            await server.close()

    run(test())
