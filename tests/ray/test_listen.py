"""Where a replica's gRPC servers listen; Serve's own functions, without a cluster."""

from __future__ import annotations

import asyncio
import os

import grpc
import psutil
import pytest


@pytest.mark.parametrize(("node", "expected"), [("127.0.0.1", {"::ffff:127.0.0.1"}), ("192.0.2.7", {"::"})])
def test_on_loopback_when_ray_does(monkeypatch: pytest.MonkeyPatch, node: str, expected: set[str]) -> None:
    import ray
    from ray.serve._private import default_impl, replica

    from shoal.cluster.serve_environment import free_port
    from shoal.serve.ray_listen import listen_on_loopback

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    for module, name in ((default_impl, "add_grpc_address"), (replica, "add_port_to_grpc_server")):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that it is put back

    async def listening() -> set[str]:
        server, ports = grpc.aio.server(), {free_port()}
        default_impl.add_grpc_address(server, f"[::]:{min(ports)}")
        ports.add(replica.add_port_to_grpc_server(server, "[::]:0"))
        await server.start()
        connections = psutil.Process(os.getpid()).net_connections("tcp")
        found = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port in ports]
        await server.stop(0)
        assert {address.port for address in found} == ports
        return {address.ip for address in found}

    listen_on_loopback()
    listen_on_loopback()
    assert asyncio.run(listening()) == expected
