"""The protocol over gRPC, on a real port, without Ray: what a stock client does not send, or does not see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from serving.fake_host import FakeHost, FakeModel, tensors
from shoal.errors import Closed, InferenceError
from shoal.open_inference import inference_pb2 as pb
from shoal.open_inference.datatypes import DATATYPES, NUMPY
from shoal.serve.access import Access
from shoal.serve.call import Arrays, InferCall, Prediction
from shoal.serve.grpc_server import METHODS, SERVICE, GrpcServer
from shoal.serve.grpc_service import STREAM_WINDOW, InferenceServicer
from shoal.serve.grpc_tensors import FIELDS
from shoal.serve.options import ApiKey, ModelOptions

TIMEOUT_S = 10.0
Ask = Callable[..., Any]


@asynccontextmanager
async def served(host: FakeHost, access: Access | None = None) -> AsyncIterator[Ask]:
    """`ask(method, request, metadata=..., timeout=...)` is a call of the service; those without streams are awaited."""
    server = GrpcServer(InferenceServicer(host, access or Access(None, [])), "127.0.0.1", 0, max_message_bytes=1 << 20)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:

        def ask(name: str, request: Any = None, **options: Any) -> Any:
            method = METHODS[name]
            make = channel.stream_stream if method.streams else channel.unary_unary
            call = make(f"/{SERVICE}/{name}", method.request.SerializeToString, method.response.FromString)
            options.setdefault("timeout", TIMEOUT_S)
            return call(method.request() if request is None else request, **options)

        try:
            yield ask
        finally:
            await server.close(0.0)


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 4 * TIMEOUT_S))  # type: ignore[arg-type]


def raw(model: str = "m", *arrays: np.ndarray, **fields: Any) -> pb.ModelInferRequest:
    """A request with one input `x`, which travels raw."""
    request = pb.ModelInferRequest(model_name=model, **fields)
    for array in arrays or (np.ones((2, 3), np.float32),):
        request.inputs.add(name="x", datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# -- tensors ----------------------------------------------------------------------------------------------------------


def typed_values(datatype: str) -> list[Any]:
    if datatype == "BOOL":
        return [True, False, True, True]
    if datatype == "BYTES":
        return [b"", b"\xff\x00", b"plain", b"x" * 300]
    dtype = NUMPY[datatype]
    if dtype.kind == "f":
        return [0.0, -0.5, 1e-30, 3e38]
    info = np.iinfo(dtype)
    return [0, 1, int(info.min), int(info.max)]


@pytest.mark.parametrize("datatype", sorted(FIELDS))
def test_typed_contents_are_answered_with_typed_contents(datatype: str) -> None:
    async def test() -> None:
        async with served(FakeHost(FakeModel("m", tensors(x=(datatype, [-1, 2]))))) as ask:
            request = pb.ModelInferRequest(model_name="m", id="7")
            tensor = request.inputs.add(name="x", datatype=datatype, shape=[2, 2])
            getattr(tensor.contents, FIELDS[datatype]).extend(typed_values(datatype))
            answer = await ask("ModelInfer", request)
            assert (answer.model_name, answer.model_version, answer.id) == ("m", "7", "7")
            (output,) = answer.outputs
            assert (output.name, output.datatype, list(output.shape)) == ("x", datatype, [2, 2])
            assert output.contents == tensor.contents
            assert not answer.raw_output_contents

    run(test())


def test_every_datatype_is_typed_but_those_that_travel_raw() -> None:
    assert set(DATATYPES) - set(FIELDS) == {"FP16", "BF16"}


def test_an_answer_is_raw_when_one_of_its_outputs_has_no_typed_field() -> None:
    def half(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"h": inputs["x"].astype(np.float16), "x": inputs["x"]}

    async def test() -> None:
        outputs = tensors(h=("FP16", [-1, 3]), x=("FP32", [-1, 3]))
        async with served(FakeHost(FakeModel("m", outputs=outputs, compute=half))) as ask:
            request = pb.ModelInferRequest(model_name="m")
            tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
            tensor.contents.fp32_contents.extend([1, 2, 3])
            answer = await ask("ModelInfer", request)
            assert [each.name for each in answer.outputs] == ["h", "x"]
            assert list(np.frombuffer(answer.raw_output_contents[0], np.float16)) == [1, 2, 3]
            assert len(answer.raw_output_contents) == 2
            request.outputs.add(name="x")
            answer = await ask("ModelInfer", request)
            assert list(answer.outputs[0].contents.fp32_contents) == [1, 2, 3]

    run(test())


def two_inputs(**fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", **fields)
    request.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    return request


def broken_requests() -> dict[str, tuple[pb.ModelInferRequest, str]]:
    both = raw()
    both.inputs[0].contents.fp32_contents.append(1.0)
    wrong_field = two_inputs()
    wrong_field.inputs[0].contents.fp64_contents.extend([1.0] * 6)
    wide = pb.ModelInferRequest(model_name="wide")
    wide.inputs.add(name="x", datatype="FP32", shape=[1, 4096])
    negative = pb.ModelInferRequest(model_name="wide")
    negative.inputs.add(name="x", datatype="FP32", shape=[1, -4])
    overflow = pb.ModelInferRequest(model_name="tiny")
    overflow.inputs.add(name="x", datatype="INT8", shape=[1]).contents.int_contents.append(128)
    half = pb.ModelInferRequest(model_name="half")
    half.inputs.add(name="x", datatype="FP16", shape=[1]).contents.fp32_contents.append(1)
    shared = raw()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    text = raw()
    text.parameters["timeout"].string_param = "soon"
    return {
        "nothing at all": (pb.ModelInferRequest(model_name="m"), "input 'x' is missing"),
        "no contents": (two_inputs(), "expected 6 values in fp32_contents for FP32 [2, 3], got 0"),
        "contents of another type": (wrong_field, "expected 6 values in fp32_contents for FP32 [2, 3], got 0"),
        "raw and typed": (both, "expected contents or raw_input_contents, got both"),
        "too many blobs": (two_inputs(raw_input_contents=[b"", b""]), "has 2 entries for 1 inputs"),
        "too few bytes": (two_inputs(raw_input_contents=[b"1234"]), "expected 24 bytes of FP32 [2, 3], got 4"),
        "more values than there are": (wide, "expected 4096 values in fp32_contents for FP32 [1, 4096], got 0"),
        "a negative shape": (negative, "got FP32 [1, -4]"),
        "a value that does not fit": (overflow, "expected values of INT8"),
        "FP16 in a typed field": (half, "expected FP16 in raw_input_contents"),
        "shared memory": (shared, "shared_memory_region"),
        "a timeout that is a word": (text, "timeout = 'soon': expected microseconds"),
    }


@pytest.mark.parametrize("what", broken_requests())
def test_a_wrong_request_is_refused_and_says_why(what: str) -> None:
    async def test() -> None:
        models = [
            FakeModel("m"),
            FakeModel("wide", tensors(x=("FP32", [-1, -1]))),
            FakeModel("tiny", tensors(x=("INT8", [-1]))),
        ]
        models.append(FakeModel("half", tensors(x=("FP16", [-1]))))
        async with served(FakeHost(*models)) as ask:
            request, words = broken_requests()[what]
            error = await refused(ask("ModelInfer", request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in str(error.details())
            assert not any(model.calls for model in models)
            assert (await ask("ModelInfer", raw())).outputs[0].name == "x"

    run(test())


def test_a_tensor_without_end_is_refused_before_anything_is_made_for_it() -> None:
    async def test() -> None:
        async with served(FakeHost(FakeModel("m", tensors(x=("FP32", [-1, -1]))))) as ask:
            for contents in ([], [b""]):
                request = pb.ModelInferRequest(model_name="m", raw_input_contents=contents)
                request.inputs.add(name="x", datatype="FP32", shape=[1, 1 << 62])
                assert (await refused(ask("ModelInfer", request))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test())


# -- what passes beside the tensors -----------------------------------------------------------------------------------


def test_metadata_becomes_the_terms_of_the_call() -> None:
    async def test() -> None:
        model = FakeModel("m", versions=(1, 2))
        key = ApiKey(name="tenant", key="k")  # type: ignore[arg-type]
        async with served(FakeHost(model), Access(None, [key])) as ask:
            metadata = {
                "authorization": "Bearer k",
                "shoal-sticky": "s",
                "shoal-track": "candidate",
            }
            call = ask("ModelInfer", raw(model_version="1"), metadata=tuple(metadata.items()))
            answer = await call
            assert answer.model_version == "1"
            assert dict(await call.trailing_metadata()) == {"shoal-model-version": "1"}
            (seen,) = model.calls
            assert (seen.tenant, seen.sticky, seen.track, seen.trace) == ("tenant", "s", "candidate", None)
            assert (seen.version, seen.num_rows, seen.outputs) == (1, 2, None)

    run(test())


def test_the_earliest_deadline_counts_and_the_model_s_own_only_when_the_client_names_none() -> None:
    async def test() -> None:
        model = FakeModel("m", options=ModelOptions(deadline_s=100.0))
        async with served(FakeHost(model)) as ask:

            async def left_s(timeout_us: int = 0, **options: Any) -> float:
                request = raw()
                if timeout_us:
                    request.parameters["timeout"].int64_param = timeout_us
                await ask("ModelInfer", request, **options)
                deadline_s = model.calls[-1].deadline_s
                assert deadline_s is not None
                return deadline_s - time.monotonic()

            assert 90 < await left_s(timeout=None) <= 100
            assert 190 < await left_s(timeout=200) <= 202  # gRPC rounds up what it sends
            assert 20 < await left_s(timeout=200, timeout_us=30_000_000) <= 30
            assert 5 < await left_s(timeout=200, timeout_us=30_000_000, metadata=(("shoal-deadline-ms", "8000"),)) <= 8
            assert 5 < await left_s(timeout=8, timeout_us=30_000_000) <= 9

    run(test())


def test_without_any_deadline_there_is_none() -> None:
    async def test() -> None:
        model = FakeModel("m")
        async with served(FakeHost(model)) as ask:
            await ask("ModelInfer", raw(), timeout=None)
            assert model.calls[0].deadline_s is None

    run(test())


STATUSES = [
    (InferenceError(400, "w"), grpc.StatusCode.INVALID_ARGUMENT),
    (InferenceError(401, "w"), grpc.StatusCode.UNAUTHENTICATED),
    (InferenceError(403, "w"), grpc.StatusCode.PERMISSION_DENIED),
    (InferenceError(404, "w"), grpc.StatusCode.NOT_FOUND),
    (InferenceError(409, "w"), grpc.StatusCode.FAILED_PRECONDITION),
    (InferenceError(413, "w"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InferenceError(422, "w"), grpc.StatusCode.INVALID_ARGUMENT),
    (InferenceError(429, "w", retry_after_s=1.2), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InferenceError(500, "w"), grpc.StatusCode.INTERNAL),
    (InferenceError(503, "w", retry_after_s=2.0), grpc.StatusCode.UNAVAILABLE),
    (InferenceError(504, "w"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (Closed("w"), grpc.StatusCode.UNAVAILABLE),
    (KeyError("w" * 10_000), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), STATUSES, ids=lambda each: getattr(each, "name", ""))
def test_an_error_has_the_status_for_it(error: Exception, code: grpc.StatusCode) -> None:
    async def test() -> None:
        model = FakeModel("m")
        model.error = error
        async with served(FakeHost(model)) as ask:
            got = await refused(ask("ModelInfer", raw()))
            assert got.code() is code
            assert got.details()
            assert "Traceback" not in got.details()
            retry_after_s = getattr(error, "retry_after_s", 1.0 if isinstance(error, Closed) else None)
            wanted = None if retry_after_s is None else str(int(np.ceil(retry_after_s)))
            assert dict(got.trailing_metadata()).get("retry-after") == wanted

    run(test())


def test_without_a_key_only_the_server_s_health_is_told() -> None:
    async def test() -> None:
        host = FakeHost()
        async with served(host, Access("secret", [])) as ask:
            for name, method in METHODS.items():
                if name in ("ServerLive", "ServerReady"):
                    assert await ask(name)
                elif not method.streams:
                    assert (await refused(ask(name))).code() is grpc.StatusCode.UNAUTHENTICATED, name
            (answer,) = [each async for each in ask("ModelStreamInfer", iter([raw()]))]
            assert "key" in answer.error_message
            assert not host.model("m").calls

    run(test())


def test_who_may_see_some_models_sees_no_others() -> None:
    async def test() -> None:
        host = FakeHost(FakeModel("mine"), FakeModel("theirs"))
        key = ApiKey(name="some", key="k", models=["mine"])  # type: ignore[arg-type]
        async with served(host, Access("secret", [key])) as ask:
            metadata = (("authorization", "Bearer k"),)
            statistics = await ask("ModelStatistics", metadata=metadata)
            assert {each.name for each in statistics.model_stats} == {"mine"}
            index = await ask("RepositoryIndex", metadata=metadata)
            assert {each.name for each in index.models} == {"mine"}
            for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
                request = METHODS[name].request(model_name="mine")  # type: ignore[call-arg]
                assert (
                    await refused(ask(name, request, metadata=metadata))
                ).code() is grpc.StatusCode.PERMISSION_DENIED
            assert set(host.models_by_name) == {"mine", "theirs"}

    run(test())


def test_a_load_s_parameters_reach_the_host() -> None:
    async def test() -> None:
        host = FakeHost(FakeModel("m"), shelf=(FakeModel("new"),))
        async with served(host) as ask:
            request = pb.RepositoryModelLoadRequest(model_name="new")
            request.parameters["version"].int64_param = 3
            request.parameters["config"].string_param = "{}"
            await ask("RepositoryModelLoad", request)
            assert host.parameters == [{"version": 3, "config": "{}"}]

    run(test())


# -- ends before the answer -------------------------------------------------------------------------------------------


async def until(predicate: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not predicate():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


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
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError, StopAsyncIteration)):
                await waiting
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
