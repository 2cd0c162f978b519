"""HAProxy as an endpoint's wrapper starts it, before one replica, without Ray."""

import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

from serve_template import serves_config
from shoal.cluster.ingress.front import Front, install_front
from shoal.cluster.ingress.serve_environment import prepare_ingress, serve_environment
from shoal.cluster.ingress.shared_listener import ADMIN_SOCKET
from shoal.cluster.ports import find_free_port
from shoal_program import logs
from waiting import wait_for

END_S = 60.0
# Edits: without Serve nobody answers HAProxy's health checks.
UNCHECKED = r"/no-check/!{/timeout check/d; s/ check\b.*//; /check/d}"


class HaproxyProcess:
    """`port`, `grpc_port`: before the replica's HTTP and gRPC (0: none). `edits`: a sed script for its configuration.

    fallback_port: of Serve's own proxy
    front:         how clients reach it; None: as by default
    prepare:       called with the `environment` before HAProxy starts
    """

    def __init__(
        self,
        replica_port: int,
        grpc_replica_port: int,
        edits: str = "",
        *,
        fallback_port: int = 0,
        front: Front | None = None,
        prepare: Callable[[dict[str, str]], None] | None = None,
    ) -> None:
        # Unix sockets lie in it, whose paths are short: pytest's own folders and $TMPDIR may be too long.
        self._made = tempfile.TemporaryDirectory(prefix="x.", dir="/tmp")
        self.folder = folder = Path(self._made.name)
        self.environment = environment = serve_environment(folder)
        if prepare is not None:
            prepare(environment)
        prepare_ingress(environment)
        self.files = folder / "ha"
        if front is not None:
            install_front(front, self.files)
            (self.files / "node").mkdir()
            (self.files / "node" / "a.sock").symlink_to(folder / "a.sock")
        self._host = "::1" if front is not None and front.host == "::1" else "127.0.0.1"
        self.port, self.grpc_port = find_free_port(), find_free_port()
        self._config = serves_config(folder, self.port, replica_port, self.grpc_port, grpc_replica_port, fallback_port)
        (folder / "server-state").touch()
        wrapper = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
        edited = folder / "edited"
        edited.write_text(wrapper.read_text().replace("exec ", f"sed -i '{edits}' \"$config\"\nexec "))
        self._log = (self.folder / "log").open("wb")
        self._edited = edited
        self._start()
        try:
            wait_for(self._listens, what="HAProxy")
        except BaseException:
            self.close()
            raise

    def _start(self, *options: str | Path) -> None:
        file = self.folder / "haproxy.cfg"
        file.write_text(self._config)
        own_port = [] if self.environment.get("SERVE_SOCKET_REUSE_PORT_ENABLED") == "1" else ["-dR"]  # as Serve does
        words = ["sh", self._edited, "-db", "-f", file, *own_port, *options]
        self.process = subprocess.Popen(words, stdout=self._log, stderr=self._log)
        logs[f"HAProxy {self.process.pid}"] = self.folder / "log"

    def reload(self) -> None:
        """Start a successor, which takes over the sockets, as Serve does when replicas have changed."""
        with self.process as earlier:
            self._start("-x", self.folder / ADMIN_SOCKET, "-sf", str(earlier.pid))
            logs.pop(f"HAProxy {earlier.pid}")

    def replace(self) -> None:
        """Kill it, and start another one, as Serve does."""
        self.process.kill()
        self.process.wait()
        logs.pop(f"HAProxy {self.process.pid}")
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()
            self._made.cleanup()
            logs.pop(f"HAProxy {self.process.pid}", None)

    def _listens(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            socket.create_connection((self._host, self.port), END_S).close()
        except ConnectionRefusedError:
            return False
        return (self.folder / ADMIN_SOCKET).exists()
