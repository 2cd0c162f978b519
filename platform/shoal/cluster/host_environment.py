"""The environment of one host of a larger cluster: `python -m shoal.cluster.host_environment` prints it for a shell.

Called by the setup commands of `cluster.yaml` on every host, before Ray starts there. It is the embedded cluster's
environment, with the same ports on every host, and without the settings that restrict it to this machine.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from contextlib import suppress
from pathlib import Path

from shoal.cluster.cluster_handle import HIDE_GPUS
from shoal.cluster.ingress.serve_environment import prepare_ingress, serve_environment
from shoal.errors import ClusterError, ConfigError, ShoalError
from shoal.home import ray_token_path
from shoal.store import store_variable

FOLDER = Path("/tmp/shoal-host")
HEAD_AWAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "300"}  # how long hosts wait for a head that is away

# Every host must have the same ports. The first is bound to loopback; the second, for endpoints with gRPC, to every
# address of a head that is reachable from outside.
PORTS = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": "8500", "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": "9500"}


def build_host_environment(folder: Path) -> dict[str, str]:
    """The variables. Creates `folder`, for HAProxy's files. Raises ConfigError."""
    for each in (folder, folder / "ha"):  # Ray will run programs in it, and any user may have created its name in /tmp
        with suppress(FileExistsError):
            each.mkdir(mode=0o700, parents=True)
        status = each.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            remedy = "remove it, or name another folder as the argument of `python -m shoal.cluster.host_environment`"
            raise ConfigError("folder", str(each), "can be changed by another user", remedy)
    return {
        **serve_environment(folder),
        **PORTS,
        **HIDE_GPUS,
        **{name: os.environ.get(name, value) for name, value in HEAD_AWAY.items()},
        **store_variable(),
        "RAY_AUTH_MODE": "token",
        **({} if "RAY_AUTH_TOKEN" in os.environ else {"RAY_AUTH_TOKEN_PATH": str(ray_token_path())}),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "15",
    }


def main() -> None:
    """Print `export` lines, with this Python's folder first on the PATH. Argument: HAProxy's folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    try:
        environment = build_host_environment(folder)
    except (ShoalError, OSError) as error:
        sys.exit(f"error: {error}")
    try:
        prepare_ingress(environment)
    except ClusterError as error:
        sys.stderr.write(f"note: this host trains, and cannot be the head of a cluster that serves: {error}\n")
    for name, value in environment.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    sys.stdout.write(f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"\n')


if __name__ == "__main__":
    main()
