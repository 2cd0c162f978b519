"""A text that a model writes, read while it comes: from an endpoint, or from a model of this process.

Both give the server-sent events of OpenAI's API (`docs/generation-api.md`), which are read here. Knows no transport.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from shoal.errors import ConfigError, ConnectionLost, InferenceError

Messages = str | Sequence[Mapping[str, Any]]
PATHS = {"messages": "chat/completions", "prompt": "completions"}
_OURS = {"model", "messages", "prompt", "stream", "stream_options", "n"}


def build_body(model: str, given: str, value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request for one streamed text. given: `messages`, where a text is one of the user's, or `prompt`.

    Raises ConfigError.
    """
    if taken := sorted(_OURS & fields.keys()):
        raise ConfigError(taken[0], fields[taken[0]], "is not for one text", "ask once for each text")
    if given == "messages" and isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return {"model": model, given: value, "stream": True, "stream_options": {"include_usage": True}, **fields}


class _Text:
    """What has come so far.

    text:       all of it
    finish:     "stop", "length", "tool_calls"; "" before the end
    spans:      (version, number of tokens) in order; () before the end
    tool_calls: as OpenAI's API has them
    num_prompt_tokens, num_new_tokens: 0 before the end
    """

    def __init__(self) -> None:
        self.text, self.finish, self.spans = "", "", tuple[tuple[int, int], ...]()
        self.tool_calls: list[dict[str, Any]] = []
        self.num_prompt_tokens = self.num_new_tokens = 0
        self._rest, self._is_over = b"", False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, finish={self.finish!r}, spans={self.spans})"

    def _take(self, chunk: bytes) -> str:
        """Read a part of the body; returns the text in it. Raises InferenceError, which the stream may end with."""
        *frames, self._rest = (self._rest + chunk).split(b"\n\n")
        before = len(self.text)
        for frame in frames:
            data = frame.partition(b"data: ")[2]
            if data == b"[DONE]":
                self._is_over = True
            elif data:
                self._take_event(msgspec.json.decode(data))
        return self.text[before:]

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            raise InferenceError(error.get("status", 500), error["message"], field=error.get("param") or "")
        if usage := event.get("usage"):
            self.num_prompt_tokens, self.num_new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            self.text += delta.get("content") or delta.get("text") or ""
            self.tool_calls += delta.get("tool_calls") or ()
            self.finish = choice.get("finish_reason") or self.finish
            self.spans = tuple((version, num) for version, num in choice.get("shoal", {}).get("spans", self.spans))

    def _require_end(self) -> None:
        if not self._is_over:
            raise ConnectionLost("the connection ended before the text did")


class StreamedText(_Text):
    """A text of `chat` or `generate`: iterate for its parts as they come, or `read()` it whole.

        for part in client.chat("smollm", "Hello!"):
            print(part, end="", flush=True)
        text = client.chat("smollm", "Hello!").read()
        text.text, text.spans

    Closing it, also by the end of a `with`, cancels what has not come. Iterating and `read` raise InferenceError and
    ConnectionLost.
    """

    def __init__(self, chunks: Generator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        for chunk in self._chunks:
            if part := self._take(chunk):
                return part
        self._require_end()
        raise StopIteration

    def read(self) -> Self:
        """Wait for the rest; returns itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Cancel the rest. Idempotent."""
        self._chunks.close()
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class AsyncStreamedText(_Text):
    """`StreamedText` for an event loop: `async for`, `await read()`, `await close()`."""

    def __init__(self, chunks: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        async for chunk in self._chunks:
            if part := self._take(chunk):
                return part
        self._require_end()
        raise StopAsyncIteration

    async def read(self) -> Self:
        """See `StreamedText.read`."""
        async for _ in self:
            pass
        return self

    async def close(self) -> None:
        """See `StreamedText.close`."""
        await self._chunks.aclose()
        self._is_over = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
