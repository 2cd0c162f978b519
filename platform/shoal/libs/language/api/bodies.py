"""Bodies of requests: what each field may be, and which unknown ones change nothing. Pure; raises InferenceError."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from shoal.errors import InferenceError, suggest

T = TypeVar("T")
Json = dict[str, Any]  # an object
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PROMPTS = 128
MAX_ANSWERS = 128
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_ANY = object()
# Fields of the stock clients without effect here, and the values for which that is so.
HARMLESS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("user", "metadata", "safety_identifier", "service_tier"), (_ANY,)),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "cache_control", "inference_geo"), (_ANY,)),
    **dict.fromkeys(("store", "background", "echo"), (False,)),
    "best_of": (1,),
    "min_tokens": (0,),
    "suffix": ("",),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "include": ([],),
    "thinking": ({"type": "disabled"},),
    "reasoning_effort": ("none",),
}
REASONS = {
    "store": "responses are not stored: send store=false, and the earlier messages as input",
    "previous_response_id": "responses are not stored: send the earlier messages as input",
    "conversation": "conversations are not stored: send the earlier messages as input",
}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # changes nothing


class Fields(Struct, kw_only=True):
    """What every text may have. Ranges are checked by the engine, which knows its model.

    given: of an answer that was cut, what has come: versions, each with the tokens that it wrote
    return_token_ids: give the tokens that the model has read and written, and how likely each was
    top_k: -1 as vLLM has it, too
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: Seed | None = None
    stop: str | list[str] = []
    n: Count = 1
    grammar: str | None = None  # in Lark
    regex: str | None = None
    choice: list[str] | None = None
    swap: Literal["continue", "finish", "refuse"] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    begin_s: float | None = None
    deadline_s: float | None = None
    given: list[tuple[Version, list[Token]]] = []
    chat_template_kwargs: Json = {}
    return_token_ids: bool = False


Messages = Annotated[list[Json], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Json], Meta(max_length=MAX_TOOLS)]


class ChatBody(Fields, kw_only=True):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: Json = {}
    tools: Tools = []
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True


class CompletionBody(Fields, kw_only=True):
    prompt: str | list[Any]
    add_special_tokens: bool = True
    max_tokens: Count = 16
    logprobs: bool | int | None = None  # true, as gateways send it for a chat: 1
    response_format: Json = {}


class ResponseBody(Fields, kw_only=True):
    input: str | Messages
    instructions: str = ""
    max_output_tokens: Count | None = None
    text: Json = {}
    tools: Tools = []
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True


class MessageBody(Fields, kw_only=True):
    messages: Messages
    max_tokens: Count
    system: str | list[Json] = ""
    stop_sequences: list[str] = []
    tools: Tools = []
    tool_choice: Json = {}


class CountBody(MessageBody, kw_only=True):
    max_tokens: Count = 1


class EmbeddingBody(Struct, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"


def field_error(field: str, problem: str) -> InferenceError:
    """The error of a field."""
    return InferenceError(400, f"{field}: {problem}", field=field)


def read_fields(raw: bytes, kind: type[T]) -> T:
    """Raises InferenceError (400) that names the field. A field that is null counts as absent, as in OpenAI's API."""
    try:
        body = msgspec.json.decode(raw)
        if not isinstance(body, dict):
            raise InferenceError(400, "the body is not a JSON object")
        if isinstance(body.get("extra_body"), dict):  # the stock client's argument, which gateways of others send on
            body = body.pop("extra_body") | body
        fields = {name: value for name, value in body.items() if value is not None}
        for name in fields.keys() - set(kind.__struct_fields__):  # type: ignore[attr-defined]
            _check_unknown(name, fields.pop(name), kind)
        return msgspec.convert(fields, kind)
    except RecursionError:
        raise InferenceError(400, "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        missing = re.search("required field `(.*)`", problem)
        path = ".".join(filter(None, (path.strip(".`"), missing[1] if missing else "")))
        problem = "is null" if missing and path in body else problem
        raise InferenceError(400, f"{path}: {problem}" if path else problem, field=path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InferenceError(400, f"the body is not JSON: {error}") from None


def _check_unknown(name: str, value: object, kind: type) -> None:
    allowed = HARMLESS.get(name, ())
    if _ANY in allowed or any(value == each and type(value) is type(each) for each in allowed):
        return
    shown = f"{name[:80]} = {json.dumps(value)[:40]}" if allowed else name[:80]
    reason = REASONS.get(name, "would change the answer, and is not offered here")
    known = () if name in {**HARMLESS, **REASONS} else kind.__struct_fields__  # type: ignore[attr-defined]
    problem = f"{shown}: {reason}. {suggest(name[:80], known)}"
    raise InferenceError(400, problem.removesuffix(". "), field=name[:80])


def read_text(content: object, path: str, role: object = "") -> str:
    """The text of a message: a string, or parts of text. Raises InferenceError (400) for other parts, and for none of
    the role `user`."""
    if content is None and role == "user":
        raise field_error(path, "is missing, or null")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            shown = f"{path}[{number}]"
            raise field_error(shown, f"expected text, got {str(kind)[:40]!r}")
        texts.append(part["text"])
    return "".join(texts)


def require(value: Json, name: str, kind: type[T], path: str) -> T:
    """A field of an object. Raises InferenceError (400)."""
    result = value.get(name)
    if not isinstance(result, kind):
        path = f"{path}.{name}"
        raise field_error(path, f"expected {kind.__name__}, got {str(result)[:40]!r}")
    return result
