"""The processes of a cluster: from where none could start, when one is over, how all of them are found and ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal.cluster import embedded_cluster
from shoal.cluster.forking import fork_client
from shoal.cluster.processes import CLUSTER_ID_VARIABLE, end_processes, find_cluster_processes, is_alive
from shoal.errors import ConfigError
from waiting import wait_for

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
    assert child.stdout is not None
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
    for place, name in ((sys, "executable"), (fork_client, "__file__")):
        with monkeypatch.context() as moved:
            moved.setattr(place, name, f"{folder}/python")
            with pytest.raises(ConfigError, match=r"^path = .* with which Ray starts no worker. move it"):
                embedded_cluster.start_cluster()
    monkeypatch.setattr(sys, "executable", "/a folder/ü$b/python")
    embedded_cluster._require_plain_paths()
