"""AWS Lambda's Runtime API on loopback, for the test of an exported folder, and the client of AWS that calls it.

The client is `awslambdaric`, which runs handlers within Lambda too. It fetches each event from the API, and posts the
handler's result or error (https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html).
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shoal.libs.export.runtime.model import DESCRIPTION_FILE
from shoal.libs.export.runtime.self_test import Ask

PREFIX = "/2018-06-01/runtime"
TIMEOUT_S = 120.0
POLL_S = 0.2  # how often a process that may have ended is polled


class RuntimeApi(ThreadingHTTPServer):
    """Hands out events, and receives (whether it is an answer, the content)."""

    daemon_threads = True

    def __init__(self) -> None:
        self.events: queue.Queue[bytes] = queue.Queue()
        self.results: queue.Queue[tuple[bool, Any]] = queue.Queue()
        super().__init__(("127.0.0.1", 0), _ApiHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the end of the client, which waits for an event."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _ApiHandler(BaseHTTPRequestHandler):
    server: RuntimeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Wait for an event: GET .../invocation/next."""
        event = self.server.events.get()
        self._answer(200, event, "lambda-runtime-aws-request-id: 1", "lambda-runtime-deadline-ms: 9999999999999")

    def do_POST(self) -> None:
        """Receive .../invocation/1/response, .../invocation/1/error or .../init/error."""
        content = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.results.put((self.path.endswith("/response"), content))
        self._answer(202, b"{}")

    def _answer(self, status: int, content: bytes, *headers: str) -> None:
        self.send_response(status)
        for header in ("content-type: application/json", f"content-length: {len(content)}", *headers):
            self.send_header(*header.split(": "))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


@contextmanager
def start_function(folder: Path) -> Iterator[Ask]:
    """Start `lambda_function.py` in AWS's client. Each body is sent as an event of a function URL, and plainly."""
    api = RuntimeApi()
    threading.Thread(target=api.serve_forever, daemon=True).start()
    environment = os.environ | {"AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{api.server_port}"}
    command = [sys.executable, "-m", "awslambdaric", "lambda_function.handler"]
    with api, subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            name = json.loads((folder / DESCRIPTION_FILE).read_bytes())["name"]

            def ask(content: Any) -> tuple[int, dict[str, Any]]:
                is_answer, result = _invoke(api, process, make_event(f"/v2/models/{name}/infer", content))
                assert is_answer, result
                answer = json.loads(result["body"])
                is_answer, plain = _invoke(api, process, content)
                assert is_answer == (result["statusCode"] == 200), plain
                assert plain == answer if is_answer else plain["errorMessage"] == answer["error"], plain
                return result["statusCode"], answer

            yield ask
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)
            api.shutdown()


def make_event(path: str, content: Any) -> dict[str, Any]:
    """Make the event of a POST to a function URL, payload format 2.0."""
    return {
        "version": "2.0",
        "rawPath": path,
        "headers": {"content-type": "application/json"},
        "requestContext": {"http": {"method": "POST", "path": path}, "stage": "$default"},
        "body": json.dumps(content),
        "isBase64Encoded": False,
    }


def _invoke(api: RuntimeApi, process: subprocess.Popen[bytes], event: Any) -> tuple[bool, Any]:
    api.events.put(json.dumps(event).encode())
    ends_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends_s:
        try:
            return api.results.get(timeout=POLL_S)
        except queue.Empty:
            assert process.poll() is None, f"awslambdaric has ended with status {process.returncode}"
    raise AssertionError(f"no result within {TIMEOUT_S:g} s")
