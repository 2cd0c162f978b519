"""gRPC within Ray Serve: what Serve is told, and the methods that a deployment forwards to an `InferenceServicer`.

Called by `ray_serve`. With HAProxy in front, every replica has a gRPC server of its own, made by Serve, which ends it
when the calls in hand are answered. A call goes one of two ways:

- through Serve, which counts it, so that scaling sees it. Serve does not hand on the call itself, whose deadline is
  needed: the handlers that it is given keep it in a context variable.
- directly to the servicer, after `answer_directly`: 0.2 ms sooner, and unseen by Serve.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from ray.serve._private import constants
from ray.serve.config import gRPCOptions

from shoal.serve.endpoint import EndpointSpec
from shoal.serve.protocol.grpc_server import (
    METHODS,
    SERVICE,
    Context,
    Handlers,
    Method,
    answer,
    answers,
    refusals,
    time_left_s,
)
from shoal.serve.protocol.grpc_service import InferenceServicer
from shoal.serve.ray_listen import listen_on_loopback

_direct: list[Handlers] = []  # of this process's replica, when they answer directly
_call: ContextVar[grpc.aio.ServicerContext[Any, Any]] = ContextVar("call")


class LoopbackOptions(gRPCOptions):  # type: ignore[misc]  # Ray has no types
    """Whichever process of Serve receives these makes its gRPC servers on loopback, when the cluster is there.

    Serve's fallback proxy has no other place for it: nothing of ours runs there before its server listens.
    """

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        listen_on_loopback()


def grpc_options(spec: EndpointSpec, port: int) -> gRPCOptions:
    """For `serve.start`. Without reflection: it would answer who shows no key."""
    function = f"{__name__}.{add_to_server.__name__}"
    return LoopbackOptions(port=port, grpc_servicer_functions=[function], enable_reflection=False)


def limit_messages(max_body_bytes: int) -> None:
    """For a replica's constructor, which runs before Serve makes the gRPC server: the largest message it takes.

    Serve has a setting for it, but of the whole cluster; its server reads this list.
    """
    options = [option for option in constants.DEFAULT_GRPC_SERVER_OPTIONS if "receive" not in option[0]]
    constants.DEFAULT_GRPC_SERVER_OPTIONS[:] = [*options, ("grpc.max_receive_message_length", max_body_bytes)]


def answer_directly(servicer: InferenceServicer) -> None:
    """For a replica's constructor, when the number of replicas does not follow the load as Serve sees it."""
    _direct[:] = [Handlers(servicer)]


class GrpcMethods:
    """Base of a deployment's class: one method for each of the protocol's, by its name. `servicer` answers."""

    servicer: InferenceServicer


def _forward(method: Method) -> Callable[..., Any]:
    async def one(self: GrpcMethods, request: Any, grpc_context: Context) -> Any:
        return await answer(self.servicer, method, request, grpc_context, time_left_s(_call.get()))

    async def many(self: GrpcMethods, request: AsyncIterator[Any], grpc_context: Context) -> AsyncGenerator[Any, None]:
        async for response in answers(self.servicer, method, request, grpc_context, time_left_s(_call.get())):
            yield response

    return many if method.streams else one


for _method in METHODS.values():
    setattr(GrpcMethods, _method.name, _forward(_method))


class _Handlers(grpc.GenericRpcHandler):
    """Serve puts its own handlers into `_method_handlers`; each call is kept on its way to them."""

    def __init__(self) -> None:
        self._method_handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            f"/{SERVICE}/{name}": method.handler(_nobody) for name, method in METHODS.items()
        }
        self._kept: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._refusals = {f"/{SERVICE}/{name}": handler for name, handler in refusals().items()}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if _direct:
            return _direct[0].service(details)
        kept = self._kept.get(details.method) or self._refusals.get(details.method)
        if kept is None and details.method in self._method_handlers:
            kept = self._kept[details.method] = _keeping(self._method_handlers[details.method])
        return kept


def _keeping(handler: Any) -> Any:
    """The handler, with its call in `_call`."""

    async def one(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        _call.set(context)
        return await handler.unary_unary(request, context)

    async def many(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any, None]:
        _call.set(context)
        async for response in handler.stream_stream(request, context):
            yield response

    return handler._replace(unary_unary=one, stream_stream=many)


async def _nobody(request: Any, context: Any) -> None:
    """Replaced by Serve."""


def add_to_server(servicer: Any, server: Any) -> None:
    """Named in `grpc_options`: Serve calls it for each replica's gRPC server. `servicer` means nothing."""
    server.add_generic_rpc_handlers([_Handlers()])
