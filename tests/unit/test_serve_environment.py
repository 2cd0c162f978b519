"""What Serve finds before it starts: files in one folder, and a wrapper that closes what Serve leaves open.

What the rewritten configuration does is in tests/serving/test_haproxy.py.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from serve_template import serves_config
from shoal.cluster.ingress import haproxy_config
from shoal.cluster.ingress.serve_environment import serve_environment
from shoal.errors import ConfigError


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
    assert len(set(ports)) == len(ports) == 2


def test_a_folder_too_long_for_unix_sockets_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60)
    with pytest.raises(ConfigError, match="characters fewer") as caught:
        serve_environment(folder)
    assert caught.value.field == "temp_dir"
    assert not folder.exists()


def test_the_wrapper_rewrites_the_configuration_and_becomes_haproxy(short_folder: Path) -> None:
    wrapper = Path(serve_environment(short_folder)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    wrapper.write_text(wrapper.read_text().replace("exec ", "exec echo "))
    config = short_folder / "haproxy.cfg"
    config.write_text(serves_config(short_folder, 8000))
    ran = subprocess.run(["sh", wrapper, "-db", "-f", config, "-dR"], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[1:] == ["-db", "-f", str(config), "-dR"]
    assert config.read_text() == haproxy_config.rewrite(serves_config(short_folder, 8000), f"{short_folder}/ha/errors")
    version = subprocess.run(["sh", wrapper, "-v"], capture_output=True, text=True, check=True)
    assert version.stdout.split()[1:] == ["-v"]


def test_a_configuration_that_is_not_known_starts_nothing(short_folder: Path) -> None:
    wrapper = Path(serve_environment(short_folder)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    config = short_folder / "haproxy.cfg"
    config.write_text("global\nfrontend other\n")
    ran = subprocess.run(["sh", wrapper, "-c", "-f", config], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "there is no section 'defaults'" in ran.stderr


def test_a_haproxy_that_runs_is_left_to_run_when_it_is_prepared_again(short_folder: Path) -> None:
    serve_environment(short_folder)
    program = short_folder / "ha/bin/haproxy"
    ours = program.read_bytes()
    program.unlink()
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as running:
        try:
            serve_environment(short_folder)
            assert running.poll() is None
        finally:
            running.kill()
    assert program.read_bytes() == ours
    assert program.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in program.parent.iterdir()) == ["haproxy", "lib"]


@pytest.mark.parametrize(
    "ports", [{}, {"replica_port": 1}, {"replica_port": 1, "grpc_port": 2, "grpc_replica_port": 3}]
)
def test_only_the_front_listens_and_only_on_loopback(tmp_path: Path, ports: dict[str, int]) -> None:
    config = haproxy_config.rewrite(serves_config(tmp_path, 8000, **ports), "errors")
    binds = [line.split()[1] for line in config.splitlines() if line.split()[0] == "bind"]
    assert binds == ["127.0.0.1:8000", *(["127.0.0.1:2"] if "grpc_port" in ports else [])]
    for unwanted in ("listen ", "mode 666", "prometheus"):
        assert unwanted not in config, unwanted


def test_calls_of_grpc_go_to_the_http_servers_of_replicas_and_nowhere_else(tmp_path: Path) -> None:
    config = serves_config(tmp_path, 8000, replica_port=1, grpc_port=2, grpc_replica_port=3)
    replica = "server replica 127.0.0.1:1 check"
    config = config.replace(replica, f"server serves_proxy 127.0.0.1:9 check backup\n    {replica}")
    lines = [line.strip() for line in haproxy_config.rewrite(config, "errors").splitlines()]
    for backend in ("backend unary-app", "backend stream-app"):
        behind = lines[lines.index(backend) + 1 :]
        end = next((number for number, line in enumerate(behind) if line.startswith("backend ")), None)
        servers = [line for line in behind[:end] if line.startswith("server ")]
        assert len(servers) == 1
        assert servers[0].startswith("server replica 127.0.0.1:1 ")
    grpc_frontend = lines[lines.index("frontend grpc_frontend") : lines.index("backend grpc-app")]
    chosen = [line for line in grpc_frontend if "_backend " in line]
    stream, unary = (
        "path /inference.GRPCInferenceService/ModelStreamInfer",
        "path -m beg /inference.GRPCInferenceService/",
    )
    assert chosen == [
        f"use_backend stream-app if {{ {stream} }} is_grpc-app",
        f"use_backend unary-app if {{ {unary} }} is_grpc-app",
        "use_backend grpc-app if is_grpc-app",
        f"use_backend stream-app if {{ {stream} }}",
        f"use_backend unary-app if {{ {unary} }}",
        "default_backend grpc-app",
    ]


@pytest.mark.parametrize("section", ["global", "defaults", "frontend http_frontend", "backend default_backend"])
def test_a_template_that_has_changed_is_noticed(tmp_path: Path, section: str) -> None:
    config = serves_config(tmp_path, 8000, 8001).replace(f"{section}\n", f"{section}_renamed\n")
    with pytest.raises(haproxy_config.Surprise, match=section):
        haproxy_config.rewrite(config, "errors")
