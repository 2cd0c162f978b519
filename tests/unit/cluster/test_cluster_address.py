"""The address of a cluster, the token that is shown there, and ports for what is about to be started."""

import socket
from pathlib import Path

import pytest

from answering import answering
from shoal.cluster.attach import find_cluster
from shoal.cluster.dashboard_api import get_resources
from shoal.cluster.jobs import list_jobs
from shoal.cluster.ports import (
    BLOCK_SIZE,
    EPHEMERAL_PORTS,
    find_free_port,
    get_candidate_ports,
    reserve_port_block,
    reserve_ports,
)
from shoal.errors import ClusterError, ConfigError

NO_NODES = b'{"data": {"summary": []}}'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "shoal"))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "SHOAL_CLUSTER_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "address",
    ["http://", "http://[::1", "http://127.0.0.1:x", "http://h:99999", "https://:8265", "ray://h:10001", "h:1"],
)
def test_what_is_no_url_is_refused_by_its_field(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "is not the URL of a dashboard. write http://HOST:8265, or unset it"
    with pytest.raises(ConfigError, match=f"^address = .*{problem}"):
        find_cluster(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS = .*{problem}"):
        find_cluster()


@pytest.mark.parametrize("page", ["", "/", "/#/overview"])
def test_the_address_that_a_browser_shows_will_do(page: str) -> None:
    with answering(lambda path: NO_NODES) as server:
        found = find_cluster(f"{server.url}{page}")
        assert found is not None
        assert get_resources(found).num_nodes == 0
        assert server.seen[0] == "/nodes?view=summary"
    assert found.dashboard_url == server.url


@pytest.mark.parametrize("body", [b"<!doctype html>", b"", b"\xff"])
def test_a_server_of_something_else_is_said_to_be_none_of_rays(body: bytes) -> None:
    with answering(lambda path: body) as server:
        found = find_cluster(server.url)
        assert found is not None
        for ask in (get_resources, list_jobs):
            with pytest.raises(ClusterError, match=r"^http://127.0.0.1:\d+ is no dashboard of Ray"):
                ask(found)


def test_a_new_line_is_no_part_of_a_ray_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "tok\n")
    with answering(lambda path: NO_NODES) as server:
        found = find_cluster(server.url)
        assert found is not None
        get_resources(found)
        assert server.seen[1] == "Bearer tok"
    assert (found.token, found.environment["RAY_AUTH_TOKEN"]) == ("tok", "tok")


@pytest.mark.parametrize(("said", "problem"), [("", "holds no token"), ("two\nlines", "by a header")])
def test_a_ray_token_that_cannot_be_shown_is_refused_and_stays_unseen(
    said: str, problem: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "token").write_text(said)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "token"))
    with pytest.raises(ConfigError, match=f"^RAY_AUTH_TOKEN_PATH = .*{problem}") as refused:
        find_cluster("http://h:8265")
    assert "lines" not in str(refused.value)
    if said:
        monkeypatch.setenv("RAY_AUTH_TOKEN", said)
        with pytest.raises(ConfigError, match=r"^RAY_AUTH_TOKEN = .*by a header"):
            find_cluster("http://h:8265")


# -- ports: given once, and held until something listens


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
