"""Restricts the addresses on which a replica's servers listen, and makes Serve's gRPC listen at all.

Serve has no setting for it. Its gRPC servers, for health and for other deployments, listen on every interface (`[::]`);
on a loopback cluster they are moved to loopback. Its HTTP server listens on Serve's address: loopback, or the head's
address where each node has an ingress. But HAProxy connects to another host's replica at that host's address. On the
head, HAProxy connects over loopback and other deployments at the host's address, so gRPC stays on every interface
there. Called by the Ray shell in a replica's constructor, which runs before Serve makes any server.

Serve starts a gRPC server in every replica, which HAProxy uses for the health check only: calls reach a replica as
HTTP/1.1 requests (see `cluster.ingress.haproxy_config`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private import default_impl, replica
from ray.serve.config import gRPCOptions

from shoal.cluster.capacity import get_head_address, get_head_id
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE, find_ingress_folder
from shoal.network_address import is_loopback

ANY_ADDRESS = "[::]:"
ANY_HOSTS = ("0.0.0.0", "::")


def patch_bind_addresses() -> None:
    """Patch every server that Serve makes in this process from now on. Idempotent."""
    host = ray.util.get_node_ip_address()
    is_on_head = is_head(host)
    if is_loopback(host) or not is_on_head:
        default_impl.add_grpc_address = _bind_grpc_to(host, default_impl.add_grpc_address)
        replica.add_port_to_grpc_server = _bind_grpc_to(host, replica.add_port_to_grpc_server)
    if not is_on_head:
        start = replica.start_asgi_http_server

        def start_here(app: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
            if options.host not in ANY_HOSTS:
                options = options.model_copy(update={"host": host})
            return start(app, options, *args, **kwargs)

        replica.start_asgi_http_server = start_here


def is_head(host: str) -> bool:
    """Whether this host has the head's address, as HAProxy decides it: a second raylet on the head's host counts
    too."""
    return is_loopback(host) or get_head_address() == host


def _bind_grpc_to(host: str, add: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def add_there(server: Any, address: str) -> Any:
        return add(server, address.replace(ANY_ADDRESS, f"[{host}]:" if ":" in host else f"{host}:"))

    return add_there


def announce_http_address(announce: Callable[[str], None]) -> None:
    """Call `announce` with host:port of the HTTP server that Serve starts in this process, after
    `patch_bind_addresses`."""
    node = ray.util.get_node_ip_address()

    def tell(options: Any, server: Any) -> None:
        host = options.host if is_head(node) and options.host not in ANY_HOSTS else node
        announce(f"[{host}]:{options.port}" if ":" in host else f"{host}:{options.port}")

    _call_with_server(tell)


def _call_with_server(begin: Callable[[Any, Any], None]) -> None:
    """Call `begin` with the options, and the HTTP server that Serve starts with them in this process."""
    start = replica.start_asgi_http_server

    async def start_and_begin(app: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        task, server = await start(app, options, *args, **kwargs)
        begin(options, server)
        return task, server

    replica.start_asgi_http_server = start_and_begin


def answer_clients(answer_s: float) -> None:
    """Have the HTTP server that Serve starts next in this process answer clients at the ingress's port, when there is
    nothing to balance on this node.

    answer_s: the longest that an answer may take
    """
    if BINARY_VARIABLE not in os.environ or sys.platform != "linux":
        return
    from shoal.serve.http.front_protocol import FrontFollower

    node = ray.util.get_node_ip_address()
    folder = find_ingress_folder() / (get_head_id() if is_head(node) else ray.get_runtime_context().get_node_id())

    def follow(options: Any, server: Any) -> None:
        follower = FrontFollower(server, (options.host, node), options.port, folder, answer_s)
        server.following = asyncio.get_running_loop().create_task(follower.run())

    _call_with_server(follow)


class LoopbackGrpcOptions(gRPCOptions):
    """A process of Serve that receives these makes its gRPC servers on loopback, on a loopback cluster.

    Serve's fallback proxy offers no other hook: no code of ours runs there before its server listens.
    """

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        patch_bind_addresses()


def grpc_options(port: int) -> gRPCOptions:
    """The options for `serve.start`. Without reflection, which would answer callers without a key."""
    function = f"{__name__}.{add_nothing.__name__}"
    return LoopbackGrpcOptions(port=port, grpc_servicer_functions=[function], enable_reflection=False)


def add_nothing(servicer: Any, server: Any) -> None:
    """Add no service. Serve enables gRPC when given such a function, and calls it for each of its gRPC servers."""
