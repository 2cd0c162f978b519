"""Where the gateway listens, and which host actors are told to connect to."""

from __future__ import annotations

import resource
import socket
from typing import Any

import pytest
import zmq

from shoal import network_address
from shoal.errors import ConfigError
from shoal.rl.gateway.zmq_listener import MAX_UNREAD_MESSAGES, bind_router, format_address, resolve_reachable_host
from shoal.rl.part_specs import GatewaySpec


class Routed:
    """A socket that finds its way to others from one address, or none."""

    def __init__(self, *given: object) -> None:
        pass

    def __enter__(self) -> Routed:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def connect(self, place: tuple[str, int]) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return "10.1.2.3", 40000


class Lonely(Routed):
    def connect(self, place: tuple[str, int]) -> None:
        raise OSError("Network is unreachable")


@pytest.mark.parametrize(
    ("host", "node", "kind", "told"),
    [
        ("127.0.0.1", "10.0.0.5", Routed, "127.0.0.1"),
        ("game.example", "127.0.0.1", Routed, "game.example"),
        ("0.0.0.0", "10.0.0.5", Routed, "10.0.0.5"),
        ("::", "10.0.0.5", Routed, "10.0.0.5"),
        ("0.0.0.0", "127.0.0.1", Routed, "10.1.2.3"),
        ("0.0.0.0", "127.0.0.1", Lonely, "127.0.0.1"),
    ],
)
def test_the_host_that_actors_are_told(
    monkeypatch: pytest.MonkeyPatch, host: str, node: str, kind: Any, told: str
) -> None:
    monkeypatch.setattr(network_address.socket, "socket", kind)
    assert resolve_reachable_host(host, node) == told


def test_the_address_towards_others_is_one_of_this_machine() -> None:
    found = resolve_reachable_host("0.0.0.0", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind((found, 0))


def test_localhost_is_bound_whatever_the_resolver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    bind = zmq.Socket.bind
    monkeypatch.setattr(zmq.Socket, "bind", lambda self, address: bound.append(address) or bind(self, address))
    with zmq.Context[zmq.Socket[bytes]]() as context:
        bind_router(context, GatewaySpec(host="localhost"))[0].close(linger=0)
    assert bound == ["tcp://127.0.0.1:*"]


def test_an_actor_reaches_a_gateway_on_localhost() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        router, port = bind_router(context, GatewaySpec(host="localhost"))
        with router, context.socket(zmq.DEALER) as actor:
            actor.linger = 0
            actor.connect(format_address("tcp", resolve_reachable_host("localhost", "10.0.0.5"), port))
            actor.send(b"hello")
            assert router.poll(10_000)
            assert router.recv_multipart()[1] == b"hello"
        again, same = bind_router(context, GatewaySpec(host="localhost"), remembered_port=port)
        again.close(linger=0)
        assert same == port


@pytest.mark.parametrize(("host", "field"), [("192.0.2.1", "gateway.host"), ("127.0.0.1", "gateway.port")])
def test_what_cannot_be_bound_is_named(host: str, field: str) -> None:
    with socket.socket() as taken, zmq.Context[zmq.Socket[bytes]]() as context:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be bound") as caught:
            bind_router(context, GatewaySpec(host=host, port=port, curve=True))
    assert (caught.value.field, caught.value.value) == (field, host if field == "gateway.host" else port)


def test_a_connection_may_have_few_messages_waiting_and_is_given_up_when_its_peer_vanished() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, bind_router(context, GatewaySpec())[0] as router:
        assert router.getsockopt(zmq.RCVHWM) == MAX_UNREAD_MESSAGES <= 16
        assert [router.getsockopt(option) for option in (zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE)] == [1, 60]


def test_as_many_actors_may_connect_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard <= 512:
        pytest.skip("it allows no more than this test begins with")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        listening, _ = bind_router(context, GatewaySpec())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in (hard, 65_536)
        listening.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        context.destroy(linger=0)
