"""The raylet's command to start a worker, instead of Ray's `setup_worker.py`: requests a fork from the fork server.

Runs as a script of the embedded cluster's raylet, once for each worker, so it imports only a few modules of the
standard library (importing `shoal.cluster` would cost more than it saves). If the worker cannot be forked, or no fork
server runs, this process becomes Ray's own script. See docs/decisions/012-forked-workers.md.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from importlib.util import find_spec
from typing import TypedDict

ADDRESS_VARIABLE = "SHOAL_FORK_SERVER"  # the path of its unix socket
FORK_TIMEOUT_S = 30.0  # for a fork server that has accepted the request, on a busy machine

# Python and libraries read these once at import, which the fork server has already done.
STARTUP_VARIABLES = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ", "OPENSSL_", "SSL_", "PROTOCOL_BUFFERS_", "SYMPY_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NPY_", "TORCH", "PYTORCH_", "AOT_", "PT2_"),
    *("AIOHTTP_", "YARL_", "MULTIDICT_", "FROZENLIST_", "PROPCACHE_", "PYDANTIC_"),
)
OOM_SCORE = "/proc/self/oom_score_adj"
_CONTEXT = "--serialized-runtime-env-context="
_PYTHON = "--language=PYTHON"


class WorkerRequest(TypedDict):
    """A worker, as JSON over the socket; its standard streams are sent with it."""

    command: list[str]  # the worker's script and its arguments
    environment: dict[str, str]
    folder: str
    # Inherited from the raylet.
    niceness: int
    oom_score: str
    blocked_signals: list[int]
    open_files: tuple[int, int]  # the limits, soft and hard


def parse_worker_request(arguments: list[str], environment: dict[str, str]) -> WorkerRequest | None:
    """The worker requested by the arguments of `setup_worker.py`; None when Ray must start it."""
    contexts = [word.removeprefix(_CONTEXT) for word in arguments if word.startswith(_CONTEXT)]
    command = [word for word in arguments if not word.startswith((_CONTEXT, "--language="))]
    if _PYTHON not in arguments or not command or command[0].startswith("-"):
        return None
    context = json.loads((contexts or ["{}"])[0])
    variables = context.get("env_vars") or {}
    is_plain = not (context.get("command_prefix") or context.get("override_worker_entrypoint"))
    if not is_plain or context.get("py_executable", sys.executable) != sys.executable:
        return None
    if any("$" in value for value in variables.values()):  # Ray expands it
        return None
    with open(OOM_SCORE) as oom_score:
        return WorkerRequest(
            command=command,
            environment=environment | variables,
            folder=os.getcwd(),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            oom_score=oom_score.read(),
            blocked_signals=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        )


def request_fork(address: str, worker: WorkerRequest) -> bool:
    """Whether the fork server at `address` has started the worker, with the standard streams of this process."""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(FORK_TIMEOUT_S)
        try:
            server.connect(address)
            text = json.dumps(worker).encode()
            socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
            server.sendall(text)
            return server.recv(1) == b"+"  # sent by the worker itself
        except OSError:
            return False


def main() -> None:
    """Request a fork, or become Ray's own script."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    worker = parse_worker_request(sys.argv[1:], dict(os.environ))
    if worker is None or not request_fork(address, worker):
        ray = find_spec("ray")  # imports nothing
        assert ray is not None
        assert ray.origin is not None
        script = os.path.join(os.path.dirname(ray.origin), "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])


if __name__ == "__main__":
    main()
