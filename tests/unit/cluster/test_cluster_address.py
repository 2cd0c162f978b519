"""The address of a cluster, and the token that is shown there: as they are typed, pasted and exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from answering import answering
from shoal.cluster.attach import find_cluster
from shoal.cluster.dashboard_api import get_resources
from shoal.cluster.jobs import list_jobs
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
