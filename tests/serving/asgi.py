"""Calls an ASGI application as a server would: no socket. `from serving.asgi import Client`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.fake_host import FakeHost
from shoal.serve.http.app import RestApp
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.api_key import ApiKey


@dataclass
class Reply:
    """An answer. Its Content-Length has been compared with its body."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.content)

    @property
    def error(self) -> str:
        """Of the protocol; fails when this is none."""
        assert list(self.body) == ["error"], self.content
        return str(self.body["error"])

    @property
    def tensors(self) -> tuple[Any, bytes]:
        """The JSON object and the bytes behind it, of an answer with binary tensors."""
        assert self.headers["content-type"] == "application/octet-stream"
        length = int(self.headers["inference-header-content-length"])
        return json.loads(self.content[:length]), self.content[length:]


@dataclass
class Client:
    """`then`: what ASGI's receive says after the body; it waits for ever when there is nothing more to say."""

    app: RestApp
    root_path: str = ""
    unread: list[dict[str, Any]] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)

    def request(
        self,
        method: str,
        path: str,
        chunks: Sequence[bytes] = (b"",),
        headers: dict[str, str] | None = None,
        *,
        claim_length: bool = True,
    ) -> Reply:
        return asyncio.run(self.call(method, path, chunks, headers, claim_length=claim_length))

    def get(self, path: str, **more: Any) -> Reply:
        return self.request("GET", path, **more)

    def post(self, path: str, content: object = b"", **more: Any) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.request("POST", path, [body], **more)

    def infer(self, content: object, path: str = "/v2/models/m/infer", **more: Any) -> Reply:
        return self.post(path, content, **more)

    def binary(self, header: object, rest: bytes, path: str = "/v2/models/m/infer", **headers: str) -> Reply:
        head = json.dumps(header).encode()
        return self.post(path, head + rest, headers={"Inference-Header-Content-Length": str(len(head)), **headers})

    async def call(
        self,
        method: str,
        path: str,
        chunks: Sequence[bytes] = (b"",),
        headers: dict[str, str] | None = None,
        *,
        claim_length: bool = True,
        then: asyncio.Future[None] | None = None,
    ) -> Reply:
        all_headers = {name.lower(): value for name, value in (headers or {}).items()}
        if claim_length:
            all_headers.setdefault("content-length", str(sum(map(len, chunks))))
        scope = {
            "type": "http",
            "method": method,
            "path": self.root_path + path,
            "root_path": self.root_path,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in all_headers.items()],
        }
        self.unread = [
            {"type": "http.request", "body": chunk, "more_body": number + 1 < len(chunks)}
            for number, chunk in enumerate(chunks)
        ]
        self.sent = []

        async def receive() -> Any:
            if self.unread:
                return self.unread.pop(0)
            await (asyncio.get_running_loop().create_future() if then is None else then)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.app(scope, receive, send)
        return self._reply()

    def _reply(self) -> Reply:
        start, *bodies = self.sent
        assert [message.get("more_body", False) for message in bodies] == [True] * (len(bodies) - 1) + [False]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        content = b"".join(message["body"] for message in bodies)
        assert headers["content-length"] == str(len(content))
        return Reply(start["status"], headers, content)


def client(
    host: FakeHost | None = None, *, token: str | None = None, keys: Sequence[ApiKey] = (), **settings: Any
) -> Client:
    """A client of the models of `host`; `settings` are RestApp's, or of its Limits."""
    limits = {name: settings.pop(name) for name in list(settings) if name in RequestLimits.__dataclass_fields__}
    return Client(RestApp(host or FakeHost(), AccessControl(token, keys), limits=RequestLimits(**limits), **settings))


def refused(reply: Reply, status: int, *words: str) -> None:
    """The reply is the protocol's error, with this status, and says all `words`."""
    assert reply.status == status, reply.content
    for word in words:
        assert word in reply.error, (word, reply.body)
