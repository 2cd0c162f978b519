"""A TCP proxy on loopback that ends all connections once so many bytes have been sent through it."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self


class CuttingProxy:
    """Forwards to `target`; a context.

    limit:    bytes towards the target, of all connections together; then no connection is accepted any more. None: all
    on_limit: called when that many have been forwarded
    """

    def __init__(
        self, target: tuple[str, int], limit: int | None = None, on_limit: Callable[[], object] = lambda: None
    ) -> None:
        self._target = target
        self._limit = limit
        self._on_limit = on_limit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._lock = threading.Lock()  # guards `num_bytes` and `is_cut`, and is held while forwarding
        self.num_bytes, self.is_cut = 0, False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for source, sink, is_counted in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._forward, args=(source, sink, is_counted), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_counted: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                if not is_counted:
                    sink.sendall(data)
                elif not self._send_counted(sink, data):
                    return
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _send_counted(self, sink: socket.socket, data: bytes) -> bool:
        with self._lock:
            if self.is_cut:
                return False
            rest = len(data) if self._limit is None else min(len(data), self._limit - self.num_bytes)
            sink.sendall(data[:rest])
            self.num_bytes += rest
            if self.num_bytes == self._limit:
                self._on_limit()
                self._cut()
        return not self.is_cut

    def _cut(self) -> None:
        self.is_cut = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
