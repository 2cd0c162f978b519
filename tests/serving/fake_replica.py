"""A replica that does what the path says: sockets and threads only, for tests of what stands before it.

/status/503?text/plain    that status, with that content type
/echo                     200, and as JSON what came: the headers, the length and the SHA-256 of the body
/silent                   no answer, until the client goes
/slow/1.5                 200, after so many seconds
/hang-up                  closes the connection without a word
/nonsense                 what is not HTTP
/any/path?/silent         as if the path were what follows the question mark
"""

import hashlib
import json
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written one after the other: 40 ms for the second else

    def do_GET(self) -> None:
        if self.path == "/-/healthz":
            time.sleep(self.server.check_s)  # type: ignore[attr-defined]
            self._answer(200, "text/plain", b"success")
            self.server.num_checks += 1  # type: ignore[attr-defined]
            return
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        match unquote(self.path.rpartition("?/")[2]).lstrip("/").split("/", 1):
            case ["status", rest]:
                status, _, content_type = rest.partition("?")
                self._answer(int(status), content_type, b'{"error": "the replica says"}')
            case ["slow", seconds]:
                time.sleep(float(seconds))
                self._answer(200, "application/json", b"{}")
            case ["silent"]:
                self.rfile.read()
            case ["hang-up"]:
                self.close_connection = True
            case ["nonsense"]:
                self.wfile.write(b"this is not HTTP\r\n\r\n")
                self.close_connection = True
            case _:
                self._echo()

    do_POST = do_GET

    def _echo(self) -> None:
        if self.headers["transfer-encoding"] == "chunked":
            body = self._chunks()
        else:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
        seen = {"headers": dict(self.headers), "length": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        self._answer(200, "application/json", json.dumps(seen).encode())

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 200
    num_connections = num_checks = 0
    check_s = 0.0

    def get_request(self) -> tuple[socket.socket, object]:
        accepted = super().get_request()
        self.num_connections += 1
        return accepted

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that was cut is what the tests want."""


class FakeReplica:
    """Listens on `port` until close(). `paths`: what was asked, in order; `num_connections`: accepted so far.

    check_s: how long it takes to answer a health check; `num_checks` have been answered
    """

    def __init__(self, check_s: float = 0.0) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.check_s = check_s
        self.paths: list[str] = []
        self._server.paths = self.paths  # type: ignore[attr-defined]
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        return self._server.num_connections

    @property
    def num_checks(self) -> int:
        return self._server.num_checks

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)
