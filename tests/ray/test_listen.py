"""Where a replica's servers listen; Serve's own functions, without a cluster."""

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

    from shoal.cluster.ports import find_free_port
    from shoal.serve.on_ray import bind_address
    from shoal.serve.on_ray.bind_address import patch_bind_addresses

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    monkeypatch.setattr(bind_address, "is_head", lambda host: True)
    for module, name in ((default_impl, "add_grpc_address"), (replica, "add_port_to_grpc_server")):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that it is put back

    async def listening() -> set[str]:
        server, ports = grpc.aio.server(), {find_free_port()}
        default_impl.add_grpc_address(server, f"[::]:{min(ports)}")
        ports.add(replica.add_port_to_grpc_server(server, "[::]:0"))
        await server.start()
        connections = psutil.Process(os.getpid()).net_connections("tcp")
        found = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port in ports]
        await server.stop(0)
        assert {address.port for address in found} == ports
        return {address.ip for address in found}

    patch_bind_addresses()
    patch_bind_addresses()
    assert asyncio.run(listening()) == expected


@pytest.mark.parametrize(
    ("node", "is_head", "chosen", "expected"),
    [
        ("127.0.0.1", True, "127.0.0.1", "127.0.0.1"),
        ("192.0.2.7", True, "127.0.0.1", "127.0.0.1"),  # HAProxy is beside it
        ("192.0.2.7", False, "127.0.0.1", "192.0.2.7"),
        ("192.0.2.7", False, "localhost", "192.0.2.7"),
        ("192.0.2.7", False, "0.0.0.0", "0.0.0.0"),
    ],
)
def test_http_where_haproxy_asks_it(
    monkeypatch: pytest.MonkeyPatch, node: str, is_head: bool, chosen: str, expected: str
) -> None:
    import ray
    from ray.serve._private import default_impl, replica
    from ray.serve.config import HTTPOptions

    from shoal.serve.on_ray import bind_address

    started: list[tuple[str, int]] = []
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    monkeypatch.setattr(bind_address, "is_head", lambda host: is_head)
    for module, name in ((default_impl, "add_grpc_address"), (replica, "add_port_to_grpc_server")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(
        replica, "start_asgi_http_server", lambda app, options, **others: started.append((options.host, options.port))
    )
    bind_address.patch_bind_addresses()
    bind_address.patch_bind_addresses()
    replica.start_asgi_http_server(None, HTTPOptions(host=chosen, port=30001), event_loop=None)
    assert started == [(expected, 30001)]
