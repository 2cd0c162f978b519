"""`shoal up`, `status` and `down`, as a user types them: each in a process of its own."""

import json
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from leftovers import listening_ports
from shoal.cli import cli
from shoal.cluster import jobs
from shoal.cluster.attach import find_cluster, find_running_cluster, list_clusters
from shoal.cluster.cluster_handle import load_handle
from shoal.cluster.dashboard_api import connect, list_nodes, list_reservations
from shoal.cluster.processes import find_cluster_processes
from shoal.errors import ClusterError
from shoal_program import STATE_S, Program, end_marked
from waiting import wait_for

BIN = Path(sys.executable).parent
pytestmark = pytest.mark.timeout(1800)


class Shell:
    """Commands with a $SHOAL_HOME of their own and no trace of another cluster in the environment."""

    def __init__(self, home: Path) -> None:
        self.home, self.mark = home, uuid.uuid4().hex
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SHOAL_"))}
        self.environment = {**kept, "SHOAL_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        self.environment["SHOAL_FORK_WORKERS"] = "0"  # a fork server imports for 4 s of a processor

    def run(self, command: str, **more: str) -> str:
        """What a program says. Fails unless it ends well."""
        with Program(shlex.split(command), {**self.environment, **more}, self.home, mark=self.mark) as program:
            assert program.wait() == 0
            return program.said

    def call(self, words: str) -> str:
        """What `shoal ...` says, in this process."""
        return CliRunner().invoke(cli, shlex.split(words), catch_exceptions=False).output


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    made = Shell(tmp_path)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield made
        made.call("down --now")
    finally:
        end_marked(made.mark)
        for each, handler in handlers.items():  # the verbs set their own
            signal.signal(each, handler)


JOB = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), pathlib.Path({saved!r}).touch(), sys.exit()))
print("ready", flush=True)
time.sleep(600)
"""


def test_up_status_and_down_which_lets_jobs_save_what_they_have(shell: Shell) -> None:
    assert "`shoal up` starts one" in shell.call("status")
    assert shell.call("down") == "No cluster is up.\n"
    shell.run("shoal up --cpus 3")
    handle = find_running_cluster()
    assert handle.cluster_id is not None
    assert handle.temp_dir is not None
    assert (handle.temp_dir / "ha" / "haproxy").is_file(), "Ray's own `serve deploy` finds it"
    assert handle.token not in (shell.home / "cluster.json").read_text()
    assert find_cluster() == handle == find_cluster(handle.dashboard_url) == find_cluster(handle.address)
    with pytest.raises(ClusterError, match="`shoal down` ends it"):
        shell.call("up")

    attach = {name: handle.environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    attach |= {"RAY_ADDRESS": handle.address, "RAY_API_SERVER_ADDRESS": handle.dashboard_url}
    assert "\n42\n" in shell.run("ray job submit -- python -c 'print(6 * 7)'", **attach)
    shown = json.loads(shell.call("status --json"))
    assert shown["cluster"]["dashboard_url"] == handle.dashboard_url
    assert shown["cluster"]["num_cpus"] == 3
    assert [job["status"] for job in shown["jobs"]] == ["SUCCEEDED"]
    assert f"RAY_API_SERVER_ADDRESS={handle.dashboard_url}" in shell.call("status")
    assert list_clusters() == [handle]

    saved = shell.home / "saved"
    (shell.home / "job.py").write_text(JOB.format(saved=str(saved)))
    job = jobs.submit(handle, ["python", "job.py"], working_dir=shell.home)
    wait_for(lambda: "ready" in job.read_logs(), STATE_S, "first line")
    with connect(handle) as client:  # what Ray's dashboard calls things
        ((node,), reservations) = list_nodes(client), list_reservations(client)
    assert (node.is_head, node.num_cpus, node.num_gpus) == (True, 3.0, 0.0)
    assert [(each.node, each.processes) for each in reservations] == [(node.id, {"JobSupervisor": 1})]
    with pytest.raises(ClusterError, match="still RUNNING after"):
        job.wait(timeout_s=0.1)
    ports = listening_ports([process.pid for process in find_cluster_processes(handle.cluster_id, handle.temp_dir)])
    assert ports
    assert shell.run("shoal down") == f"stopping job {job.submission_id} ...\nThe cluster is down.\n"
    assert saved.exists()
    assert find_cluster_processes(handle.cluster_id, handle.temp_dir) == []
    assert not handle.temp_dir.exists()
    assert not (shell.home / "cluster.json").exists()


@pytest.mark.soak
def test_down_removes_what_a_dead_cluster_left(shell: Shell) -> None:
    shell.run("shoal up --cpus 1")
    handle = load_handle(shell.home / "cluster.json")
    assert handle.cluster_id is not None
    assert handle.temp_dir is not None
    assert handle.head_pid is not None
    os.kill(handle.head_pid, signal.SIGKILL)
    wait_for(lambda: find_running_cluster() is None, STATE_S, "news of the death")
    assert "`shoal up` starts one" in shell.call("status")
    assert shell.call("down") == "The cluster had died; what was left of it is removed.\n"
    assert find_cluster_processes(handle.cluster_id, handle.temp_dir) == []
    assert not handle.temp_dir.exists()
