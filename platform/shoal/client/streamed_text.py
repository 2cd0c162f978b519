"""A text while a model writes it, here or at an endpoint: both give the server-sent events of OpenAI's API."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec

from shoal.errors import ConfigError, ConnectionLost, InferenceError

Messages = str | Sequence[Mapping[str, Any]]
PATHS = {"messages": "chat/completions", "prompt": "completions"}
_OURS = {"model", "messages", "prompt", "stream", "stream_options", "n"}


def build_body(model: str, given: str, value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request for one text. given: `messages`, of which a text is one of the user's, or `prompt`. Raises
    ConfigError."""
    if taken := sorted(_OURS & fields.keys()):
        raise ConfigError(taken[0], fields[taken[0]], "is not for one text", "ask once for each text")
    if given == "prompt" and not isinstance(value, str):
        raise ConfigError(given, value, "is no text", "ask once for each text")
    if given == "messages" and isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return {"model": model, given: value, "stream": True, "stream_options": {"include_usage": True}, **fields}


class StreamedText:
    """A text of `chat` or `generate`: iterate for its parts as they come, or `read()` it whole. `text` has what has
    come. With the end come `finish` ("stop", "length", "tool_calls"), `spans` ((version, number of tokens), ...),
    `tool_calls` as OpenAI's API has them, and the numbers of tokens.

    Iterating and `read` raise InferenceError and ConnectionLost.
    """

    def __init__(self, chunks: Generator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""
        self._is_over = False
        self.text = ""
        self.finish = ""
        self.spans = tuple[tuple[int, int], ...]()
        self.tool_calls: list[dict[str, Any]] = []
        self.num_prompt_tokens = self.num_new_tokens = 0

    def __repr__(self) -> str:
        return f"StreamedText({self.text!r}, finish={self.finish!r}, spans={self.spans})"

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks:
            *frames, self._rest = (self._rest + chunk).split(b"\n\n")
            for frame in frames:
                yield from self._take(frame.partition(b"data: ")[2])
        if not self._is_over:
            raise ConnectionLost("the connection ended before the text did")

    def read(self) -> Self:
        """Wait for the rest; returns itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Cancel the rest. Idempotent."""
        self._chunks.close()
        self._is_over = True

    def _take(self, data: bytes) -> Iterator[str]:
        if not data or data == b"[DONE]":
            self._is_over = bool(data)
            return
        event = msgspec.json.decode(data)
        if error := event.get("error"):
            raise InferenceError(error.get("status", 500), error["message"], field=error.get("param") or "")
        if usage := event.get("usage"):
            self.num_prompt_tokens, self.num_new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            part = delta.get("content") or delta.get("text") or ""
            self.text += part
            self.tool_calls += delta.get("tool_calls") or ()
            self.finish = choice.get("finish_reason") or self.finish
            self.spans = tuple((version, num) for version, num in choice.get("shoal", {}).get("spans", self.spans))
            if part:
                yield part
