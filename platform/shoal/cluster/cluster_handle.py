"""The addresses, token and local files by which a client uses a Ray cluster.

Made by `embedded_cluster` and `attach`; read by `jobs` and the CLI. Owns nothing and stops nothing. A local cluster's
handle is also saved as `cluster.json` in the cluster's folder, without the token.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

from shoal.cluster.processes import CLUSTER_ID_VARIABLE, is_alive
from shoal.errors import ClusterError

FOLDER_VARIABLE = "SHOAL_CLUSTER_DIR"
# Ray's switch to hide all GPUs from a worker that reserves none; by default such a worker sees every GPU of its host.
# A worker reads it from its own environment, when it starts a task or an actor (decision 031).
HIDE_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}


@dataclass(frozen=True)
class ClusterHandle:
    """A reachable cluster. For a remote one, `temp_dir` and the fields after it are None."""

    address: str  # what `ray.init` takes: "127.0.0.1:41234"; for a remote cluster its dashboard's URL
    dashboard_url: str  # "http://127.0.0.1:38123"
    token: str = field(repr=False)
    environment: dict[str, str] = field(repr=False)  # for a client process, set before it imports ray
    temp_dir: Path | None = None
    cluster_id: str | None = None
    head_pid: int | None = None
    started_at_s: float | None = None  # Unix time
    host: str | None = None  # of the process that wrote the record; None of a handle that no record has

    @property
    def is_local(self) -> bool:
        """Whether jobs see this machine's files, so that nothing needs to be uploaded."""
        return self.temp_dir is not None

    @property
    def is_on_this_host(self) -> bool:
        """Whether its processes and files are on this host: hosts and containers may share one $SHOAL_HOME."""
        return self.host in (None, socket.gethostname())

    def is_head_alive(self) -> bool:
        """Whether the head process of a local cluster still runs. Its pid alone may belong to another process."""
        try:
            head = psutil.Process(self.head_pid or 0)
            return is_alive(head) and head.environ().get(CLUSTER_ID_VARIABLE) == self.cluster_id
        except psutil.Error:
            return False

    def save(self, path: Path) -> None:
        """Write everything but the token, for `load`; atomic. Raises ClusterError when it cannot be written."""
        record = {
            "address": self.address,
            "dashboard_url": self.dashboard_url,
            "temp_dir": str(self.temp_dir),
            "cluster_id": self.cluster_id,
            "head_pid": self.head_pid,
            "started_at_s": self.started_at_s,
            "host": socket.gethostname(),
            "versions": {"python": platform.python_version(), "ray": version("ray"), "shoal": version("shoal")},
            "environment": self.environment,
        }
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            draft.write_text(json.dumps(record, indent=2) + "\n")
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ClusterError(f"{path} cannot be written ({error}): make room, or set $SHOAL_HOME") from error


@contextmanager
def set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def load_handle(path: Path) -> ClusterHandle | None:
    """The handle that `save` wrote; None if there is no such file. Raises ClusterError for any other file."""
    try:
        record = json.loads(path.read_text())
        token_path = Path(record["environment"]["RAY_AUTH_TOKEN_PATH"])
        return ClusterHandle(
            address=record["address"],
            dashboard_url=record["dashboard_url"],
            token=token_path.read_text().strip() if token_path.exists() else "",
            environment=record["environment"],
            temp_dir=Path(record["temp_dir"]),
            cluster_id=record["cluster_id"],
            head_pid=record["head_pid"],
            started_at_s=record["started_at_s"],
            host=record["host"],
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{path} is no file of `shoal up` ({error!r}): delete it") from error
