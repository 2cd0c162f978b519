"""A Ray cluster on this machine: started as child processes, closed to the outside, and removed completely.

`shoal run` starts it embedded: the cluster ends with the process. `shoal up` starts it detached: it stays. Everything
listens on loopback, asks for a token, and lies in one folder with a short path. It never reads or changes another Ray
of the machine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shoal.cluster.cluster_handle import FOLDER_VARIABLE, HIDE_GPUS, ClusterHandle
from shoal.cluster.ingress.serve_environment import limit_replica_ports, prepare_ingress, serve_environment
from shoal.cluster.ports import reserve_port_block, reserve_ports
from shoal.cluster.processes import CLUSTER_ID_VARIABLE, end_cluster, find_cluster_processes, get_cluster_folder
from shoal.errors import ClusterError, ConfigError
from shoal.home import home, ray_token_path
from shoal.plugins.find import find_optional

# Variables of an outer Ray that would change this one.
_FOREIGN = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_REDIS_ADDRESS",
    "RAY_TMPDIR",
    "RAY_JOB_ID",
    "RAY_GCS_SERVER_PORT",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_RAYLET_PID",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING",
)

# The servers of Ray that listen on a given port, by Ray's names in `RayParams`.
_PORTS = (
    *("dashboard_port", "dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port"),
    "runtime_env_agent_port",
)


@dataclass(frozen=True)
class WorkerStart:
    """How the raylet starts workers: by default in Ray's own way. A library may have a quicker one: `fork` of
    `shoal.worker_starts` is a function of the cluster's folder that names it.

    script:      takes the arguments of Ray's `setup_worker.py`, which it may become
    server:      a command that serves the script. It is started before Ray, and ends when its standard input closes
    environment: of all processes of the cluster
    """

    script: str | None = None
    server: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class EmbeddedCluster(ClusterHandle):
    """A running cluster and the right to stop it. Made by `start`; use it as a context manager or call `stop`."""

    _head: subprocess.Popen[bytes]
    _owner_pid: int

    def __init__(self, handle: ClusterHandle, head: subprocess.Popen[bytes]) -> None:
        super().__init__(**vars(handle))
        object.__setattr__(self, "_head", head)
        object.__setattr__(self, "_owner_pid", os.getpid())

    def is_alive(self) -> bool:
        """Whether the head process still runs; it ends as soon as a part of Ray does."""
        return self._head.poll() is None

    def pids(self) -> list[int]:
        """The ids of the cluster's running processes."""
        assert self.cluster_id is not None
        assert self.temp_dir is not None
        return sorted(process.pid for process in find_cluster_processes(self.cluster_id, self.temp_dir))

    def stop(self) -> None:
        """End every process of the cluster and remove its folder. Idempotent.

        Raises ClusterError when a process survives SIGKILL.
        """
        if os.getpid() != self._owner_pid:
            return  # a fork of the owner must not stop the cluster
        assert self.cluster_id is not None
        assert self.temp_dir is not None
        _stop(self._head, self.cluster_id, self.temp_dir)
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def start_cluster(
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_memory_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    detached: bool = False,
    save_as: Path | None = None,
    timeout_s: float = 180.0,
) -> EmbeddedCluster:
    """Start a cluster and return when it takes jobs.

    None takes the machine's number. `environment` is added to that of every process of the cluster. A `detached`
    cluster outlives this process and its terminal; otherwise it ends with this process, even when that is killed. Its
    handle is also written to `save_as`.

    Raises ClusterError when Ray does not start within `timeout_s`, or the handle cannot be written; nothing is left
    behind then, nor when interrupted. Raises ConfigError where the paths of programs have a quotation mark.
    """
    cluster_id = uuid.uuid4().hex
    temp_dir = get_cluster_folder(cluster_id)
    starts = _find_worker_start(temp_dir)
    _require_plain_paths(starts)
    with (
        contextlib.ExitStack() as on_failure,
        reserve_ports(len(_PORTS) + 1) as (metrics_port, *free),  # until the servers listen
        reserve_port_block() as block,  # which no other cluster takes as long as the dashboard has the first of it
    ):
        ports = dict(zip(_PORTS, free, strict=True)) | ({"dashboard_port": block[0]} if block else {})
        on_failure.callback(end_cluster, cluster_id, temp_dir, grace_s=0.5)  # an interruption may come at any moment
        serve = _prepare_folder(temp_dir, cluster_id, block[1:], detached)
        options = {
            "temp_dir": str(temp_dir),
            "ports": ports,
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "object_store_memory_bytes": object_store_memory_bytes,
            "watch_parent": not detached,
            "worker_script": starts.script,
            "worker_server": starts.server,
        }
        extra = {
            "DASHBOARD_METRIC_PORT": str(metrics_port),
            # Ray's state clients look for the only Ray of the machine; with two they find none. One of these clients
            # releases the placement group of a training run when Ray Train's controller has died.
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports['dashboard_port']}",
            **(environment or {}),
            **starts.environment,
        }
        head = _launch(options, _cluster_environment(temp_dir, cluster_id, serve, extra), detached)
        on_failure.callback(_stop, head, cluster_id, temp_dir, 0.5)
        report = _wait_until_ready(head, temp_dir, timeout_s)
        handle = _make_handle(report, temp_dir, cluster_id, head.pid, serve)
        handle.save(temp_dir / "cluster.json")
        if save_as is not None:
            handle.save(save_as)
        cluster = EmbeddedCluster(handle, head)
        if not detached:
            atexit.register(cluster.stop)
        on_failure.pop_all()
    return cluster


def _prepare_folder(temp_dir: Path, cluster_id: str, ports: range, detached: bool) -> dict[str, str]:
    """Make the cluster's folder; returns the environment of its endpoints. `ports` are for their replicas."""
    temp_dir.mkdir(0o700)
    (temp_dir / "cluster-id").write_text(cluster_id)
    (temp_dir / "tmp").mkdir()
    serve = serve_environment(temp_dir) | limit_replica_ports(ports)
    if detached:  # it may serve what Ray's own `serve deploy` brings, which does not prepare; `deploy` does
        with contextlib.suppress(ClusterError):
            prepare_ingress(serve)
    return serve


def _find_worker_start(folder: Path) -> WorkerStart:
    make = find_optional("fork", "shoal.worker_starts")
    start: WorkerStart = make(folder) if make else WorkerStart()
    return start


def _require_plain_paths(starts: WorkerStart) -> None:
    """Raises ConfigError for a path that Ray mangles on the command line of its workers, which then never start."""
    for path in filter(None, (sys.executable, starts.script)):
        try:
            is_plain = shlex.split(subprocess.list2cmdline([path])) == [path]
        except ValueError:  # an unterminated quotation
            is_plain = False
        if not is_plain:
            problem = "has a quotation mark or a backslash, with which Ray starts no worker"
            raise ConfigError("path", path, problem, "move it to a folder without")


def _launch(options: Mapping[str, object], environment: dict[str, str], detached: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "shoal.cluster.ray_head", json.dumps(options)],
        stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if detached else None,
        env=environment,
        cwd="/",
        start_new_session=True,  # only this process receives Ctrl-C, and stops the cluster in order
    )


def _make_handle(
    report: Mapping[str, str], temp_dir: Path, cluster_id: str, head_pid: int, serve: Mapping[str, str]
) -> ClusterHandle:
    return ClusterHandle(
        address=report["address"],
        dashboard_url=report["dashboard_url"],
        token=ray_token_path().read_text().strip(),
        environment={
            **_common_environment(temp_dir),
            **serve,
            "RAY_ADDRESS": report["address"],
            "RAY_API_SERVER_ADDRESS": report["dashboard_url"],
        },
        temp_dir=temp_dir,
        cluster_id=cluster_id,
        head_pid=head_pid,
        started_at_s=time.time(),
    )


def _common_environment(temp_dir: Path) -> dict[str, str]:
    """The environment of both the cluster and its clients."""
    return {
        FOLDER_VARIABLE: str(temp_dir),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(ray_token_path()),
        # Ray's switch for "one node, on loopback" (the default on macOS and Windows). Without it `ray.init` turns
        # 127.0.0.1 into the machine's outside address, where nothing of ours listens.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **HIDE_GPUS,
    }


def _cluster_environment(
    temp_dir: Path, cluster_id: str, serve: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    bin_folder = str(Path(sys.executable).parent)
    return {
        **inherited,
        **make_python_path_variable(),
        "SHOAL_HOME": str(home()),
        **_common_environment(temp_dir),
        **serve,
        # By default Ray starts a worker for each CPU when a client connects; jobs have another environment.
        "RAY_prestart_worker_first_driver": "0",
        # By default each training run gets an actor that watches for preemption of this machine.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_agent_register_timeout_ms": "180000",  # how long the raylet looks for an agent that starts slowly
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "150",  # below the timeout of `start_cluster`, which could not say why
        "RAY_JOB_STOP_WAIT_TIME_S": "15",  # time for a stopped job to save
        "TMPDIR": str(temp_dir / "tmp"),  # for sockets that Ray's Python processes leave behind when stopped
        "PATH": bin_folder + os.pathsep + inherited.get("PATH", os.defpath),  # `python` in a job is this one
        **extra,
        CLUSTER_ID_VARIABLE: cluster_id,
    }


def make_python_path_variable() -> dict[str, str]:
    """$PYTHONPATH, if set, with absolute paths, for processes that run in other folders."""
    if not (folders := os.environ.get("PYTHONPATH")):
        return {}
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, folders.split(os.pathsep)))}


def _wait_until_ready(head: subprocess.Popen[bytes], temp_dir: Path, timeout_s: float) -> dict[str, str]:
    assert head.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    readable = select.select([head.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]
    line = head.stdout.readline() if readable else b""
    if line:
        report: dict[str, str] = json.loads(line)
        if "failed" in report:
            raise ClusterError(f"Ray could not start: {report['failed']}. `shoal doctor` checks this machine")
        return report
    problem = "ended while starting" if readable else f"was not ready within {timeout_s:g} s"
    log = temp_dir / "head.log"
    lines = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
    output = f"It said: {' / '.join(lines)}." if lines else "It said nothing."
    raise ClusterError(f"Ray {problem}. {output} `shoal doctor` checks this machine")


def _stop(head: subprocess.Popen[bytes], cluster_id: str, temp_dir: Path, grace_s: float = 2.0) -> None:
    """End the cluster, collect the head's exit status, and close our ends of its pipes."""
    end_cluster(cluster_id, temp_dir, grace_s=grace_s)
    for pipe in (head.stdin, head.stdout):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(timeout=5.0)
