"""What the HTTP API needs of a model that writes text; the endpoint's models implement it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.extend.serve import Caller, HttpRequest, Send
from shoal.libs.language.engine.request import TextRequest, TokenEvent, TokenIds


@dataclass(frozen=True)
class TextCall:
    """Who asks, and which version.

    version:       None leaves it to the rollout; of an adapter: its own
    sticky, track: as `InferCall` has them
    resume:        an idempotency key, "" for none
    last_version:      the version that wrote the last of the tokens that are given; it continues them where it can
    is_stream:     its events are wanted one by one; otherwise several may come together
    """

    caller: Caller
    version: int | None = None
    sticky: str = ""
    track: str = ""
    resume: str = ""
    last_version: int | None = None
    is_stream: bool = True


class TextModel(Protocol):
    """One model, or an adapter of it, of an endpoint.

    name:      by which requests ask for it, such as smollm or smollm:adapter
    created_s: seconds since 1970 of the answering version
    tokenizer: of transformers: encode, decode, apply_chat_template, chat_template
    context:   tokens of a prompt and its answer together
    """

    name: str
    created_s: float
    tokenizer: Any
    context: int

    def generate(self, request: TextRequest, call: TextCall) -> AsyncIterator[TokenEvent]:
        """Events of all answers as they come; closing the iterator cancels the request.

        Raises, before the first event, InferenceError (400 with the field's name, 429, 503, 504).
        """
        ...

    async def embed(self, prompts: Sequence[TokenIds], call: TextCall) -> tuple[list[np.ndarray], int]:
        """A vector per prompt (mean of the last hidden states, normalised), and the version that computed them."""
        ...


@runtime_checkable
class ChatContinuation(Protocol):
    """What a TextModel may have besides, such as that of a gateway which has recorded the tokens of a conversation: to
    render its messages again, and to divide them again, would give other tokens than the model has read and written."""

    def continue_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        fields: Mapping[str, Any],
    ) -> TokenIds | None:
        """The prompt's tokens, the begin of the answer's message included; None: as the chat template renders them.

        messages: of the chat API, each content a text and each call's arguments an object; what else a client sent with
        them is gone. tools: as the template takes them. fields: the template's own. It is called from any thread.
        """
        ...


class TextModels(Protocol):
    """The models of an endpoint that write text. `replica`: the name of the replica."""

    replica: str

    def list(self, caller: Caller) -> list[TextModel]: ...

    def get(self, name: str, caller: Caller) -> TextModel:
        """Raises InferenceError (403, 404)."""
        ...

    def is_peer(self, token: bytes) -> bool:
        """Whether a request comes from another replica, which shows this token."""
        ...

    async def load(self, name: str, request: HttpRequest, send: Send) -> None:
        """Have a model loaded, if it is not. Raises Relayed where another replica has answered, by `send`, and
        InferenceError (404, 503, 504)."""
        ...
