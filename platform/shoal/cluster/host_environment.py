"""The environment of one host of a larger cluster: `python -m shoal.cluster.host_environment` prints it for a shell.

Called by the setup commands of `cluster.yaml` on every host, before Ray starts there. It is the environment of the
embedded cluster, with ports that are the same on every host, and without what means "this machine only".
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from shoal.cluster.serve_environment import serve_environment
from shoal.home import ray_token_path

FOLDER = Path("/tmp/shoal-host")

# Every host must agree on these. The first is bound to loopback; the second, for endpoints with gRPC, to every address
# of a head that others reach.
PORTS = {
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": "8500",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": "9500",
}


def host_environment(folder: Path) -> dict[str, str]:
    """The variables; makes `folder`, where HAProxy's files go. Raises ConfigError, ClusterError."""
    return {
        **serve_environment(folder),
        **PORTS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(ray_token_path()),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "15",
    }


def main() -> None:
    """Print `export` lines, with this Python's folder first on the PATH. Argument: HAProxy's folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, value in host_environment(folder).items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    sys.stdout.write(f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"\n')


if __name__ == "__main__":
    main()
