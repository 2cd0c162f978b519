"""How `shoal down` asks jobs to end, and how the processes of a cluster are found and ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shoal.cli.commands import cluster as verbs
from shoal.cluster import embedded_cluster
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobInfo, JobStatus
from shoal.cluster.processes import CLUSTER_ID_VARIABLE, end_processes, find_cluster_processes, is_alive
from shoal.errors import ClusterError, ConfigError, RunError
from typed import said
from waiting import wait_for


class Saving:
    """Jobs of a cluster that is a stand-in: seconds that each takes to save what it has, once it is asked to stop."""

    def __init__(self, **take_s: float | None) -> None:
        self.take_s, self.now = take_s, 0.0
        self.saved_at: dict[str, float] = {}
        self.saved: list[str] = []

    def list(self, cluster: ClusterHandle) -> list[JobInfo]:
        return [JobInfo(name, JobStatus.RUNNING, "python job.py", "", 0.0) for name in self.take_s]

    def job(self, cluster: ClusterHandle, name: str) -> _Job:
        return _Job(self, name)

    def end(self, *_: object) -> None:
        self.saved = [name for name, at in self.saved_at.items() if at <= self.now]


class _Job:
    def __init__(self, jobs: Saving, name: str) -> None:
        self._jobs, self.submission_id = jobs, name

    def request_stop(self) -> None:
        took = self._jobs.take_s[self.submission_id]
        if took is None:
            raise RunError(f"http://h knows no jobs/{self.submission_id}")
        self._jobs.saved_at.setdefault(self.submission_id, self._jobs.now + took)

    def follow(self, timeout_s: float) -> Iterator[str]:
        yield "saving ..."
        saved_at = self._jobs.saved_at.get(self.submission_id)
        if saved_at is None:
            raise RunError(f"http://h knows no jobs/{self.submission_id}")
        given_up_at = self._jobs.now + timeout_s
        self._jobs.now = max(self._jobs.now, min(saved_at, given_up_at))
        if saved_at > given_up_at:
            raise ClusterError(f"job {self.submission_id} is still RUNNING after {timeout_s:g} s")

    def stop(self, timeout_s: float) -> None:
        self.request_stop()
        for _ in self.follow(timeout_s):
            pass


@pytest.mark.parametrize(
    ("jobs", "saved"),
    [
        (Saving(one=12.0, two=12.0, three=12.0), ["one", "two", "three"]),
        (Saving(stuck=1e9, other=5.0), ["other"]),
        (Saving(forgotten=None, other=5.0), ["other"]),
        (Saving(), []),
    ],
)
def test_every_job_has_the_whole_time_to_save_what_it_has(
    jobs: Saving, saved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    token = {"RAY_AUTH_TOKEN_PATH": "none"}
    handle = ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "", token, tmp_path / "one", "id", os.getpid(), 0.0)
    handle.save(tmp_path / "cluster.json")
    monkeypatch.setattr(ClusterHandle, "is_head_alive", lambda _: True)
    monkeypatch.setattr(verbs, "list_jobs", jobs.list)
    monkeypatch.setattr(verbs, "JobHandle", jobs.job)
    monkeypatch.setattr(verbs, "end_cluster", jobs.end)
    monkeypatch.setattr(verbs, "time", SimpleNamespace(monotonic=lambda: jobs.now))
    shown = said("down")
    assert shown.endswith("The cluster is down.\n")
    assert jobs.take_s or shown == "The cluster is down.\n"
    assert jobs.saved == saved
    assert jobs.now <= 31.0


# Its first thread ends by the system call of that name; another one keeps the process, and a socket.
HALF_OVER = """
import ctypes, platform, socket, threading, time
listening = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(60,)).start()
print(listening.getsockname()[1], flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads that outlive the first one are Linux's")
def test_a_process_is_over_when_its_last_thread_is(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HALF_OVER],
        env={**os.environ, CLUSTER_ID_VARIABLE: "half"},
        stdout=subprocess.PIPE,
        text=True,
    )
    port = int(child.stdout.readline())
    process = psutil.Process(child.pid)
    wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert is_alive(process)
    assert [each.pid for each in find_cluster_processes("half", tmp_path)] == [child.pid]
    end_processes("half", tmp_path)
    assert not is_alive(process)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    child.stdout.close()
    child.wait(10)


@pytest.mark.parametrize("folder", ["/home/o'brien", "/a\\b"])
def test_a_path_that_ray_would_lose_is_refused_before_anything_starts(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_cluster, "_launch", None)
    own = embedded_cluster.WorkerStart()
    forking = embedded_cluster.WorkerStart(f"{folder}/fork.py")
    for executable, starts in ((f"{folder}/python", own), (sys.executable, forking)):
        with monkeypatch.context() as moved:
            moved.setattr(sys, "executable", executable)
            moved.setattr(embedded_cluster, "_find_worker_start", lambda _, starts=starts: starts)
            with pytest.raises(ConfigError, match=r"^path = .* with which Ray starts no worker. move it"):
                embedded_cluster.start_cluster()
    monkeypatch.setattr(sys, "executable", "/a folder/ü$b/python")
    embedded_cluster._require_plain_paths(own)
