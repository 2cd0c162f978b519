"""Which host actors are told to connect to."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from shoal.rl import listener
from shoal.rl.listener import reachable_host


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
    monkeypatch.setattr(listener.sockets, "socket", kind)
    assert reachable_host(host, node) == told


def test_the_address_towards_others_is_one_of_this_machine() -> None:
    found = reachable_host("0.0.0.0", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind((found, 0))
