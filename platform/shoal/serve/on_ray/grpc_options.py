"""gRPC in Ray Serve's eyes: what makes it have HAProxy listen for it.

Called by `ray_serve`. Serve makes a gRPC server in every replica, which HAProxy asks for the replica's health and for
nothing else: calls reach a replica as requests of HTTP/1.1 (`serve.protocol.grpc_http1`).
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import gRPCOptions

from shoal.serve.on_ray.bind_address import patch_bind_addresses


class LoopbackGrpcOptions(gRPCOptions):
    """Whichever process of Serve receives these makes its gRPC servers on loopback, when the cluster is there.

    Serve's fallback proxy has no other place for it: nothing of ours runs there before its server listens.
    """

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        patch_bind_addresses()


def grpc_options(port: int) -> gRPCOptions:
    """For `serve.start`. Without reflection: it would answer who shows no key."""
    function = f"{__name__}.{add_nothing.__name__}"
    return LoopbackGrpcOptions(port=port, grpc_servicer_functions=[function], enable_reflection=False)


def add_nothing(servicer: Any, server: Any) -> None:
    """Serve has gRPC when it is given such a function, and calls it for each of its gRPC servers."""
