"""Tool calls in a model's own form: how its chat template has them, a grammar that compels one, and their parsing.

| form    | found by a template with | text of a call                                                        |
|---------|--------------------------|-----------------------------------------------------------------------|
| Hermes  | `<tool_call>`            | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated  |
| Mistral | `[TOOL_CALLS]`           | `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`                |
| JSON    | neither (Llama 3)        | `{"name": ..., "parameters": {...}}`, first in the answer             |
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.errors import InferenceError, suggest
from shoal.libs.language.api.bodies import Json, require

Choice = Literal["none", "auto", "required"]
_HERMES = "<tool_call>"
_HERMES_END = "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_PYTHON = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s,;\[\]]*")


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text, as OpenAI's API has it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request: functions as OpenAI's chat API has them, and whether one must be called.

    named: the only one that may be called; "" for any
    """

    functions: Sequence[Json] = ()
    choice: Choice = "auto"
    named: str = ""
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [each["name"] for each in self.functions]

    def describe(self) -> list[Json] | None:
        """What a chat template takes; None for no tools."""
        if not self.functions or self.choice == "none":
            return None
        return [{"type": "function", "function": each} for each in self.functions]

    def make_reader(self, template: str) -> ToolCallReader | None:
        return None if self.describe() is None else ToolCallReader(template, self)

    def make_grammar(self, template: str, special_ids: dict[str, int]) -> str | None:
        """A Lark grammar of one call; None where none is compelled. `special_ids`: by special token."""
        if self.choice != "required":
            return None
        mark = _find_mark(template)
        begin, key, end = {
            _HERMES: ([_HERMES, "\n"], "arguments", ["\n", _HERMES_END]),
            _MISTRAL: ([_MISTRAL, "["], "arguments", ["]"]),
        }.get(mark, ([], "parameters", []))
        write = [f"<[{special_ids[each]}]>" if each in special_ids else json.dumps(each) for each in (*begin, *end)]
        lines, calls = [], []
        for number, each in enumerate(self.functions):
            if self.named in ("", each["name"]):
                head = json.dumps(f'{{"name": {json.dumps(each["name"])}, "{key}": ')
                lines.append(f'call_{number}: {head} arguments_{number} "}}"')
                lines.append(f"arguments_{number}: %json {json.dumps(each.get('parameters') or {'type': 'object'})}")
                calls.append(f"call_{number}")
        start = " ".join([*write[: len(begin)], "call", *write[len(begin) :]])
        return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *lines])


def read_tool_use(functions: Sequence[Json], choice: str | Json, parallel: bool) -> ToolUse:
    """From functions of the chat API, and its tool_choice. Raises InferenceError (400)."""
    for number, each in enumerate(functions):
        require(each, "name", str, f"tools[{number}]")
        if not isinstance(each.get("parameters") or {}, dict):
            raise InferenceError(400, f"tools[{number}].parameters: expected an object", field="tools")
    names = [each["name"] for each in functions]
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            problem = f"tool_choice = {choice[:40]!r}: expected none, auto, required or a function"
            raise InferenceError(400, problem, field="tool_choice")
        if choice == "required" and not names:
            raise InferenceError(400, "tool_choice = 'required': there are no tools", field="tool_choice")
        return ToolUse(functions, choice, "", parallel)  # type: ignore[arg-type]
    named = require(choice.get("function", choice), "name", str, "tool_choice")
    if named not in names:
        problem = f"tool_choice = {named[:80]!r}: is not among the tools. {suggest(named[:80], names)}".rstrip(". ")
        raise InferenceError(400, problem, field="tool_choice")
    return ToolUse(functions, "required", named, False)


@dataclass
class ToolCallReader:
    """Divides the text of one answer into what is shown and the calls. What may begin a call is retained."""

    template: str
    use: ToolUse
    _retained: str = ""
    _is_call: bool = False
    _has_text: bool = False
    _mark: str = field(init=False)
    is_truncated: bool = False

    def __post_init__(self) -> None:
        self._mark = _find_mark(self.template)

    def push(self, text: str) -> str:
        """Add text; returns what is no call for certain."""
        self._retained += text
        if self._is_call:
            return ""
        if not self._mark:
            begin = self._retained.lstrip()
            self._is_call = not self._has_text and begin.startswith((_PYTHON, "{"))
            if self._is_call or (not self._has_text and _PYTHON.startswith(begin)):
                return ""
            self._has_text = True
            text = self._retained
            self._retained = ""
            return text
        mark_at = self._retained.find(self._mark)
        self._is_call = mark_at >= 0
        if mark_at < 0:
            most = range(min(len(self._mark) - 1, len(self._retained)), 0, -1)
            num_retained = next((size for size in most if self._mark.startswith(self._retained[-size:])), 0)
            mark_at = len(self._retained) - num_retained
        text, self._retained = self._retained[:mark_at], self._retained[mark_at:]
        return text

    def finish(self, is_truncated: bool = False) -> tuple[str, list[ToolCall]]:
        """The rest: text, or calls. What is no sound call of a known tool is text, but the begin of one if the answer
        `is_truncated`: that is shown to nobody."""
        rest, self._retained = self._retained, ""
        calls, is_whole = self._parse(rest) if self._is_call else ([], len(rest.strip()) < 3)  # `<t` is no mark yet
        self.is_truncated = is_truncated and not is_whole and self._begins_call(rest)
        if self.is_truncated or (calls and is_whole):
            return "", calls[: None if self.use.parallel else 1]
        return rest, []

    def _begins_call(self, text: str) -> bool:
        """Whether a text that was cut is the begin of a call of a known tool; after a mark it is one of any."""
        begin = "".join(text.strip().removeprefix(_PYTHON).split())
        heads = ['{"name":' + "".join(json.dumps(each).split()) for each in self.use.names]
        is_marked = self._mark or not self._is_call
        return bool(is_marked) or any(begin[: len(head)] == head[: len(begin)] for head in heads)

    def _parse(self, text: str) -> tuple[list[ToolCall], bool]:
        """The calls up to the first that is not sound, and whether all are."""
        if self._mark == _HERMES:
            parts = [part.partition(_HERMES_END)[0] for part in text.split(_HERMES)[1:]]
        else:
            parts = [text.strip().removeprefix(self._mark or _PYTHON)]
        calls: list[ToolCall] = []
        decoder = json.JSONDecoder()
        for part in parts:
            position = 0
            while (position := _SEPARATORS.match(part, position).end()) < len(part):  # type: ignore[union-attr]
                try:
                    value, position = decoder.raw_decode(part, position)
                except (ValueError, RecursionError):
                    return calls, False
                call = _read_call(value, self.use.names)
                if call is None:
                    return calls, False
                calls.append(call)
        return calls, True


def _read_call(value: Any, names: Sequence[str]) -> ToolCall | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _find_mark(template: str) -> str:
    return next((mark for mark in (_HERMES, _MISTRAL) if mark in template), "")
