"""The Open Inference Protocol v2 over gRPC: one coroutine for each of its methods, on messages.

Owns the meaning of each method. `codec` has the tensors, `request_cache` the layouts of earlier requests (so inferences
come and go as bytes), `app` the wire, `model_metadata` a model's metadata. Called by `app`, which answers
an error raised here with a status. Knows no socket and no Ray, and the models only through `ModelManagerProtocol`.

Metadata of requests: `authorization: Bearer KEY`, and as in HTTP `shoal-deadline-ms`, `shoal-track`, `shoal-sticky`,
`traceparent`. The deadline of the call itself counts as one. Trailing metadata: `shoal-model-version`.

A stream is answered in its order, with up to `STREAM_WINDOW` of its requests in the batcher at once. A failed request
is answered with `error_message` and the stream continues; a client that sends `triton_grpc_error: true` gets the status
instead, and the stream ends. Without a known key it ends at once and nothing is read.

    queue             capacity         what blocks                          who unblocks       close()
    answers of a      STREAM_WINDOW    reading the stream's next request,   the answer that    the stream's end or
    stream                             and so the client (HTTP/2 window)    is next in order   cancellation cancels all
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from shoal.errors import Closed, InferenceError
from shoal.extend.serve import (
    EXTENSIONS,
    FORWARDED_FROM_HEADER,
    LARGE_BYTES,
    AccessControl,
    Caller,
    ModelCodecs,
    ModelManagerProtocol,
    ServedModelProtocol,
    Tracer,
    build_metadata,
    build_model_config,
    decode_in_thread,
    format_origin,
    has_large_arrays,
    list_index,
    list_statistics,
    read_head,
    resolve_version,
    run_in_thread,
    start_trace,
)
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import DecodedInputs, GrpcCodec, InferRequestHeader, encode_field_head, parameter_value
from shoal.libs.grpc.request_cache import RequestLayout, RequestLayoutCache
from shoal.serve.messages.decoded_request import DecodedRequest

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

STREAM_WINDOW = 64
# The field of a ModelStreamInferResponse with the answer, and a parameter of every one: the last to its request.
STREAM_RESPONSE_KEY = pb.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2
FINAL_RESPONSE_PARAMETER = pb.ModelInferResponse(
    parameters={"triton_final_response": pb.InferParameter(bool_param=True)}
).SerializeToString()


class GrpcInferRequest(NamedTuple):
    """A ModelInferRequest, with its `layout` when that is known, else with `message`.

    arrived_s: its arrival by `time.monotonic()`
    """

    arrived_s: float
    content: bytes
    asked: InferRequestHeader
    layout: RequestLayout | None
    message: pb.ModelInferRequest | None


@dataclass(slots=True)
class Invocation:
    """The metadata of a call and of its answer.

    deadline_s: `time.monotonic()` until which the client waits; None for no limit
    trailing:   metadata sent after the answer
    """

    metadata: Mapping[bytes, bytes]
    deadline_s: float | None = None
    trailing: list[tuple[bytes, bytes]] = field(default_factory=list)


class InferenceServicer:
    """Answers each method of the service, or raises InferenceError or Closed."""

    def __init__(self, host: ModelManagerProtocol, access: AccessControl, tracer: Tracer | None = None) -> None:
        self._manager, self._access, self._tracer = host, access, tracer
        self._codecs = ModelCodecs(GrpcCodec)
        self._layouts = RequestLayoutCache()

    async def server_live(self, request: pb.ServerLiveRequest, invocation: Invocation) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: pb.ServerReadyRequest, invocation: Invocation) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._manager.is_ready)

    async def server_metadata(
        self, request: pb.ServerMetadataRequest, invocation: Invocation
    ) -> pb.ServerMetadataResponse:
        self._admit(invocation)
        return pb.ServerMetadataResponse(name="shoal", version="2", extensions=EXTENSIONS)

    async def model_ready(self, request: pb.ModelReadyRequest, invocation: Invocation) -> pb.ModelReadyResponse:
        """An unknown model or version is not ready; that is no error here."""
        self._admit(invocation, request.name)
        try:
            model = self._manager.get_model(request.name)
            version = resolve_version(model, request.version)
        except InferenceError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=bool(version or model.version))

    async def model_metadata(
        self, request: pb.ModelMetadataRequest, invocation: Invocation
    ) -> pb.ModelMetadataResponse:
        model = self._get_model(request.name, request.version, invocation)
        return json_format.ParseDict(msgspec.to_builtins(build_metadata(model)), pb.ModelMetadataResponse())

    async def model_config(self, request: pb.ModelConfigRequest, invocation: Invocation) -> pb.ModelConfigResponse:
        model = self._get_model(request.name, request.version, invocation)
        return pb.ModelConfigResponse(config=json_format.ParseDict(build_model_config(model), pb.ModelConfig()))

    async def model_statistics(
        self, request: pb.ModelStatisticsRequest, invocation: Invocation
    ) -> pb.ModelStatisticsResponse:
        caller = self._admit(invocation, request.name or None)
        statistics = list_statistics(self._manager, caller, request.name, request.version)
        content = {"model_stats": msgspec.to_builtins(statistics)}
        return json_format.ParseDict(content, pb.ModelStatisticsResponse(), ignore_unknown_fields=True)

    async def repository_index(
        self, request: pb.RepositoryIndexRequest, invocation: Invocation
    ) -> pb.RepositoryIndexResponse:
        caller = self._admit(invocation)
        models = [msgspec.to_builtins(each) for each in list_index(self._manager, caller, request.ready)]
        return json_format.ParseDict({"models": models}, pb.RepositoryIndexResponse())

    async def repository_model_load(
        self, request: pb.RepositoryModelLoadRequest, invocation: Invocation
    ) -> pb.RepositoryModelLoadResponse:
        caller = self._admit(invocation, request.model_name, administrator=True)
        parameters = {name: parameter_value(parameter) for name, parameter in request.parameters.items()}
        await self._manager.load(request.model_name, parameters, _format_origin(caller, invocation))
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, request: pb.RepositoryModelUnloadRequest, invocation: Invocation
    ) -> pb.RepositoryModelUnloadResponse:
        caller = self._admit(invocation, request.model_name, administrator=True)
        await self._manager.unload(request.model_name, _format_origin(caller, invocation))
        return pb.RepositoryModelUnloadResponse()

    async def model_infer(self, content: bytes, invocation: Invocation) -> bytes:
        """Answer a ModelInferRequest with a ModelInferResponse."""
        return await self._handle_infer(self._parse_request(content), invocation)

    async def _handle_infer(self, request: GrpcInferRequest, invocation: Invocation) -> bytes:
        asked = request.asked
        caller = self._admit(invocation, asked.model)
        name, metadata = "inference.GRPCInferenceService/ModelInfer", invocation.metadata
        with start_trace(self._tracer, name, asked.model, metadata) as trace:
            model = self._manager.get_model(asked.model)
            head = read_head(model, asked.version, metadata, caller, trace, request.arrived_s)
            codec = self._codecs.get(model)
            inputs = await self._decode_inputs(request, codec)
            call = head.complete(
                DecodedRequest(
                    inputs.arrays,
                    inputs.num_rows,
                    inputs.wanted,
                    timeout_us=asked.timeout_us,
                    action=asked.action,
                    seed=asked.seed,
                ),
                invocation.deadline_s,
            )
            prediction = await model.infer(call)
            if trace is not None:
                trace.record_prediction(prediction, call.num_rows)
            invocation.trailing.append((b"shoal-model-version", b"%d" % prediction.version))
            outputs, version = prediction.outputs, prediction.version
            if has_large_arrays(outputs, raw=asked.raw):
                return await run_in_thread(codec.encode, asked, inputs.outputs, version, outputs)
            return codec.encode(asked, inputs.outputs, version, outputs)

    def _parse_request(self, content: bytes) -> GrpcInferRequest:
        """Parse a message. Raises InferenceError (400)."""
        arrived_s = time.monotonic()
        layout = self._layouts.find(content)
        if layout is not None:
            return GrpcInferRequest(arrived_s, content, layout.asked, layout, None)
        message = parse_message(pb.ModelInferRequest, content)
        return GrpcInferRequest(arrived_s, content, InferRequestHeader.from_message(message), None, message)

    async def _decode_inputs(self, request: GrpcInferRequest, codec: GrpcCodec) -> DecodedInputs:
        """Decode the tensors. Raises InferenceError (400, 422)."""
        content, layout = request.content, request.layout
        is_large = len(content) > LARGE_BYTES and (codec.has_bytes_inputs or not request.asked.raw)
        if layout is not None and layout.codec is codec:
            return (
                await decode_in_thread(len(content), layout.decode_inputs, content)
                if is_large
                else layout.decode_inputs(content)
            )
        message = request.message or parse_message(pb.ModelInferRequest, content)
        inputs = await decode_in_thread(len(content), codec.decode, message) if is_large else codec.decode(message)
        self._layouts.learn(content, message, request.asked, codec, inputs)
        return inputs

    async def model_stream_infer(
        self, requests: AsyncIterator[bytes], invocation: Invocation
    ) -> AsyncGenerator[bytes, None]:
        """Answer each ModelInferRequest with a ModelStreamInferResponse. An invalid one ends the stream after the
        earlier answers."""
        room = asyncio.Semaphore(STREAM_WINDOW)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        tasks: set[asyncio.Task[bytes]] = set()

        async def read() -> None:
            try:
                async for content in requests:
                    await room.acquire()
                    task = asyncio.create_task(self._answer_stream_request(self._parse_request(content), invocation))
                    tasks.add(task)
                    answers.put_nowait(task)
            finally:
                answers.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (task := await answers.get()) is not None:
                yield await task
                tasks.discard(task)
                room.release()
            await reader  # raises the reader's error
        finally:
            for each in (reader, *tasks):
                each.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)

    async def _answer_stream_request(self, request: GrpcInferRequest, invocation: Invocation) -> bytes:
        """The answer to one request of a stream, or its error."""
        alone = Invocation(invocation.metadata, invocation.deadline_s)
        try:
            answer = await self._handle_infer(request, alone)
        except Exception as error:  # noqa: BLE001  # a call's top: `to_inference_error` logs a bug
            refused = to_inference_error(error)
            if invocation.metadata.get(b"triton_grpc_error") == b"true":
                raise refused from None
            of = pb.ModelInferResponse(id=request.asked.id)
            return pb.ModelStreamInferResponse(error_message=str(refused), infer_response=of).SerializeToString()
        head = encode_field_head(STREAM_RESPONSE_KEY, len(answer) + len(FINAL_RESPONSE_PARAMETER))
        return b"".join((head, answer, FINAL_RESPONSE_PARAMETER))

    def require_known_key(self, invocation: Invocation) -> None:
        """Check the key before a request is read. Raises InferenceError (401)."""
        self._access.require_known_key(*_get_credentials(invocation))

    def _admit(self, invocation: Invocation, model: str | None = None, *, administrator: bool = False) -> Caller:
        authorization, address = _get_credentials(invocation)
        return self._access.admit(authorization, model, administrator=administrator, origin=address)

    def _get_model(self, name: str, version: str, invocation: Invocation) -> ServedModelProtocol:
        """The model, if the caller may use it and it has this version. Raises InferenceError (401, 403, 404, 429)."""
        self._admit(invocation, name)
        model = self._manager.get_model(name)
        resolve_version(model, version)
        return model


def to_inference_error(error: Exception) -> InferenceError:
    """The client's error for an exception of a method; a bug is logged."""
    if isinstance(error, InferenceError):
        return error
    if isinstance(error, Closed):
        return InferenceError(503, "the endpoint is closing; try again later", retry_after_s=1.0)
    logger.error("a request failed", exc_info=error)
    return InferenceError(500, f"this request failed: {type(error).__name__}: {error}")


def parse_message(kind: type[M], content: bytes) -> M:
    """Parse a message of this kind. Raises InferenceError (400)."""
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise InferenceError(400, f"not a {kind.DESCRIPTOR.name}: {error}") from None


def _get_credentials(invocation: Invocation) -> tuple[bytes, bytes]:
    """The caller's key and address."""
    return invocation.metadata.get(b"authorization", b""), invocation.metadata.get(FORWARDED_FROM_HEADER, b"")


def _format_origin(caller: Caller, invocation: Invocation) -> str:
    return format_origin(caller.name, invocation.metadata.get(FORWARDED_FROM_HEADER, b"").decode("latin-1"))
