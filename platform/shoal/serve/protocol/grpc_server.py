"""The gRPC service on the wire: handlers for each method of an `InferenceServicer`, and a server of its own.

Owns statuses, deadlines and metadata. Called by whoever has a `grpc.aio` server (`listen`, or Ray Serve's through
`ray_grpc`). What a method raises leaves as a status and a message of ours, never as a traceback:

    400 405 422 INVALID_ARGUMENT     401 UNAUTHENTICATED      403 PERMISSION_DENIED   404 NOT_FOUND
    409 FAILED_PRECONDITION          413 429 RESOURCE_EXHAUSTED                       500 INTERNAL
    415 501 UNIMPLEMENTED            503 UNAVAILABLE          408 504 DEADLINE_EXCEEDED

A refusal that knows when to come back has `retry-after` (seconds) in its trailing metadata. A message that is larger
than the limit is refused by gRPC itself, while it arrives.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from shoal.errors import InferenceError
from shoal.open_inference import inference_pb2 as pb
from shoal.serve.protocol.grpc_service import InferenceServicer, Invocation, refusal

SERVICE = "inference.GRPCInferenceService"
STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.INVALID_ARGUMENT,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.UNIMPLEMENTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
OPEN = frozenset({"ServerLive", "ServerReady"})  # to everybody
FOREVER_S = 1e9  # gRPC's word for no deadline is one in some hundred years
MAX_DETAILS_CHARS = 2000  # they travel in a header block, which proxies limit
# Methods that stock clients have, and what they are told.
NOT_SERVED = {
    "SystemSharedMemoryStatus": "shared memory",
    "SystemSharedMemoryRegister": "shared memory",
    "SystemSharedMemoryUnregister": "shared memory",
    "CudaSharedMemoryStatus": "shared memory",
    "CudaSharedMemoryRegister": "shared memory",
    "CudaSharedMemoryUnregister": "shared memory",
    "TraceSetting": "changing what is traced",
    "LogSettings": "changing what is logged",
}


class Context(Protocol):
    """What the handlers need of a call: `grpc.aio.ServicerContext` has it, and what Ray Serve gives in its place."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, metadata: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the service. `attribute` is its name in `InferenceServicer`."""

    name: str
    attribute: str
    request: type[Message]
    response: type[Message]
    streams: bool

    def handler(self, handle: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """For a `grpc.aio` server: `handle` gets the request, or an iterator of them, and the context."""
        make = grpc.stream_stream_rpc_method_handler if self.streams else grpc.unary_unary_rpc_method_handler
        return make(handle, self.request.FromString, self.response.SerializeToString)


def _methods() -> dict[str, Method]:
    found = {}
    for each in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        attribute = re.sub(r"(?<!^)(?=[A-Z])", "_", each.name).lower()
        request, response = getattr(pb, each.input_type.name), getattr(pb, each.output_type.name)
        found[each.name] = Method(each.name, attribute, request, response, each.server_streaming)
    return found


METHODS = _methods()


async def answer(
    servicer: InferenceServicer, method: Method, request: Message, context: Context, left_s: float | None
) -> Message:
    """The response of a method without streams, or an empty one and a status that says why.

    left_s: seconds until the client's deadline; None when it has none
    """
    invocation = _invocation(context, left_s)
    try:
        response: Message = await getattr(servicer, method.attribute)(request, invocation)
    except Exception as error:  # noqa: BLE001  # a call's top: `refusal` logs what is none of ours
        refuse(context, refusal(error))
        return method.response()
    if invocation.trailing:
        context.set_trailing_metadata(invocation.trailing)
    return response


async def answers(
    servicer: InferenceServicer,
    method: Method,
    requests: AsyncIterator[Message],
    context: Context,
    left_s: float | None,
) -> AsyncGenerator[Message, None]:
    """The responses of a method with streams; a status says why they end early."""
    invocation = _invocation(context, left_s)
    try:
        async with aclosing(getattr(servicer, method.attribute)(requests, invocation)) as responses:
            async for response in responses:
                yield response
    except Exception as error:  # noqa: BLE001  # a call's top: `refusal` logs what is none of ours
        refuse(context, refusal(error))


class Handlers(grpc.GenericRpcHandler):
    """All that a `grpc.aio` server does for the service.

    gRPC reads the message of a call without streams before it asks the handler, so the key is looked at here.
    """

    def __init__(self, servicer: InferenceServicer) -> None:
        self._servicer = servicer
        found = {name: _native(servicer, method) for name, method in METHODS.items()} | refusals()
        self._handlers = {f"/{SERVICE}/{name}": handler for name, handler in found.items()}
        self._keyed = {
            f"/{SERVICE}/{name}" for name, method in METHODS.items() if not method.streams and name not in OPEN
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if details.method in self._keyed:
            try:
                self._servicer.require_known(Invocation(dict(details.invocation_metadata or ())))
            except InferenceError as error:
                return _unread(error)
        return self._handlers.get(details.method)


def refusals() -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Handlers of the methods that are not served: they say so, and read nothing."""
    return {
        name: _unread(InferenceError(501, f"{name} is not served: {what} is not offered here"))
        for name, what in NOT_SERVED.items()
    }


def _unread(error: InferenceError) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler of a call that is refused before its message is read: it takes a stream, and leaves it."""

    async def handle(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await context.abort(STATUSES[error.status], str(error))

    return grpc.stream_unary_rpc_method_handler(handle)


class GrpcServer:
    """A server of its own on `host`; `port` says which port it got. Loopback is the caller's care."""

    def __init__(self, servicer: InferenceServicer, host: str, port: int, *, max_message_bytes: int) -> None:
        limits = [("grpc.max_receive_message_length", max_message_bytes), ("grpc.max_send_message_length", -1)]
        self._server = grpc.aio.server(options=[*limits, ("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers([Handlers(servicer)])
        self.port = self._server.add_insecure_port(f"{host}:{port}")

    async def start(self) -> None:
        await self._server.start()

    async def close(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, and cancel those that are not answered within `grace_s`. Idempotent."""
        await self._server.stop(grace_s)


def _native(servicer: InferenceServicer, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
    async def one(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        return await answer(servicer, method, request, context, time_left_s(context))

    async def many(
        requests: AsyncIterator[Message], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Message, None]:
        async for response in answers(servicer, method, requests, context, time_left_s(context)):
            yield response

    return method.handler(many if method.streams else one)


def time_left_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the client's deadline; None when it has none."""
    left_s = context.time_remaining()
    return None if left_s is None or left_s > FOREVER_S else left_s


def _invocation(context: Context, left_s: float | None) -> Invocation:
    metadata = dict(context.invocation_metadata() or ())
    return Invocation(metadata, None if left_s is None else time.monotonic() + left_s)


def refuse(context: Context, error: InferenceError) -> None:
    """Say with a status what was wrong."""
    context.set_code(STATUSES.get(error.status, grpc.StatusCode.INTERNAL))
    context.set_details(str(error)[:MAX_DETAILS_CHARS])
    if error.retry_after_s is not None:
        context.set_trailing_metadata([("retry-after", str(math.ceil(error.retry_after_s)))])
