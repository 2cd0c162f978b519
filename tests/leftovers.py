"""What a cluster must not leave behind."""

from __future__ import annotations

from collections.abc import Collection

import psutil

from shoal.cluster.embedded import EmbeddedCluster


def listening_ports(pids: Collection[int]) -> set[int]:
    """The TCP ports on which the processes listen."""
    found = psutil.net_connections("tcp")
    return {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN and entry.pid in pids}


def assert_nothing_left(cluster: EmbeddedCluster, ports: set[int]) -> None:
    """No process, no listening port and no file of a stopped cluster."""
    assert cluster.pids() == []
    assert cluster.temp_dir is not None
    assert not cluster.temp_dir.exists()
    open_now = {entry.laddr.port for entry in psutil.net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
    assert not ports & open_now
