"""What a cluster must not leave behind."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.cluster.processes import is_alive

Sockets = set[tuple[int, int]]  # (port, inode): another program may have the port by the time it is looked at again
LISTENS = "0A"


def listening_ports(pids: Collection[int]) -> Sockets:
    """The TCP sockets on which the processes listen."""
    found = psutil.net_connections("tcp")
    ports = {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN and entry.pid in pids}
    return {(port, inode) for port, inode in listening() if port in ports}


def pids_of(cluster: EmbeddedCluster, word: str) -> list[int]:
    """Of the cluster's processes those whose name or command line has `word`."""
    return _select(cluster.pids(), word)


def children_of(pid: int, word: str) -> list[int]:
    """As `pids_of`, of what the process started and of what that started."""
    return _select([child.pid for child in psutil.Process(pid).children(recursive=True)], word)


def _select(pids: Collection[int], word: str) -> list[int]:
    found = []
    for pid in pids:
        with suppress(psutil.Error):  # it has just ended
            process = psutil.Process(pid)
            if word in " ".join([process.name(), *process.cmdline()]):
                found.append(pid)
    return found


def still_alive(pids: Collection[int]) -> list[int]:
    """Those that have not ended; a zombie, which waits for its parent, has."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            if is_alive(psutil.Process(pid)):
                found.append(pid)
    return found


def assert_nothing_left(cluster: EmbeddedCluster, sockets: Sockets) -> None:
    """No process, no listening port and no file of a stopped cluster."""
    assert cluster.pids() == []
    assert not cluster.temp_dir.exists()
    assert not sockets & listening()


def listening() -> Sockets:
    """Of all programs."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {(int(line[1].rpartition(":")[2], 16), int(line[9])) for line in lines if line[3] == LISTENS}
