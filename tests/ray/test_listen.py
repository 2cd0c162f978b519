"""Where a replica's servers listen; Serve's own functions, without a cluster."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from shoal.errors import ConfigError


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
        ("192.0.2.7", True, "192.0.2.7", "192.0.2.7"),  # each node has an ingress: Serve has the head's address
        ("192.0.2.8", False, "192.0.2.7", "192.0.2.8"),
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


@pytest.mark.parametrize(
    ("lacks", "field", "problem"),
    [
        ("file", "endpoint.tls.certificate", r"cannot be read \(No such file or directory\)"),
        ("port", "endpoint.grpc_port", r"is in use at 127\.0\.0\.1"),
    ],
)
def test_what_a_node_lacks_for_its_ingress_is_said_with_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str, field: str, problem: str
) -> None:
    import ray

    from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE
    from shoal.serve.on_ray import ingress_front
    from shoal.serve.spec.reach import Reach

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "ha" / "haproxy"))
    files = {"certificate": str(tmp_path / "none.pem"), "key": str(tmp_path / "none.key")}
    reach = Reach.parse({"tls": files} if lacks == "file" else {})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"grpc_port": taken.getsockname()[1]}
        with pytest.raises(ConfigError, match=rf"{problem}, on the node 192\.0\.2\.7, which .*every_node") as caught:
            ingress_front._install_on_node(reach, ports)
    assert caught.value.field == field


@pytest.mark.parametrize("fields", [{"scale": {"min": 0, "max": 2}}, {"scale": {"min": 1, "max": 2}}, {}])
def test_no_endpoint_sleeps_where_several_share_an_ingress_on_every_node(fields: dict[str, Any]) -> None:
    """A node that never had a replica of it does not know that it sleeps."""
    from shoal.serve.on_ray.deployment import reject_sleep_of_shared
    from shoal.serve.spec.endpoint import EndpointSpec

    spec = EndpointSpec.parse({"name": "m", **fields})
    if not spec.may_sleep:
        reject_sleep_of_shared(spec, [])
        with pytest.raises(ConfigError, match=r"endpoint\.ingress = 'every_node': is shared with a, which may sleep"):
            reject_sleep_of_shared(spec, ["a"])
        return
    with pytest.raises(ConfigError, match=r"give scale\.min=1, or endpoint\.ingress=head"):
        reject_sleep_of_shared(spec, [])


def test_a_replica_of_another_host_needs_an_ingress_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.errors import ConfigError
    from shoal.serve.on_ray import replica_worker
    from shoal.serve.spec.endpoint import EndpointSpec

    spec = EndpointSpec(name="many", memory="1MiB")
    monkeypatch.setattr(replica_worker, "is_head", lambda host: True)
    replica_worker.require_reachable_peers(spec)
    monkeypatch.setattr(replica_worker, "is_head", lambda host: False)
    replica_worker.require_reachable_peers(spec.model_copy(update={"ingress": "every_node"}))
    with pytest.raises(ConfigError, match=r"endpoint\.ingress = 'head'.* give ingress: every_node"):
        replica_worker.require_reachable_peers(spec)
