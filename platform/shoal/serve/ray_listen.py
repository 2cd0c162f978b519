"""Where a replica's servers listen: where HAProxy reaches them, and nowhere else.

Serve has no setting for it. Its servers of gRPC, for health and for other deployments, listen on every interface
(`[::]`), which is made loopback where the cluster is. Its server of HTTP listens where the endpoint does, on the
loopback of a host: but HAProxy runs on the head, and asks a replica on another host by that host's address. Called by
the Ray shell in a replica's constructor, which runs before Serve makes any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private import default_impl, replica

from shoal.serve.endpoint import is_loopback

EVERYWHERE = "[::]:"
HEAD = "node:__internal_head__"  # the resource by which Ray marks it


def listen_where_asked() -> None:
    """Every server that Serve makes in this process from now on. Idempotent."""
    host = ray.util.get_node_ip_address()
    if is_loopback(host):
        default_impl.add_grpc_address = _on(host, default_impl.add_grpc_address)
        replica.add_port_to_grpc_server = _on(host, replica.add_port_to_grpc_server)
    elif not _is_head():
        replica.start_asgi_http_server = _reached_at(host, replica.start_asgi_http_server)


def _is_head() -> bool:
    here = ray.get_runtime_context().get_node_id()
    return any(HEAD in node["Resources"] for node in ray.nodes() if node["NodeID"] == here)


def _on(host: str, add: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def add_on_loopback(server: Any, address: str) -> Any:
        return add(server, address.replace(EVERYWHERE, f"{host}:"))

    return add_on_loopback


def _reached_at(host: str, start: Callable[..., Any]) -> Callable[..., Any]:
    def start_there(app: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        if is_loopback(options.host):
            options = options.model_copy(update={"host": host})
        return start(app, options, *args, **kwargs)

    return start_there
