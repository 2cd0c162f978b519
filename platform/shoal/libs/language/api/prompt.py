"""From a body to a TextRequest: chat templates, tokens, sampling, grammars. Runs in a thread for what is large.

Templates come with their models. transformers renders them in Jinja's sandbox, which gives them no attribute, file or
import of the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.errors import InferenceError, needs_extra, summarize_error
from shoal.libs.language.api.bodies import MAX_ANSWERS, MAX_PROMPTS, Fields, Json, field_error, read_text, require
from shoal.libs.language.api.tools import ToolUse
from shoal.libs.language.engine.request import GrammarKind, Sampling, TextRequest, TokenIds
from shoal.libs.language.text_model import ChatContinuation, TextModel

MAX_CHARS_PER_TOKEN = 64  # a longer text than the context's times this is refused before it is divided into tokens
Grammar = tuple[GrammarKind, Any]
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class Job:
    """What an API makes of a body: a request for each prompt, and how answers are read.

    names:     the API's names of the request's fields, for errors
    template:  that rendered the prompt, which has the form of tool calls
    """

    model: TextModel
    body: Any
    requests: Sequence[TextRequest]
    use: ToolUse = field(default_factory=ToolUse)
    template: str = ""
    names: Mapping[str, str] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(each.prompt) for each in self.requests)


def make_job(model: TextModel, body: Fields, prompts: Sequence[TokenIds], **more: Any) -> Job:
    """`more`: fields of the Job; the others of TextRequest. Raises InferenceError (400)."""
    if (num_answers := len(prompts) * body.n) > MAX_ANSWERS:
        raise InferenceError(400, f"n = {body.n}: {num_answers} answers, expected {MAX_ANSWERS} at most", field="n")
    if body.stream_options.include_usage and not body.stream:
        raise field_error("stream_options", "needs stream = true")
    names = {"num_answers": "n", "prompt": "prompt", "end_s": "deadline_s", **more.pop("names", {})}
    grammars: list[tuple[str, Grammar | None]] = [
        *more.pop("grammars", ()),
        ("grammar", body.grammar and ("lark", body.grammar)),  # type: ignore[list-item]
        ("regex", body.regex and ("regex", body.regex)),  # type: ignore[list-item]
        ("choice", None if body.choice is None else ("choice", body.choice)),
    ]
    given = [(name, grammar) for name, grammar in grammars if grammar]
    if len(given) > 1:
        raise InferenceError(400, f"{given[0][0]} and {given[1][0]} exclude each other", field=given[1][0])
    if given:
        names["grammar"] = given[0][0]
    fields = {name: more.pop(name) for name in list(more) if name in TextRequest.__dataclass_fields__}
    if fields.get("max_tokens") is not None:
        fields["max_tokens"] = min(fields["max_tokens"], model.context)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    request = TextRequest(
        prompt=(),
        sampling=_read_sampling(body),
        num_answers=body.n,
        swap=body.swap,
        priority=body.priority,
        begin_s=body.begin_s,
        end_s=body.deadline_s,
        given=tuple(token for _, tokens in body.given for token in tokens),
        grammar=given[0][1] if given else None,
        behaviour=body.return_token_ids,
        **{"stop": stop, **fields},
    )
    for prompt in prompts:
        check_length(model, prompt, names["prompt"])
    if body.given and len(prompts) * body.n > 1:
        raise field_error("given", "one answer alone can be continued")
    return Job(model, body, [replace(request, prompt=prompt) for prompt in prompts], names=names, **more)


def make_chat_job(
    model: TextModel, body: Fields, messages: Sequence[Json], use: ToolUse, name: str, **more: Any
) -> Job:
    """A job of a conversation; `name`: the API's field that has it. `more`: as `make_job` has it, and `continues` as
    `render_chat` has it. Raises InferenceError (400)."""
    read, continues = read_messages(messages, name), more.pop("continues", False)
    prompt, template = render_chat(model, read, use, name, continues=continues, own=body.chat_template_kwargs)
    special = {each: model.tokenizer.convert_tokens_to_ids(each) for each in model.tokenizer.all_special_tokens}
    lark = use.make_grammar(template, special)
    more["grammars"] = [*more.pop("grammars", ()), ("tool_choice", lark and ("lark", lark))]
    more["names"] = {"prompt": name, **more.pop("names", {})}
    return make_job(model, body, [prompt], use=use, template=template, **more)


def _read_sampling(body: Fields) -> Sampling:
    bias = {}
    for token, value in body.logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InferenceError(400, f"logit_bias.{token[:40]}: expected a token's number", field="logit_bias")
        bias[int(token)] = value
    names = Sampling.__dataclass_fields__.keys() - {"logit_bias"}
    return Sampling(logit_bias=bias, **{name: getattr(body, name) for name in names} | {"top_k": max(body.top_k, 0)})


def check_length(model: TextModel, prompt: TokenIds, name: str) -> None:
    """Raises InferenceError (400)."""
    if not prompt:
        raise field_error(name, "has no token")
    if len(prompt) >= model.context:
        problem = f"has {len(prompt)} tokens, and an answer needs room in the context length of {model.context}"
        raise field_error(name, problem)


def encode(model: TextModel, text: str, name: str, **options: Any) -> TokenIds:
    """The tokens of a text. Raises InferenceError (400)."""
    if len(text) > MAX_CHARS_PER_TOKEN * model.context:
        problem = f"has {len(text)} characters, too many for the context length of {model.context} tokens"
        raise field_error(name, problem)
    return tuple(model.tokenizer.encode(text, **options))


def encode_prompts(model: TextModel, given: str | list[Any], name: str, **options: Any) -> list[TokenIds]:
    """A text, texts, tokens, or lists of tokens. options: of the tokenizer. Raises InferenceError (400)."""
    if isinstance(given, str) or (given and all(type(each) is int for each in given)):
        given = [given]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise field_error(name, f"expected 1 to {MAX_PROMPTS} texts, got {len(given)}")
    prompts = []
    for number, each in enumerate(given):
        if isinstance(each, str):
            prompts.append(encode(model, each, name, **options))
        elif isinstance(each, list) and all(type(token) is int and 0 <= token < 2**31 for token in each):
            prompts.append(tuple(each))
        else:
            raise InferenceError(400, f"{name}[{number}]: expected a text, or tokens", field=name)
    return prompts


def render_chat(
    model: TextModel, messages: Sequence[Json], use: ToolUse, name: str, *, continues: bool, own: Any
) -> tuple[TokenIds, str]:
    """The tokens of a conversation, and the template that made them.

    continues: the answer continues the last message; own: fields of the template's own
    A model that is a `ChatContinuation` may know the tokens better. Raises InferenceError (400).
    """
    tokenizer, tools = model.tokenizer, use.describe()
    if not tokenizer.chat_template:
        raise InferenceError(400, f"model {model.name!r} has no chat template: use /v1/completions", field="model")
    template: str = tokenizer.get_chat_template(None, tools)
    if tools and not _TOOLS.search(template):
        raise field_error("tools", f"the chat template of model {model.name!r} has none: register it with one that has")
    size = sum(len(each["content"]) for each in messages)
    if size > MAX_CHARS_PER_TOKEN * model.context:
        encode(model, " " * size, name)  # raises
    if isinstance(model, ChatContinuation) and not continues:
        known = model.continue_chat(messages, tools, own)
        if known is not None:
            return known, template
    with needs_extra("language"):
        from jinja2 import TemplateError
    how = {"tokenize": False, "continue_final_message" if continues else "add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, **how, **own)
    except (TemplateError, TypeError, ValueError) as error:
        problem = f"the chat template of model {model.name!r} refuses them: {summarize_error(error)}"
        raise field_error(name, problem) from error
    return encode(model, text, name, add_special_tokens=False), template


def read_messages(messages: Sequence[Json], name: str) -> list[Json]:
    """Messages of the chat API as templates take them: texts as strings, arguments as objects. Raises InferenceError
    (400)."""
    results = []
    for number, message in enumerate(messages):
        path = f"{name}[{number}]"
        role = require(message, "role", str, path)
        if role not in (roles := ("system", "developer", "user", "assistant", "tool")):
            raise field_error(f"{path}.role", f"{role[:40]!r} is unknown: expected {', '.join(roles)}")
        each: Json = {"role": "system" if role == "developer" else role}
        each["content"] = read_text(message.get("content"), f"{path}.content", role)
        each |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise field_error(f"{path}.tool_calls", "expected a list")
        if calls:
            each["tool_calls"] = [_read_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
        results.append(each)
    return results


def _read_call(call: Any, path: str) -> Json:
    function = require(call if isinstance(call, dict) else {}, "function", dict, path)
    text = require(function, "arguments", str, f"{path}.function")
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        where = f"{path}.function.arguments"
        raise field_error(where, "expected a JSON object as text")
    name = require(function, "name", str, f"{path}.function")
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


def read_format(given: Json, name: str) -> tuple[str, Grammar | None]:
    """The grammar of a response_format (or `text.format`), by the name of its field. Raises InferenceError (400)."""
    match given.get("type", "text"):
        case "text":
            return name, None
        case "json_object":
            return name, ("json_schema", {"type": "object"})
        case "json_schema":
            inner = given.get("json_schema", given)
            return name, ("json_schema", require(inner if isinstance(inner, dict) else {}, "schema", dict, name))
    problem = f"expected text, json_object or json_schema, got {str(given.get('type'))[:40]!r}"
    raise field_error(f"{name}.type", problem)
