"""Where a replica's servers listen: where they are asked, as far as that is one place.

Serve has no setting for it. Its servers of gRPC, for health and for other deployments, listen on every interface
(`[::]`), which is made loopback where the cluster is. Its server of HTTP listens where the endpoint does, on loopback:
but HAProxy runs on the head, and asks a replica of another host at that host's address. The head's own are asked on
loopback by HAProxy, and at the host's address by other deployments, so there gRPC stays everywhere. Called by the Ray
shell in a replica's constructor, which runs before Serve makes any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private import default_impl, replica

from shoal.cluster.capacity import get_head_address
from shoal.network_address import is_loopback

ANY_ADDRESS = "[::]:"


def patch_bind_addresses() -> None:
    """Every server that Serve makes in this process from now on. Idempotent."""
    host = ray.util.get_node_ip_address()
    is_on_head = is_head(host)
    if is_loopback(host) or not is_on_head:
        default_impl.add_grpc_address = _bind_grpc_to(host, default_impl.add_grpc_address)
        replica.add_port_to_grpc_server = _bind_grpc_to(host, replica.add_port_to_grpc_server)
    if not is_on_head:
        replica.start_asgi_http_server = _bind_http_to(host, replica.start_asgi_http_server)


def is_head(host: str) -> bool:
    """As HAProxy sees it, which goes by addresses: a second raylet of the head's host is there, too."""
    return is_loopback(host) or get_head_address() == host


def _bind_grpc_to(host: str, add: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def add_there(server: Any, address: str) -> Any:
        return add(server, address.replace(ANY_ADDRESS, f"[{host}]:" if ":" in host else f"{host}:"))

    return add_there


def _bind_http_to(host: str, start: Callable[..., Any]) -> Callable[..., Any]:
    def start_there(app: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        if is_loopback(options.host):
            options = options.model_copy(update={"host": host})
        return start(app, options, *args, **kwargs)

    return start_there
