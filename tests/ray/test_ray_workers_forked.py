"""Workers of the embedded cluster that are forked, not started: they are Ray's workers in all else."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from leftovers import children_of
from python_program import run_python
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.libs.forking.worker_start import FORK_VARIABLE, make_worker_start
from waiting import wait_for

pytestmark = pytest.mark.skipif(not make_worker_start(Path()).script, reason="workers are not forked on this machine")


@ray.remote(num_cpus=1)
class Worker:
    def parent(self) -> int:
        return os.getppid()

    def finds(self) -> dict[str, Any]:
        was_imported = "torch" in sys.modules
        import torch

        return {"torch": was_imported, "threads": torch.get_num_threads(), "said": os.environ.get("OMP_NUM_THREADS")}

    def starts(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def ends(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def fork_server(cluster: EmbeddedCluster) -> psutil.Process:
    return server_of(cluster)


def server_of(cluster: EmbeddedCluster) -> psutil.Process:
    assert cluster.temp_dir is not None
    socket = cluster.temp_dir / "fork.sock"
    wait_for(socket.exists, what="fork server")
    return psutil.Process(children_of(cluster.head_pid, "shoal.libs.forking.fork_server")[0])


def test_an_actor_is_forked_and_has_its_processors(fork_server: psutil.Process) -> None:
    worker: Any = Worker.remote()
    assert ray.get(worker.parent.remote()) == fork_server.pid
    assert ray.get(worker.finds.remote()) == {"torch": False, "threads": 1, "said": "1"}


@pytest.mark.parametrize("by", ["ray.kill", "SIGKILL"])
def test_a_worker_that_is_killed_takes_its_processes_along(fork_server: psutil.Process, by: str) -> None:
    worker: Any = Worker.remote()
    child = psutil.Process(ray.get(worker.starts.remote()))
    assert ray.get(worker.parent.remote()) == fork_server.pid
    if by == "ray.kill":
        ray.kill(worker)
    else:
        worker.ends.remote()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, what="end of its child")


# On a cluster of its own: others are to go on forking, and have a raylet.
WITHOUT_A_SERVER = """
import os, psutil
from shoal.cluster.embedded_cluster import start_cluster
with start_cluster(num_cpus=2) as cluster:
    os.environ.update(cluster.environment)
    import ray
    from ray_workers import Worker, server_of
    from waiting import wait_for
    ray.init(log_to_driver=False)
    server, before = server_of(cluster), Worker.remote()
    assert ray.get(before.parent.remote()) == server.pid
    server.kill()
    after = Worker.remote()
    raylet = psutil.Process(ray.get(after.parent.remote()))
    assert raylet.name() == "raylet"
    assert ray.get(before.parent.remote()) not in (server.pid, raylet.pid)
    ray.shutdown()
    print("all lived on")
    raylet.kill()
    wait_for(lambda: not cluster.is_alive(), what="end of the head, which ends with a part of Ray")
print("and ended")
"""


@pytest.mark.soak
def test_without_a_fork_server_workers_live_on_and_without_a_raylet_the_head_ends_the_rest() -> None:
    script = WITHOUT_A_SERVER.replace("ray_workers", Path(__file__).stem)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path])
    said = run_python(script, env=os.environ | {"PYTHONPATH": path})
    assert said.endswith("all lived on\nand ended\n"), said


def test_a_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORK_VARIABLE, "0")
    assert make_worker_start(Path()).script is None
