"""A gateway of sessions in a thread, by the wire format of docs/agents-protocol.md, which answers what a test says."""

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a-key-with-sessions"


class ScriptedGateway:
    """Its sessions, and what it was asked.

    first:      by "open", "chat" and "end": the errors, as (status, code), before it does what it is asked
    num_opened: after which the run is over
    write:      what the model writes, of the messages
    """

    def __init__(self, num_opened: int, write: Callable[[list[dict[str, Any]]], str]) -> None:
        self.num_opened, self.write = num_opened, write
        self.first: dict[str, deque[tuple[int, str]]] = defaultdict(deque)
        self.opened: dict[str, dict[str, Any]] = {}  # by the idempotency-key
        self.ends: dict[str, dict[str, Any]] = {}  # by the session's id
        self.keys: dict[str, list[str]] = defaultdict(list)  # the idempotency-keys of what was asked
        self.url = ""
        self.lock = threading.Lock()

    def open(self, key: str, body: dict[str, Any]) -> tuple[int, Any]:
        if key not in self.opened and len(self.opened) == self.num_opened:
            return 410, "run_over"
        session = self.opened.setdefault(key, {**body, "id": f"s{len(self.opened)}"})
        base_url, secret = f"{self.url}/s/{session['id']}/v1", f"shs_{session['id']}"
        env = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": secret}
        return 201, {"id": session["id"], "base_url": base_url, "key": secret, "env": env, "version": 1}

    def end(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        before = self.ends.setdefault(session, body)
        return (200, {"state": "ended"}) if before == body else (422, "end_differs")

    def chat(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        if session in self.ends:
            return 410, "session_over"
        text = self.write(body["messages"])
        reason = "length" if len(text) > body.get("max_tokens", 1000) else "stop"
        return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}

    def answer(self, path: str, token: str, key: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path.split("/")[1:]:
            case ["shoal", "v1", "sessions"]:
                kind, session = "open", ""
            case ["shoal", "v1", "sessions", session, "end"]:
                kind = "end"
            case ["s", session, "v1", "chat", "completions"]:
                kind = "chat"
            case _:
                return 404, "no such path"
        with self.lock:
            self.keys[kind].append(key)
            if self.first[kind]:
                return self.first[kind].popleft()
            if token != (f"Bearer shs_{session}" if kind == "chat" else f"Bearer {TOKEN}"):
                return 401, "bad_key"
            if kind != "chat":
                return self.open(key, body) if kind == "open" else self.end(session, body)
        return self.chat(session, body)


@contextmanager
def serve_sessions(
    num_opened: int = 1, write: Callable[[list[dict[str, Any]]], str] = lambda messages: "4"
) -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway(num_opened, write)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            key = self.headers.get("idempotency-key", "")
            status, content = gateway.answer(self.path, self.headers["authorization"], key, body)
            if status >= 400:
                content = {"error": {"message": content, "code": content}}
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(encoded)))
            if status in (429, 503):
                self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads, block_on_close = True, False

    with Server(("127.0.0.1", 0), Handler) as server:
        gateway.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield gateway
        finally:
            server.shutdown()
            thread.join()
