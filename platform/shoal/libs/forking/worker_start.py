"""Whether workers are forked on this machine, and by which programs. Called where an embedded cluster is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.extend.cluster import WorkerStart
from shoal.libs.forking import fork_client

FORK_VARIABLE = "SHOAL_FORK_WORKERS"  # "0": workers are started as Ray does it


def make_worker_start(folder: Path) -> WorkerStart:
    """The programs for a cluster with this folder; Ray's own where an accelerator's driver might already be initialised
    (decision 012), and where the variable says so."""
    has_accelerator = any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "kfd", "dxg"))
    if sys.platform != "linux" or os.environ.get(FORK_VARIABLE) == "0" or has_accelerator:
        return WorkerStart()
    address = str(folder / "fork.sock")
    return WorkerStart(
        script=fork_client.__file__,
        server=[sys.executable, "-P", "-m", "shoal.libs.forking.fork_server", address],
        environment={fork_client.ADDRESS_VARIABLE: address},
    )
