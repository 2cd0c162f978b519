"""The Open Inference Protocol v2 over gRPC: its inferences, and all else as REST answers it, on messages.

Owns the meaning of each method. `codec` has the tensors, with the layouts of earlier requests (so inferences
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
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from shoal.errors import InferenceError
from shoal.extend.serve import (
    ADMIN_ACTIONS,
    ANONYMOUS,
    UNAUTHENTICATED_ACTIONS,
    AccessControl,
    Caller,
    ModelCodecs,
    ModelManagerProtocol,
    RestHandlers,
    RouteAction,
    RouteTarget,
    TracerProtocol,
    answer_inference,
    decode_sized,
    encode_sized,
    format_origin,
    start_trace,
    to_inference_error,
)
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import (
    GrpcCodec,
    GrpcInferCall,
    RequestLayout,
    RequestLayoutCache,
    encode_field_head,
    parameter_value,
)
from shoal.libs.grpc.methods import ACTIONS, FORMS, GrpcCall, GrpcMethod

M = TypeVar("M", bound=Message)

STREAM_WINDOW = 64
# The field of a ModelStreamInferResponse with the answer, and a parameter of every one: the last to its request.
STREAM_RESPONSE_KEY = pb.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2
FINAL_RESPONSE_PARAMETER = pb.ModelInferResponse(
    parameters={"triton_final_response": pb.InferParameter(bool_param=True)}
).SerializeToString()


class GrpcInferRequest(NamedTuple):
    """A ModelInferRequest.

    arrived_s: its arrival by `time.monotonic()`
    message:   without its elements where its layout is known
    """

    arrived_s: float
    content: bytes
    message: pb.ModelInferRequest
    layout: RequestLayout | None = None


class InferenceServicer:
    """Answers each method of the service, or raises InferenceError or Closed."""

    def __init__(self, host: ModelManagerProtocol, access: AccessControl, tracer: TracerProtocol | None = None) -> None:
        self._manager = host
        self._access = access
        self._tracer = tracer
        self._handlers, self._codecs = RestHandlers(host, None), ModelCodecs(GrpcCodec)
        self._layouts = RequestLayoutCache()

    async def describe(self, method: GrpcMethod, request: Any, call: GrpcCall) -> Message:
        """Answer a method that is no inference, as REST does. What is unknown is not ready; that is no error here."""
        action, form = ACTIONS[method.name], FORMS.get(method.name, b"%b")
        fields = {each.name for each in request.DESCRIPTOR.fields}
        name = request.name if "name" in fields else request.model_name if "model_name" in fields else None
        target = RouteTarget(action, "POST", name or None, request.version if "version" in fields else None)
        caller = ANONYMOUS
        if action not in UNAUTHENTICATED_ACTIONS:
            caller = self._admit(call, target.model, administrator=action in ADMIN_ACTIONS)
        origin = format_origin(caller.name, call.credentials[1].decode("latin-1"))
        if "parameters" in fields:
            body: dict[str, Any] = {
                "parameters": {each: parameter_value(value) for each, value in request.parameters.items()}
            }
        else:
            body = {"ready": "ready" in fields and request.ready}
        try:
            answer = await self._handlers.answer(target, caller, origin, msgspec.json.encode(body))
        except InferenceError:
            if action not in (RouteAction.READY, RouteAction.MODEL_READY):
                raise
            return method.response()
        return json_format.Parse(form % answer.body, method.response(), ignore_unknown_fields=True)

    async def model_infer(self, content: bytes, call: GrpcCall) -> bytes:
        """Answer a ModelInferRequest with a ModelInferResponse."""
        return await self._handle_infer(self._parse_request(content), call)

    async def _handle_infer(self, request: GrpcInferRequest, call: GrpcCall) -> bytes:
        message, metadata = request.message, call.metadata
        name = message.model_name
        caller = self._admit(call, name)
        with start_trace(self._tracer, "inference.GRPCInferenceService/ModelInfer", name, metadata) as trace:
            model = self._manager.get_model(name)
            codec = self._codecs.get(model)
            decode = partial(self._decode, request, codec)
            decoded, prediction = await answer_inference(
                model, message.model_version, metadata, caller, trace, decode, request.arrived_s, call.deadline_s
            )
            answer = await encode_sized(partial(codec.encode, decoded), prediction, raw=decoded.binary)
            call.trailing.append((b"shoal-model-version", b"%d" % prediction.version))
            return answer

    def _parse_request(self, content: bytes) -> GrpcInferRequest:
        """Parse a message. Raises InferenceError (400)."""
        arrived_s = time.monotonic()
        if (layout := self._layouts.find(content)) is not None:
            return GrpcInferRequest(arrived_s, content, layout.message, layout)
        return GrpcInferRequest(arrived_s, content, parse_message(pb.ModelInferRequest, content))

    async def _decode(self, request: GrpcInferRequest, codec: GrpcCodec) -> GrpcInferCall:
        """Decode the tensors. Raises InferenceError (400, 422)."""
        content, layout = request.content, request.layout
        if layout is not None and layout.codec is codec:
            return await decode_sized(len(content) * codec.has_bytes_inputs, layout.decode, content)
        message = request.message if layout is None else parse_message(pb.ModelInferRequest, content)
        is_read_one_by_one = codec.has_bytes_inputs or not message.raw_input_contents
        call = await decode_sized(len(content) * is_read_one_by_one, codec.decode, message)
        self._layouts.learn(content, message, codec, call)
        return call

    async def model_stream_infer(self, requests: AsyncIterator[bytes], call: GrpcCall) -> AsyncGenerator[bytes, None]:
        """Answer each ModelInferRequest with a ModelStreamInferResponse. An invalid one ends the stream after the
        earlier answers."""
        room = asyncio.Semaphore(STREAM_WINDOW)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        tasks: set[asyncio.Task[bytes]] = set()

        async def read() -> None:
            try:
                async for content in requests:
                    await room.acquire()
                    task = asyncio.create_task(self._answer_stream_request(self._parse_request(content), call))
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

    async def _answer_stream_request(self, request: GrpcInferRequest, call: GrpcCall) -> bytes:
        """The answer to one request of a stream, or its error."""
        alone = GrpcCall(call.metadata, call.deadline_s)
        try:
            answer = await self._handle_infer(request, alone)
        except Exception as error:  # noqa: BLE001  # a call's top: `to_inference_error` logs a bug
            refused = to_inference_error(error)
            if call.metadata.get(b"triton_grpc_error") == b"true":
                raise refused from None
            of = pb.ModelInferResponse(id=request.message.id)
            return pb.ModelStreamInferResponse(error_message=str(refused), infer_response=of).SerializeToString()
        head = encode_field_head(STREAM_RESPONSE_KEY, len(answer) + len(FINAL_RESPONSE_PARAMETER))
        return b"".join((head, answer, FINAL_RESPONSE_PARAMETER))

    def require_known_key(self, call: GrpcCall) -> None:
        """Check the key before a request is read. Raises InferenceError (401)."""
        self._access.require_known_key(*call.credentials)

    def _admit(self, call: GrpcCall, model: str | None = None, *, administrator: bool = False) -> Caller:
        authorization, origin = call.credentials
        return self._access.admit(authorization, model, administrator=administrator, origin=origin)


def parse_message(kind: type[M], content: bytes) -> M:
    """Parse a message of this kind. Raises InferenceError (400)."""
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise InferenceError(400, f"not a {kind.DESCRIPTOR.name}: {error}") from None
