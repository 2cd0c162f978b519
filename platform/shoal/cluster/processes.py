"""Find the processes of one cluster by the marker they inherit, and end them; and programs that a process of ours
starts beside itself, with their output in a file.

Every process of a cluster has `SHOAL_CLUSTER_ID=<id>` in its environment, also after a double fork. Called by the
embedded cluster, by the head process when its parent has died, and by `shoal down`; programs are actors, followers of
runs, simulated sensors and brokers. Signals a process only with proof that it belongs to the cluster (see
`find_cluster_processes`), and never the calling process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from shoal.atomic_file import create_private
from shoal.errors import ClusterError

CLUSTER_ID_VARIABLE = "SHOAL_CLUSTER_ID"
POLL_S = 0.02
KILL_S = 5.0  # after SIGKILL, for what no process survives
Program = subprocess.Popen[bytes]

# Ray's servers answer SIGTERM late or never without the others, and hold nothing that outlives the cluster.
_SERVERS = ("raylet", "gcs_server", "ray::RuntimeEnvAgent", "shoal.cluster.ray_head")


def find_cluster_processes(cluster_id: str, temp_dir: Path) -> list[psutil.Process]:
    """The living processes of the cluster, without the caller: see `find_marked_processes`."""
    return find_marked_processes(CLUSTER_ID_VARIABLE, cluster_id, temp_dir)


def find_marked_processes(variable: str, value: str, temp_dir: Path | None = None) -> list[psutil.Process]:
    """The living processes that have a mark in their environment, without the caller.

    A long process title overwrites the environment that the kernel shows (as in Ray's dashboard modules). Two more
    proofs count: descent from a marked process, and a Ray process with an open file of `temp_dir`.
    """
    own: list[psutil.Process] = []
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _has_exited(process):
                continue
            children[process.ppid()].append(process)
            if _read_environment(process).get(variable) == value or (
                temp_dir is not None
                and process.name().startswith("ray")
                and any(file.path.startswith(f"{temp_dir}/") for file in process.open_files())
            ):
                own.append(process)
    members: dict[int, psutil.Process] = {}
    while own:
        process = own.pop()
        if process.pid not in members and process.pid != os.getpid():
            members[process.pid] = process
            own.extend(children[process.pid])
    return list(members.values())


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie, which waits only for its parent, does not."""
    try:
        return process.is_running() and not _has_exited(process)
    except psutil.Error:
        return False


def _has_exited(process: psutil.Process) -> bool:
    """A process becomes a zombie when its first thread ends; its sockets stay open until the last one ends."""
    return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1


def _read_environment(process: psutil.Process) -> dict[str, str]:
    if process.status() != psutil.STATUS_ZOMBIE:
        return process.environ()
    for thread in process.threads()[1:]:  # the first one has released its memory
        return psutil.Process(thread.id).environ()
    return {}


def end_processes(cluster_id: str, temp_dir: Path, *, grace_s: float = 2.0) -> None:
    """SIGTERM to every process of the cluster; SIGKILL after `grace_s`, or when only Ray's servers are left.

    Idempotent. Raises ClusterError when a process survives `KILL_S` after the first SIGKILL.
    """
    asked: set[psutil.Process] = set()
    kill_at_s = time.monotonic() + grace_s
    # Signalled processes that still run count even without the parent that proved their membership.
    while alive := {*filter(is_alive, asked), *find_cluster_processes(cluster_id, temp_dir)}:
        now_s = time.monotonic()
        if now_s > kill_at_s + KILL_S:
            raise ClusterError(f"processes {sorted(p.pid for p in alive)} of cluster {cluster_id} survive SIGKILL")
        kill = now_s > kill_at_s or all(_is_server(process) for process in alive)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if kill:
                    process.kill()
                elif process not in asked:
                    process.terminate()
        asked.update(alive)
        psutil.wait_procs(alive, timeout=POLL_S)


def _is_server(process: psutil.Process) -> bool:
    try:
        return any(word in _SERVERS for word in (process.name(), *process.cmdline()[:4]))
    except psutil.Error:
        return True  # it has just exited


def get_cluster_folder(cluster_id: str) -> Path:
    """The folder of a cluster's files. Ray puts unix sockets, whose paths may have 107 characters, deep into it."""
    return Path(f"/tmp/shoal-{cluster_id[:12]}")


def remove_folder(temp_dir: Path, cluster_id: str) -> None:
    """Remove the cluster's temporary folder after checking that it is this cluster's: by its mark, or by its name if
    its start was interrupted before the mark was written."""
    try:
        mark = (temp_dir / "cluster-id").read_text()
    except FileNotFoundError:
        mark = ""
    if temp_dir.exists() and (mark == cluster_id or (not mark and temp_dir == get_cluster_folder(cluster_id))):
        shutil.rmtree(temp_dir)


def end_cluster(cluster_id: str, temp_dir: Path, *, grace_s: float = 2.0) -> None:
    """Remove every process and file of the cluster. Idempotent; raises ClusterError on failure."""
    end_processes(cluster_id, temp_dir, grace_s=grace_s)
    remove_folder(temp_dir, cluster_id)


# -- programs


def start_program(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, has_lifeline: bool = True
) -> Program:
    """Start a program that prints into `log`. Ctrl-C is not for it: this process receives it, and ends all in order.

    has_lifeline: its standard input closes when this process ends, however that ends
    """
    stdin = subprocess.PIPE if has_lifeline else subprocess.DEVNULL
    with create_private(log).open("ab") as output:
        return subprocess.Popen(
            command, env=environment, stdin=stdin, stdout=output, stderr=output, start_new_session=True
        )


def wait_for_programs(programs: Iterable[Program], timeout_s: float) -> None:
    """Wait until all have ended, so long at most."""
    deadline_s = time.monotonic() + timeout_s
    for each in programs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(max(0.0, deadline_s - time.monotonic()))


def end_programs(programs: Sequence[Program], grace_s: float) -> None:
    """Ask all to end, by their lifeline or by SIGTERM, and kill those that still run after `grace_s`. Idempotent."""
    for each in programs:
        each.stdin.close() if each.stdin is not None else each.terminate()
    wait_for_programs(programs, grace_s)
    for each in programs:
        each.kill()
        each.wait()
