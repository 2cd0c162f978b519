"""`shoal up`, `status` and `down`, as a user types them: each in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leftovers import listening_ports
from shoal.cluster import jobs
from shoal.cluster.attach import find_cluster, started_by_up
from shoal.cluster.handle import load
from shoal.cluster.processes import members
from waiting import wait_for

BIN = Path(sys.executable).parent


class Shell:
    """Commands with a $SHOAL_HOME of their own and no trace of another cluster in the environment."""

    def __init__(self, home: Path) -> None:
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SHOAL_"))}
        self.environment = {**kept, "SHOAL_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

    def run(self, command: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **more}
        words = shlex.split(command)
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    made = Shell(tmp_path)
    yield made
    made.run("shoal down --now")


def test_up_status_down(shell: Shell) -> None:
    assert "`shoal up` starts one" in shell.run("shoal status").stdout
    assert shell.run("shoal down").stdout == "No cluster is up.\n"
    up = shell.run("shoal up --cpus 3")
    assert up.returncode == 0, up.stderr
    handle = started_by_up()
    assert handle is not None
    assert handle.cluster_id is not None
    assert handle.temp_dir is not None
    assert handle.token not in (shell.home / "cluster.json").read_text()
    assert find_cluster() == handle == find_cluster(handle.dashboard_url) == find_cluster(handle.address)

    again = shell.run("shoal up")
    assert again.returncode == 1
    assert "`shoal down` ends it" in again.stderr

    attach = {name: handle.environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    attach |= {"RAY_ADDRESS": handle.dashboard_url}
    submitted = shell.run("ray job submit -- python -c 'print(6 * 7)'", **attach)
    assert "\n42\n" in submitted.stdout, submitted.stderr
    shown = json.loads(shell.run("shoal status --json").stdout)
    assert shown["cluster"]["dashboard_url"] == handle.dashboard_url
    assert shown["cluster"]["num_cpus"] == 3
    assert [job["status"] for job in shown["jobs"]] == ["SUCCEEDED"]
    assert f"RAY_ADDRESS={handle.dashboard_url}" in shell.run("shoal status").stdout

    ports = listening_ports([process.pid for process in members(handle.cluster_id, handle.temp_dir)])
    assert ports
    assert shell.run("shoal down").stdout == "The cluster is down.\n"
    assert members(handle.cluster_id, handle.temp_dir) == []
    assert not handle.temp_dir.exists()
    assert not (shell.home / "cluster.json").exists()


def test_down_lets_jobs_save_what_they_have(shell: Shell) -> None:
    assert shell.run("shoal up --cpus 1").returncode == 0
    handle = started_by_up()
    assert handle is not None
    saved = shell.home / "saved"
    (shell.home / "job.py").write_text(
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), pathlib.Path({str(saved)!r}).touch(), sys.exit()))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    job = jobs.submit(handle, ["python", "job.py"], working_dir=shell.home)
    wait_for(lambda: "ready" in job.logs(), 60, "first line")
    down = shell.run("shoal down")
    assert down.stdout == f"stopping job {job.submission_id} ...\nThe cluster is down.\n"
    assert saved.exists()


def test_down_removes_what_a_dead_cluster_left(shell: Shell) -> None:
    assert shell.run("shoal up --cpus 1").returncode == 0
    handle = load(shell.home / "cluster.json")
    assert handle is not None
    assert handle.cluster_id is not None
    assert handle.temp_dir is not None
    assert handle.head_pid is not None
    os.kill(handle.head_pid, signal.SIGKILL)
    wait_for(lambda: started_by_up() is None, 60, "news of the death")
    assert "`shoal up` starts one" in shell.run("shoal status").stdout
    assert shell.run("shoal down").stdout == "The cluster had died; what was left of it is removed.\n"
    assert members(handle.cluster_id, handle.temp_dir) == []
    assert not handle.temp_dir.exists()
