"""The gRPC options that make Ray Serve's HAProxy listen for gRPC.

Called by `deployment`. Serve starts a gRPC server in every replica, which HAProxy uses for the health check only: calls
reach a replica as HTTP/1.1 requests (`serve.grpc.app`).
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import gRPCOptions

from shoal.serve.on_ray.bind_address import patch_bind_addresses


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
