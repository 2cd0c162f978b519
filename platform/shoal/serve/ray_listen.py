"""Where a replica's servers of gRPC listen: on loopback, when its cluster does.

Serve writes `[::]`, every interface, into its program, for the server that HAProxy asks and for the one that other
deployments ask, and has no setting for either. Called by the Ray shell in a replica's constructor, which runs before
Serve makes them. On several hosts, where Ray itself listens on the hosts' addresses, nothing is changed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private import default_impl, replica

EVERYWHERE = "[::]:"


def listen_on_loopback() -> None:
    """Every gRPC server that Serve makes in this process from now on. Idempotent."""
    host = ray.util.get_node_ip_address()
    if ipaddress.ip_address(host).is_loopback:
        default_impl.add_grpc_address = _on(host, default_impl.add_grpc_address)
        replica.add_port_to_grpc_server = _on(host, replica.add_port_to_grpc_server)


def _on(host: str, add: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def add_on_loopback(server: Any, address: str) -> Any:
        return add(server, address.replace(EVERYWHERE, f"{host}:"))

    return add_on_loopback
