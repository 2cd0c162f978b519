"""The protocol over gRPC, through HAProxy, without Ray: what a stock client does not send, or does not see."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from libs.grpc.asking import Ask, raw, refused, request, run, served, until
from serving.fake_host import FakeHost, FakeModel, tensors
from serving.replica_server import LIMITS, exchange
from serving.replica_server import served as replica
from shoal.cluster.ports import find_free_port
from shoal.errors import Closed, InferenceError
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import FIELDS
from shoal.libs.grpc.methods import METHODS, SERVICE, UNAUTHENTICATED_METHODS, UNSUPPORTED_METHODS
from shoal.open_inference.datatypes import DATATYPES, NUMPY_DTYPES
from shoal.serve.messages.inference import Arrays
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.api_key import ApiKey
from shoal.serve.spec.model_options import ModelOptions

PATH = f"/{SERVICE}/ModelInfer"

# -- tensors ----------------------------------------------------------------------------------------------------------


def typed_values(datatype: str) -> list[Any]:
    if datatype == "BOOL":
        return [True, False, True, True]
    if datatype == "BYTES":
        return [b"", b"\xff\x00", b"plain", b"x" * 300]
    dtype = NUMPY_DTYPES[datatype]
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
    repeated = raw()
    for name in ("x", "x"):
        repeated.outputs.add(name=name)
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
        "an output twice": (repeated, "output 'x' was asked for twice"),
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
        async with served(FakeHost(model), AccessControl(None, [key])) as ask:
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
        host = FakeHost(model, FakeModel("plain"))
        async with served(host) as ask:

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
            plain = host.models_by_name["plain"]
            await ask("ModelInfer", raw("plain"), timeout=None)
            assert plain.calls[-1].deadline_s is None
            plain.hold = asyncio.Event()
            assert (
                await refused(ask("ModelInfer", raw("plain"), timeout=0.3))
            ).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: plain.waiting == 0)

    run(test())


STATUSES = [
    (InferenceError(400, "w"), grpc.StatusCode.INVALID_ARGUMENT),
    (InferenceError(401, "w"), grpc.StatusCode.UNAUTHENTICATED),
    (InferenceError(403, "w"), grpc.StatusCode.PERMISSION_DENIED),
    (InferenceError(404, "w"), grpc.StatusCode.NOT_FOUND),
    (InferenceError(409, "w"), grpc.StatusCode.FAILED_PRECONDITION),
    (InferenceError(413, "w"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InferenceError(422, "input 'K\u00f6ln': 100% wrong\nand more"), grpc.StatusCode.INVALID_ARGUMENT),
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
            assert str(error)[:1000] in got.details() or isinstance(error, Closed)
            assert "Traceback" not in got.details()
            retry_after_s = getattr(error, "retry_after_s", 1.0 if isinstance(error, Closed) else None)
            wanted = None if retry_after_s is None else str(int(np.ceil(retry_after_s)))
            assert dict(got.trailing_metadata()).get("retry-after") == wanted

    run(test())


def test_without_a_key_only_the_server_s_health_is_told() -> None:
    async def test() -> None:
        host = FakeHost()
        async with served(host, AccessControl("secret", [])) as ask:
            for name, method in METHODS.items():
                if name in ("ServerLive", "ServerReady"):
                    assert await ask(name)
                elif not method.streams:
                    assert (await refused(ask(name))).code() is grpc.StatusCode.UNAUTHENTICATED, name
            # Of nothing that is sent: grpc.aio says INTERNAL when a call ends just as it writes.
            error = await refused(anext(aiter(ask("ModelStreamInfer", Silence()))))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "key" in error.details()
            assert not host.get_model("m").calls

    run(test())


class Silence(AsyncIterator[Any]):
    """Requests that never come."""

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()


def test_nothing_is_read_of_a_call_that_shows_no_key_or_is_not_served() -> None:
    wanted = dict.fromkeys(METHODS.keys() - UNAUTHENTICATED_METHODS, grpc.StatusCode.UNAUTHENTICATED)
    wanted |= dict.fromkeys(UNSUPPORTED_METHODS, grpc.StatusCode.UNIMPLEMENTED)

    async def test() -> None:
        async with served(FakeHost(), AccessControl("secret", [])) as ask:
            for name, code in wanted.items():
                error = await refused(anext(aiter(ask(name, Silence(), metadata=(("authorization", "Bearer no"),)))))
                assert error.code() is code, name

    run(test())


def test_who_may_see_some_models_sees_no_others() -> None:
    async def test() -> None:
        host = FakeHost(FakeModel("mine"), FakeModel("theirs"))
        key = ApiKey(name="some", key="k", models=["mine"])  # type: ignore[arg-type]
        async with served(host, AccessControl("secret", [key])) as ask:
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


# -- a call, whatever its size -----------------------------------------------------------------------------------------


async def through(host: FakeHost, test: Callable[[Ask], Awaitable[None]]) -> None:
    """Await `test(ask)` with an endpoint of `host`."""
    async with served(host) as ask:
        await test(ask)


def test_a_call_is_answered_with_its_metadata() -> None:
    model = FakeModel(versions=(3,))

    async def test(ask: Ask) -> None:
        for number in range(5):  # on one connection
            call = ask("ModelInfer", request(2, id=str(number)), metadata=(("shoal-sticky", "s"),))
            answer = await call
            assert (answer.id, answer.model_version, len(answer.raw_output_contents[0])) == (str(number), "3", 24)
            assert dict(await call.trailing_metadata()) == {"shoal-model-version": "3"}
        assert {each.sticky for each in model.calls} == {"s"}
        answers = await asyncio.gather(*(ask("ModelInfer", request(id=str(number))) for number in range(50)))
        assert [answer.id for answer in answers] == [str(number) for number in range(50)]

    run(through(FakeHost(model), test))


def test_a_large_call_is_answered_whole() -> None:
    async def test(ask: Ask) -> None:
        made = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(range(250)) * 4000])
        made.inputs.add(name="x", datatype="UINT8", shape=[1, 1_000_000])
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
            answer = await ask("ModelInfer", made, compression=compression)
            assert answer.raw_output_contents[0] == made.raw_input_contents[0]

    run(through(FakeHost(FakeModel("m", tensors(x=("UINT8", [-1, -1])))), test))


def test_a_compressed_call_is_unpacked_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    decompress, threads = RequestLimits.decompress, list[threading.Thread]()

    def watched(limits: RequestLimits, body: bytes, encoding: bytes) -> bytes:
        threads.append(threading.current_thread())
        return decompress(limits, body, encoding)

    async def test(ask: Ask) -> None:
        await ask("ModelInfer", request(64), compression=grpc.Compression.Gzip)
        assert len(threads) == 1
        assert threading.current_thread() not in threads

    monkeypatch.setattr(RequestLimits, "decompress", watched)
    run(through(FakeHost(), test))


def test_what_is_too_large_is_refused() -> None:
    model = FakeModel()

    async def test(ask: Ask) -> None:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            call = ask("ModelInfer", request(LIMITS.max_body_bytes // 12), compression=compression)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(LIMITS.max_body_bytes) in await call.details()
        assert not model.calls
        assert await ask("ModelInfer", request())

    run(through(FakeHost(model), test))


def test_a_call_that_is_cancelled_leaves_the_model() -> None:
    model = FakeModel()
    model.hold = asyncio.Event()

    async def test(ask: Ask) -> None:
        call = ask("ModelInfer", request())
        await until(lambda: model.waiting == 1)
        call.cancel()
        await until(lambda: model.waiting == 0)

    run(through(FakeHost(model), test))


# -- what no client of gRPC sends -------------------------------------------------------------------------------------

FRAME = b"\0\0\0\0\x03\x0a\x01m"  # a request for the model m, without tensors
POST = f"POST {PATH} HTTP/1.1"
# what it is -> first line, body, header, the status of gRPC and words of the answer
WRONG: dict[str, tuple[str, bytes, str, int, bytes]] = {
    "an empty body": (POST, b"", "", 3, b"not one message"),
    "half a head": (POST, b"\0\0", "", 3, b"not one message"),
    "half a message": (POST, FRAME[:-1], "", 3, b"not one message"),
    "two messages": (POST, FRAME + FRAME, "", 3, b"not one message"),
    "no message of protobuf": (POST, b"\0\0\0\0\x02\xff\xff", "", 3, b"not a ModelInferRequest"),
    "what is not compressed": (POST, b"\1" + FRAME[1:], "grpc-encoding: gzip", 3, b"the body is not gzip"),
    "an unknown compression": (POST, b"\1" + FRAME[1:], "grpc-encoding: zstd", 12, b"not supported"),
    "a timeout that is a word": (POST, FRAME, "grpc-timeout: soon", 3, b"grpc-timeout"),
    "no tensors": (POST, FRAME, "grpc-timeout: 5S", 3, b"input 'x' is missing"),
    "another method of HTTP": (f"GET {PATH} HTTP/1.1", FRAME, "", 12, b"not served here"),
    "too many bytes of headers": (POST, FRAME, f"x: {'x' * 9000}", 8, b"the headers have"),
    "no method of the service": (f"POST /{SERVICE}/Nothing HTTP/1.1", FRAME, "", 12, b"not served here"),
}


def test_a_wrong_call_is_refused() -> None:
    async def test() -> None:
        http_port = find_free_port()
        async with replica(FakeHost(), http_port):
            for what, (line, body, header, status, words) in WRONG.items():
                answer = await exchange(http_port, line, body, header)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), what
                assert b"content-length: 0\r\n" in answer, what
                assert b"grpc-status: %d\r\n" % status in answer, (what, answer)
                assert words in answer, (what, answer)
            live = await exchange(http_port, "GET /v2/health/live HTTP/1.1", b"", "")
            assert live.endswith(b'{"live":true}'), "other paths are REST's"

    run(test())


def test_a_deadline_is_kept_by_the_replica_too_and_one_of_ages_is_none() -> None:
    """The client, and HAProxy, may go on waiting."""
    model, message = FakeModel(), request().SerializeToString()
    body = b"\0" + len(message).to_bytes(4, "big") + message

    async def test() -> None:
        http_port = find_free_port()
        async with replica(FakeHost(model), http_port):
            for timeout, is_kept in (("99999999S", True), ("99999999H", False)):
                assert b"grpc-status: 0\r\n" in await exchange(http_port, POST, body, f"grpc-timeout: {timeout}")
                assert (model.calls[-1].deadline_s is not None) is is_kept
            model.hold = asyncio.Event()
            assert b"grpc-status: 4\r\n" in await exchange(http_port, POST, body, "grpc-timeout: 200m")
            assert model.waiting == 0

    run(test())
