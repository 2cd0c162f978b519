"""The HTTP server of an exported folder: a thread for each connection, and the standard library alone.

Started by the folder's `server.py`. It listens when the model is loaded. SIGTERM, as `docker stop` sends it, ends it
when the requests in progress are answered.

    HOST  the address to listen on, 127.0.0.1 by default; the Dockerfile sets 0.0.0.0
    PORT  8000 by default; 0 chooses a free one
    NUM_THREADS  threads of one forward, 1 by default, as in an endpoint
"""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from shoal.errors import ConfigError, InferenceError, WeightsError
from shoal.libs.export.runtime.model import FolderModel, read_number
from shoal.serve.http.response import RestResponse, build_error_response
from shoal.serve.protocol.request_limits import read_length

SOCKET_TIMEOUT_S = 30.0  # of a connection that is idle, or within a request or an answer
LINGER_S = 10.0  # for the rest of a request that was answered before it was read
DRAIN_S = 25.0  # for the requests in progress; less than Kubernetes waits


class FolderServer(ThreadingHTTPServer):
    """Serves one model."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], model: FolderModel) -> None:
        self.model = model
        self._num_running, self._changed = 0, threading.Condition()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks its own name up, which may take seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error on a connection, unless the client has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """A request in progress."""
        with self._changed:
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until the requests in progress are answered."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0, DRAIN_S)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: FolderServer
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet
    has_unread_input = False

    def _handle(self) -> None:
        with self.server.count_request():
            try:
                body = self._read_body()
            except InferenceError as error:
                self._send(build_error_response(error))
                return
            headers = [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in self.headers.items()]
            path = unquote(self.path.partition("?")[0])
            self._send(self.server.model.answer(self.command.replace("HEAD", "GET"), path, headers, body))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _handle

    def _read_body(self) -> bytes:
        """Read the request's body. Raises InferenceError (400, 408, 411, 413)."""
        lengths = set(self.headers.get_all("Content-Length", []))
        try:
            if "Transfer-Encoding" in self.headers:  # also beside a length, which a proxy may read in another way
                raise InferenceError(411, "a body in chunks is not taken; send it with its Content-Length")
            if len(lengths) > 1:
                raise InferenceError(400, f"Content-Length is given as {' and '.join(sorted(lengths))}")
            if not lengths:
                return b""
            length_text = lengths.pop()
            length = read_length({b"content-length": length_text.encode("latin-1")}, b"content-length") or 0
            limit = self.server.model.limits.max_body_bytes
            if length > limit:
                raise InferenceError(413, f"the body has {length} bytes, the limit is {limit}")
            try:
                body = self.rfile.read(length)
            except TimeoutError:
                raise InferenceError(408, f"the body is too slow: nothing came for {SOCKET_TIMEOUT_S:g} s") from None
            if len(body) < length:
                raise InferenceError(400, f"the body ends after {len(body)} of {length} bytes")
        except InferenceError:
            self.close_connection = self.has_unread_input = True
            raise
        return body

    def _send(self, response: RestResponse) -> None:
        parts = [response.body, *response.parts]
        self.send_response_only(response.status)
        self.send_header("content-type", response.content_type.decode())
        self.send_header("content-length", str(sum(map(len, parts))))
        for name, text in response.headers:
            self.send_header(name.decode(), text.decode())  # `connection: close` sets close_connection
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            for part in parts:
                self.wfile.write(part)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no HTTP request, in the form of every other error."""
        self.close_connection = self.has_unread_input = True
        self._send(build_error_response(InferenceError(code, message or self.responses[code][0])))

    def finish(self) -> None:
        """Close the connection, after input that was not read: with it, the kernel would discard the answer."""
        if self.has_unread_input:
            ends_s = time.monotonic() + LINGER_S
            with suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_WR)
                self.connection.settimeout(LINGER_S)
                while self.rfile.read1(1 << 16) and time.monotonic() < ends_s:
                    pass
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def main() -> None:
    """Serve the folder that this file is in, until SIGTERM or Ctrl-C."""
    try:
        model = FolderModel(Path(__file__).resolve().parents[1])
        address = os.environ.get("HOST", "127.0.0.1"), read_number("PORT", 8000)
    except (ConfigError, WeightsError, OSError) as error:
        sys.exit(f"error: {error}")
    try:
        server = FolderServer(address, model)
    except (OSError, OverflowError) as error:
        sys.exit(f"error: HOST = {address[0]!r}, PORT = {address[1]}: {error}")
    with server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        print(f"{model.description.name} is served at http://{address[0]}:{server.server_address[1]}", flush=True)  # noqa: T201
        server.serve_forever(poll_interval=0.1)
        server.socket.close()
        server.drain()
