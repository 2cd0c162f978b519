"""What a chat template writes behind an answer, so that the answer's own tokens stay as they were sampled.

Called by the tree of turns, and by whoever opens a model for training. Messages are those that the language API's
`read_messages` returns: texts are strings, the arguments of calls are objects. Tools are those of the chat API.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from shoal.errors import ConfigError, InferenceError, needs_extra, summarize_error

Json = dict[str, Any]
PROMPT: Json = {"add_generation_prompt": True}
# Letters and digits: templates trim and escape contents. A client cannot know it.
_MARKER = f"answer{secrets.token_hex(16)}"
_NUM_ENCODED = 64  # prompts that are remembered: those of the groups that begin
_TOOLS = re.compile(r"\btools\b")


def render(
    tokenizer: Any,
    messages: Sequence[Json],
    tools: list[Json] | None,
    end: Json = PROMPT,
    template_fields: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation.

    end:             how it ends: PROMPT with the begin of an answer, {} with the last message
    template_fields: what the request has for the template alone

    Raises InferenceError (400) for messages, tools or fields that the template does not take.
    """
    with needs_extra("language"):
        from jinja2 import TemplateError
    try:
        template = tokenizer.get_chat_template(None, tools)
        if tools and not _TOOLS.search(template):
            raise InferenceError(400, "tools: the chat template of the model has none", field="tools")
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, **end, **(template_fields or {})
        )
    except (TemplateError, TypeError, ValueError) as error:
        problem = f"messages: the chat template of the model refuses them: {summarize_error(error)}"
        raise InferenceError(400, problem, field="messages") from error
    return text


@lru_cache(_NUM_ENCODED)
def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of a rendered text, which has its special tokens. The sessions of a group have the same prompt."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def render_behind(tokenizer: Any, messages: Sequence[Json], number: int, *options: Any) -> str:
    """The text behind the answer that is `messages[number]`: its end token, the later messages, and the `end`.

    options: those of `render`, from the tools on
    "" where the template does not show an answer of plain text. Raises InferenceError (400) as `render` does.
    """
    marked = [*messages[:number], {"role": "assistant", "content": _MARKER}, *messages[number + 1 :]]
    _, marker, behind = render(tokenizer, marked, *options).rpartition(_MARKER)
    return behind if marker else ""


def check_template(tokenizer: Any) -> None:
    """Check that a template only appends: what the model has read, and what was sampled, stay as they were.

    Small conversations are rendered: plain ones, and those with thinking, a system message and, where the template has
    tools, calls. Raises ConfigError that names the problem.
    """
    remedy = "agents are trained with templates that only append: give the tokenizer one"
    if not tokenizer.chat_template:
        raise ConfigError("chat_template", None, "the tokenizer has none", remedy)
    for subject, messages, tools in _list_conversations():
        template = tokenizer.get_chat_template(None, tools)
        if tools and not _TOOLS.search(template):
            continue
        try:
            problem = _find_problem(tokenizer, messages, tools)
        except InferenceError as error:
            if messages[0]["role"] == "system":  # clients that send one are refused, too
                continue
            problem = error.message
        if problem:
            begin = f"{template[:40]}..."
            raise ConfigError("chat_template", begin, f"in a conversation with {subject}, {problem}", remedy)


_THOUGHT = "The reef has many corals."
_TOOL = {"name": "count", "description": "Counts.", "parameters": {"type": "object", "properties": {}}}


def _list_conversations() -> Iterator[tuple[str, list[Json], list[Json] | None]]:
    """Each with its subject, and its tools. The last message of each is a user's."""
    question, answer = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven."}
    call = {"id": "call00001", "type": "function", "function": {"name": "count", "arguments": {"what": "corals"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "7", "tool_call_id": "call00001", "name": "count"}
    thinking = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nSeven."}
    yield "thinking", [question, thinking, question, thinking, question], None
    yield "plain answers", [question, answer, question, answer, question], None
    yield "a system message", [{"role": "system", "content": "Be brief."}, question, answer, question], None
    tools = [{"type": "function", "function": _TOOL}]
    yield "tool calls", [question, calling, result, answer, question, calling, result, answer, question], tools


def _find_problem(tokenizer: Any, messages: list[Json], tools: list[Json] | None) -> str:
    """What a template does to earlier messages, or behind an answer; "" if it only appends."""
    text = render(tokenizer, messages, tools)
    if text.count(_THOUGHT) < sum(_THOUGHT in each["content"] for each in messages):
        return "it drops the thinking of earlier answers"
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        until = render(tokenizer, messages[: number + 1], tools, {})
        if not text.startswith(until):
            return "it writes earlier messages in another form once there are later ones"
        behind = render_behind(tokenizer, messages, number, tools)
        if not behind:
            return "it does not show the text of an answer"
        if encode(tokenizer, behind)[0] not in tokenizer.added_tokens_decoder:
            return f"it ends an answer by {behind[:16]!r}, which does not begin with a special token"
        if not text.endswith(behind) or len(until) + len(behind) < len(text):
            return "what it writes behind an answer depends on the answer"
    return ""
