"""Ports for what is about to be started: given once, and held until it listens."""

import socket
from pathlib import Path

import pytest

from shoal.cluster.ports import (
    BLOCK_SIZE,
    EPHEMERAL_PORTS,
    find_free_port,
    get_candidate_ports,
    reserve_port_block,
    reserve_ports,
)


def test_free_ports_are_none_that_the_kernel_gives_away() -> None:
    """Between the choice of a port and its use anybody may connect somewhere, or listen on any port."""
    lowest, highest = map(int, EPHEMERAL_PORTS.read_text().split())
    ports = [find_free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert not [port for port in ports if port < 1024 or lowest <= port <= highest]


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("shoal.cluster.ports.get_candidate_ports", lambda: range(port, port + 1))
        assert find_free_port() != port


@pytest.mark.parametrize(
    ("ephemeral", "chosen"),
    [
        ("32768\t60999\n", range(20_000, 32_768)),
        ("1024 60999", range(61_000, 65_536)),
        ("9000 65535", range(0)),
        (None, range(20_000, 32_768)),
    ],
)
def test_which_ports_there_are_to_choose_from(tmp_path: Path, ephemeral: str | None, chosen: range) -> None:
    file = tmp_path / "ip_local_port_range"
    if ephemeral is not None:
        file.write_text(ephemeral)
    assert get_candidate_ports(file) == chosen


def test_where_the_kernel_gives_all_ports_away_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cluster.ports.get_candidate_ports", lambda: range(0))
    assert 1024 < find_free_port() < 65536


def test_a_held_port_is_free_for_nobody_but_a_server_that_reuses_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve_ports(2) as (port, other):
        assert port != other
        monkeypatch.setattr("shoal.cluster.ports.get_candidate_ports", lambda: range(port, port + 1))
        assert find_free_port() != port
        with reserve_ports(1) as (elsewhere,):
            assert elsewhere != port
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
            pass
    assert find_free_port() == port


def test_a_block_of_ports_is_one_callers_as_long_as_a_server_listens_on_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reserve_port_block() as one, reserve_port_block() as other:
        assert len(one) == len(other) == BLOCK_SIZE
        assert not set(one) & set(other)
    monkeypatch.setattr("shoal.cluster.ports.get_candidate_ports", lambda: range(one.start, one.stop))
    with reserve_port_block() as again:
        assert again == one
        server = socket.create_server(("127.0.0.1", again[0]))
    with server, reserve_port_block() as none:
        assert not none
