"""What Serve finds before it starts: files in one folder, listeners on loopback, errors in the protocol's words."""

import json
import subprocess
from pathlib import Path

import pytest

from shoal.cluster.serve_environment import free_port, serve_environment
from shoal.errors import ConfigError

SERVES_CONFIG = """\
defaults
    option httplog
    errorfile 502 /somewhere/500.http
    errorfile 503 /somewhere/500.http
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \'%[path]\' not found."
listen stats
  bind *:8404
"""


@pytest.fixture
def short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pytest's own folders are too long for unix sockets."""
    monkeypatch.chdir(tmp_path)
    return Path("s")


def test_every_file_is_below_the_folder_and_every_port_its_own(short_folder: Path) -> None:
    environment = serve_environment(short_folder)
    paths = [value for value in environment.values() if "/" in value]
    assert len(paths) >= 6
    assert all(value.startswith(f"{short_folder}/ha") for value in paths)
    ports = [value for name, value in environment.items() if name.endswith("_PORT")]
    assert len(set(ports)) == len(ports) == 4


def test_a_folder_too_long_for_unix_sockets_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60)
    with pytest.raises(ConfigError, match="characters fewer") as caught:
        serve_environment(folder)
    assert caught.value.field == "temp_dir"
    assert not folder.exists()


def test_the_wrapper_binds_everything_to_loopback(short_folder: Path) -> None:
    environment = serve_environment(short_folder)
    wrapper = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    node = short_folder / "ha" / "node"
    node.mkdir()
    (node / "haproxy.cfg").write_text(SERVES_CONFIG)
    (node / "500.http").write_text("Serve's own")
    wrapper.write_text(wrapper.read_text().replace("exec ", "exec echo "))
    ran = subprocess.run(["sh", wrapper, "-db", "-f", str(node / "haproxy.cfg"), "-dR"], capture_output=True, text=True)
    assert ran.stdout.split()[1:] == ["-db", "-f", f"{node}/haproxy.cfg", "-dR"]
    config = (node / "haproxy.cfg").read_text()
    binds = [line.strip() for line in config.splitlines() if "bind" in line]
    assert binds == ["bind 127.0.0.1:9101", "bind 127.0.0.1:8000", "bind 127.0.0.1:8404"]
    assert "text/plain" not in config
    for addition in (
        "option dontlog-normal",
        "option http-buffer-request",
        "http-request deny deny_status 503",
        "http-request set-header x-request-disconnect-disabled ?1",
    ):
        assert addition in config
    head, body = (node / "500.http").read_text().split("\n\n")
    assert head.startswith("HTTP/1.1 503")
    assert "retry-after: 1" in head
    assert list(json.loads(body)) == ["error"]


def test_a_free_port_is_free() -> None:
    assert 1024 < free_port() < 65536
