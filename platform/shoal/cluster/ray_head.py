"""The head process of a local cluster: `python -m shoal.cluster.ray_head OPTIONS` runs a Ray head node.

Started by `shoal.cluster.embedded_cluster` alone. It starts Ray's `Node` itself, because `ray start --head` maps
127.0.0.1 to the machine's outside address (Ray then listens on every interface), always starts a Ray Client server,
and starts the dashboard before the raylet instead of in parallel. It never touches another Ray of the machine: its
folder, ports and address file are its own.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypedDict

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_constants import KV_NAMESPACE_DASHBOARD
from ray._private.services import get_node
from ray._private.utils import write_ray_address
from ray._raylet import (  # type: ignore[attr-defined]  # its stub file does not name them
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    get_port_filename,
    persist_port,
)
from ray.dashboard.consts import DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX

from shoal.cluster.processes import CLUSTER_ID_VARIABLE, end_cluster
from shoal.errors import ClusterError

LOOPBACK = "127.0.0.1"
LOG_MONITOR_VARIABLE = "SHOAL_LOG_MONITOR"  # "0": no driver is sent what workers print
CHECK_PERIOD_S = 0.5
SIGTERM_GRACE_S = 5.0  # after a SIGTERM to this process alone; `end_cluster` has killed every process by then
LAST_LINES = 3
AGENTS = ("dashboard_agent", "runtime_env_agent")  # the raylet ends when either does
INFO_LINE = re.compile(r"\[\S+ \S+ I |\S+ \S+\s(INFO|DEBUG) ")  # the start of a log line of Ray's servers or agents


class HeadOptions(TypedDict):
    """The parent's options, on the command line as JSON."""

    temp_dir: str
    ports: dict[str, int]  # reserved by the parent, by Ray's names for them
    num_cpus: int | None
    num_gpus: int | None
    object_store_memory_bytes: int | None
    watch_parent: bool
    worker_script: str | None  # in the place of Ray's own
    worker_server: list[str]  # a command that serves that script; empty: none


class _HeadNode(Node):
    """Ray's head node, with the dashboard starting while the raylet starts (saves 0.8 s of 2.9 s)."""

    def start_head_processes(self) -> None:
        self.start_gcs_server()
        self._write_cluster_info_to_kv()
        self._webui_url = f"{LOOPBACK}:{self._ray_params.dashboard_port}"

    def start_ray_processes(self) -> None:
        # The raylet reads the dashboard agent's port from a file, ignoring any option, and gives up after 15 s.
        port = self._ray_params.dashboard_agent_listen_port
        persist_port(self.get_session_dir_path(), self.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        super().start_ray_processes()
        self.start_api_server(include_dashboard=True, raise_on_failure=True)
        # Ray's own timeouts are 30 s for the raylet and 15 s for its agents, which start the jobs; a busy machine needs
        # more. Here the parent sets the deadline.
        while not (self._is_registered() and self._read_port(RUNTIME_ENV_AGENT_PORT_NAME)):
            if dead := [name for name, _ in self.dead_processes()]:
                logs = Path(self.get_logs_dir_path())
                raise ClusterError("; ".join(f"{name} ended: {summarize_logs(logs, name)}" for name in dead))
            time.sleep(CHECK_PERIOD_S / 10)

    def _is_registered(self) -> bool:
        """Whether the raylet is registered, and its agent with the dashboard. Raises ClusterError when that cannot
        listen."""
        try:
            get_node(self.gcs_address, self.node_id)
        except RuntimeError:
            return False
        if self._read_port(DASHBOARD_AGENT_LISTEN_PORT_NAME) == "-1":
            raise ClusterError("Ray's dashboard agent cannot listen: somebody has taken its port meanwhile")
        key = f"{DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX}{self.node_id}".encode()
        return bool(self.get_gcs_client().internal_kv_get(key, namespace=KV_NAMESPACE_DASHBOARD))

    def _read_port(self, name: str) -> str:
        """The port that an agent has reported; "" when it has not yet, "-1" when it has none."""
        return read_port_file(Path(self.get_session_dir_path()) / get_port_filename(self.node_id, name))


def read_port_file(file: Path) -> str:
    """The content of an agent's port file; "" when absent: Ray removes it before another takes its place."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def summarize_logs(logs: Path, name: str) -> str:
    """The last lines, without INFO, of one of Ray's processes; then those of an agent that they name."""
    words = _read_log_tail(logs, name)
    agents = [agent for agent in AGENTS if name == "raylet" and any(agent in line for line in words)]
    parts = [words, *([f"{agent}: {line}" for line in _read_log_tail(logs, agent)] for agent in agents)]
    return " / ".join(line for part in parts for line in part) or "it said nothing"


def _read_log_tail(logs: Path, name: str) -> list[str]:
    lines = [line for file in sorted(logs.glob(f"{name}.*")) for line in file.read_text(errors="replace").splitlines()]
    return [line for line in lines if line.strip() and not INFO_LINE.match(line)][-LAST_LINES:]


class _ParentWatch(threading.Thread):
    """Waits for the exit of the process that embeds the cluster; then ends the cluster and this process."""

    def __init__(self, lifeline: int, cluster_id: str, temp_dir: Path) -> None:
        super().__init__(daemon=True)
        self.parent_is_gone = threading.Event()
        self._lifeline = lifeline
        self._cluster_id = cluster_id
        self._temp_dir = temp_dir

    def run(self) -> None:
        parent_pid = os.getppid()
        # The pipe closes when the parent dies, unless a process that the parent forked holds it open.
        while os.getppid() == parent_pid and not select.select([self._lifeline], [], [], 1.0)[0]:
            pass
        self.parent_is_gone.set()
        try:
            end_cluster(self._cluster_id, self._temp_dir)
        finally:
            os._exit(1)


def main() -> None:
    """Start Ray, report it in one line on standard output, and run until SIGTERM or until Ray dies."""
    options: HeadOptions = json.loads(sys.argv[1])
    temp_dir = Path(options["temp_dir"])
    # The parent's pipes stay with this process; its children get /dev/null and a log file.
    lifeline, ready = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(temp_dir / "head.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    watch = _ParentWatch(lifeline, os.environ[CLUSTER_ID_VARIABLE], temp_dir)
    if options["watch_parent"]:
        watch.start()
    try:
        _run_head(options, temp_dir, ready)
    finally:
        if watch.parent_is_gone.is_set():
            watch.join()  # it ends Ray, then this process


def _run_head(options: HeadOptions, temp_dir: Path, ready: int) -> None:
    """Run Ray; exits with status 1 when a part of Ray dies, and 0 after SIGTERM, which ends the cluster."""
    # Before any part of Ray, since it may take as long as all of them. It ends when this process closes its pipe.
    command = options["worker_server"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE) if command else None
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with os.fdopen(ready, "w") as parent:
        try:
            # Ports without a value bind to free ones. With a loopback address every Ray process
            # listens on loopback.
            node = _HeadNode(
                RayParams(
                    node_ip_address=LOOPBACK,
                    node_name=LOOPBACK,
                    gcs_server_port=0,
                    dashboard_host=LOOPBACK,
                    # Not 0: the raylet would wait for the agents' report, too, and give up after 15 s
                    # (ray-project/ray#65983).
                    **options["ports"],
                    include_dashboard=True,
                    include_log_monitor=os.environ.get(LOG_MONITOR_VARIABLE) != "0",
                    no_monitor=True,
                    num_cpus=options["num_cpus"],
                    num_gpus=options["num_gpus"],
                    object_store_memory=options["object_store_memory_bytes"],
                    temp_dir=str(Path(options["temp_dir"]) / "ray"),
                    setup_worker_path=options["worker_script"],
                ),
                head=True,
                shutdown_at_exit=False,
                spawn_reaper=True,
            )
        except Exception as error:
            parent.write(json.dumps({"failed": str(error).rstrip(".")}) + "\n")
            raise
        # A job's driver finds its cluster by this file when several Rays run on the machine.
        write_ray_address(node.address, str(temp_dir / "ray"))
        parent.write(json.dumps({"address": node.address, "dashboard_url": f"http://{node.webui_url}"}) + "\n")
    while not (node.dead_processes() or stopping.is_set()):
        time.sleep(CHECK_PERIOD_S)
    # The children get the same SIGTERM on shutdown; leaving at once would make the kernel kill them.
    alone_at_s = time.monotonic() + SIGTERM_GRACE_S
    while stopping.is_set() and node.live_processes():
        if time.monotonic() > alone_at_s:
            end_cluster(os.environ[CLUSTER_ID_VARIABLE], temp_dir)
        time.sleep(0.05)
    if server is not None:
        server.kill()
    sys.exit(0 if stopping.is_set() else 1)


if __name__ == "__main__":
    main()
