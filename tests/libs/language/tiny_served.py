"""A tiny decoder behind the HTTP API, in this process."""

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tests.libs.language.tiny_language import copy_state, make_byte_tokenizer

from answering import run_app
from shoal.errors import ConfigError, InferenceError
from shoal.extend.serve import HttpRequest, Send
from shoal.libs.language.api.app import LanguageApp
from shoal.libs.language.engine import SlotEngine, TextRequest, TokenEvent
from shoal.libs.language.text_model import TextCall, TextModel
from shoal.models.decoder import Decoder
from shoal.serve.messages.inference import Caller
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.api_key import ApiKey

CONTEXT = 2048
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>"
    "<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make_tokenizer(template: str | None) -> Any:
    """Bytes, and three special tokens; the first ends an answer."""
    made = make_byte_tokenizer(eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "[TOOL_CALLS]"]})
    made.chat_template = template
    return made


class EngineModel:
    """A TextModel that steps its engine while anybody reads."""

    def __init__(self, name: str, template: str | None = CHATML) -> None:
        torch.manual_seed(0)
        self.name = name
        self.created_s = 1.0
        self.context = CONTEXT
        self.tokenizer = make_tokenizer(template)
        self.module = Decoder(num_tokens=len(self.tokenizer), context=CONTEXT, width=32, depth=1, heads=2).eval()
        self.engine = SlotEngine(self.module, 3, self.tokenizer, max_queued=32)  # no token ends an answer by chance
        self._events: defaultdict[int, list[TokenEvent]] = defaultdict(list)
        self.calls: list[TextCall] = []
        self.requests: list[TextRequest] = []
        self.switch_at = 0  # tokens after which version 4 has the same weights

    async def generate(self, request: TextRequest, call: TextCall) -> AsyncIterator[TokenEvent]:
        self.calls.append(call)
        self.requests.append(request)
        if call.version not in (None, 3):
            raise InferenceError(404, f"model {self.name!r} has no version {call.version}; it serves 3", field="model")
        try:
            number = await asyncio.to_thread(self.engine.submit, request)
        except ConfigError as error:
            raise InferenceError(400, str(error), field=error.field) from error
        running = request.num_answers
        try:
            while running:
                await self._step()
                for event in self._events.pop(number, []):
                    running -= event.finish is not None
                    yield event
        finally:
            self.engine.cancel(number)

    async def _step(self) -> None:
        await asyncio.sleep(0)
        for event in self.engine.step():
            self._events[event.request].append(event)
        if self.switch_at and self.engine.observe().new_tokens >= self.switch_at:
            self.switch_at = 0
            self.engine.set_weights(4, copy_state(self.module))

    async def embed(self, prompts: Sequence[tuple[int, ...]], call: TextCall) -> tuple[list[np.ndarray], int]:
        found = [np.bincount(prompt, minlength=8)[:8].astype("f4") + 1 for prompt in prompts]
        return [each / np.linalg.norm(each) for each in found], 3


class Models:
    """What an endpoint has: `tiny`, `plain` without tools in its template, and `bare` without a template."""

    replica = "r1"

    def __init__(self) -> None:
        self.tiny = EngineModel("tiny")
        self.plain = EngineModel("plain", PLAIN)
        self.bare = EngineModel("bare", None)

    def list(self, caller: Caller) -> list[TextModel]:
        return [each for each in (self.tiny, self.plain, self.bare) if caller.can_see(each.name)]

    def get(self, name: str, caller: Caller) -> TextModel:
        for each in self.list(caller):
            if each.name == name:
                return each
        raise InferenceError(404, f"there is no model {name!r}; this endpoint serves tiny, plain, bare")

    def is_peer(self, token: bytes) -> bool:
        return token == b"peer"

    async def load(self, name: str, request: HttpRequest, send: Send) -> None: ...


def make_tiny_app(models: Models, keys: Sequence[ApiKey] = (), limits: RequestLimits | None = None) -> LanguageApp:
    return LanguageApp(models, AccessControl("s3cret" if keys else None, keys), limits or RequestLimits())


@contextmanager
def serve_tiny(models: Models) -> Iterator[int]:
    """The port of a server of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener, run_app(make_tiny_app(models), listener):
        yield listener.getsockname()[1]


class Client:
    """Calls the application as a server would. `taken`: bytes of the body so far."""

    def __init__(self, app: LanguageApp, key: str = "") -> None:
        self._app, self.taken = app, b""
        self._head = [(b"authorization", f"Bearer {key}".encode())] if key else []

    def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers, and JSON or the frames of a stream."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.run(self.call("POST", path, raw, headers))

    async def call(
        self, method: str, path: str, raw: bytes = b"", headers: dict[str, str] | None = None, leave_at: int = 1 << 60
    ) -> tuple[int, dict[str, str], Any]:
        """leave_at: bytes of the answer after which the client is gone"""
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in (headers or {}).items()]
        messages = [{"type": "http.request", "body": raw, "more_body": False}]
        gone, head = asyncio.Event(), {}
        self.taken = b""

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            head.update(message if message["type"] == "http.response.start" else {})
            self.taken += message.get("body", b"")
            if len(self.taken) >= leave_at:
                gone.set()

        scope = {"type": "http", "method": method, "path": path, "headers": self._head + given}
        await self._app(scope, receive, send)  # type: ignore[arg-type]
        found = {name.decode(): value.decode() for name, value in head["headers"]}
        if found["content-type"] == "application/json":
            return head["status"], found, json.loads(self.taken)
        frames = [each.partition(b"data: ")[2] for each in self.taken.split(b"\n\n") if each]
        return head["status"], found, [each.decode() if each == b"[DONE]" else json.loads(each) for each in frames]
