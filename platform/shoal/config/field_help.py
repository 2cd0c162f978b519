"""The fields of a spec for people: a line each with path, present value, type, bounds and meaning.

Called for `--help` of jobs. The meaning is the field's `description`, or its line `name: ...` in the docstring.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr

from shoal.config import Spec
from shoal.config.field_types import find_spec_type

_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", SecretStr: "text"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_MEANING = re.compile(r"^(\w+(?:, \w+)*):\s+(.*)$", re.MULTILINE)
_MAX_VALUE_CHARS = 28


@dataclass(frozen=True)
class FieldHelp:
    """value: as an override sets it; type: in English; meaning: may be empty"""

    path: str
    value: str
    type: str
    meaning: str


def list_field_help(spec: BaseModel, prefix: str = "") -> Iterator[FieldHelp]:
    """Those of a spec and of its nested specs, of the kinds that it has now."""
    meanings = _collect_meanings(type(spec))
    for name, field in type(spec).model_fields.items():
        value, path = getattr(spec, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from list_field_help(value, f"{path}.")
            continue
        bounds = [
            f"{sign} {getattr(each, key)}"
            for each in field.metadata
            for key, sign in _BOUNDS.items()
            if hasattr(each, key)
        ]
        is_tag = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        kinds = spec.list_kinds() if is_tag and isinstance(spec, Spec) else ()
        described = ", ".join([" | ".join(kinds) or format_type(field.annotation), *bounds])
        yield FieldHelp(path, format_value(value), described, field.description or meanings.get(name, ""))


def choose_main(fields: Iterable[FieldHelp], paths: Collection[str]) -> list[FieldHelp]:
    """Of the fields, those at `paths`, and of a spec there all of its fields; in the order of `paths`; (): all."""
    listed = list(fields)
    chosen = [each for path in paths for each in listed if f"{each.path}.".startswith(f"{path}.")]
    return chosen if paths else listed


def list_argument_help(function: Any, given: Mapping[str, Any]) -> Iterator[FieldHelp]:
    """The arguments of a class of the user's, as `args.NAME`, with what its docstring and those of its bases say."""
    meanings = _collect_meanings(function)
    for name, each in inspect.signature(function, eval_str=False).parameters.items():
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            continue
        value = given.get(name, "needed" if each.default is each.empty else each.default)
        written = "any" if each.annotation is each.empty else each.annotation
        yield FieldHelp(f"args.{name}", format_value(value), format_type(written), meanings.get(name, ""))


def format_field_help(fields: Iterable[FieldHelp]) -> str:
    """A line each, in columns."""
    rows = [(f"  {each.path}", each.value, each.type, each.meaning) for each in fields]
    widths = [
        min(max((len(row[column]) for row in rows), default=0), most)
        for column, most in enumerate((40, _MAX_VALUE_CHARS, 30))
    ]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)


def _collect_meanings(owner: Any) -> dict[str, str]:
    """What its docstring, and of a class those of its bases, say of each name: in lines `name: meaning` or
    `name, other: meaning`, with what continues."""
    owners = reversed(inspect.getmro(owner)) if isinstance(owner, type) else [owner]
    texts = (re.sub(r"\n {4,}(?=\S)", " ", inspect.cleandoc(each.__doc__ or "")) for each in owners)
    return {name: match[2] for text in texts for match in _MEANING.finditer(text) for name in match[1].split(", ")}


def format_value(value: Any) -> str:
    """A value as an override has it."""
    if isinstance(value, str):
        return value or "''"
    if value is None or isinstance(value, SecretStr):
        return "null" if value is None else "***"
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 4]} ..."


def format_type(annotation: Any) -> str:
    """A type in English: `integer or null`, `adam | sgd`, `list of integer`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, str):
        words = {**{each.__name__: to for each, to in _TYPES.items()}, "None": "null"}
        text = re.sub(r"\w+", lambda name: words.get(name[0], name[0]), annotation).replace(" | ", " or ")
        text = re.sub(r"\b(?:Mapping|dict)\[[^\[\]]*\]", "mapping", text)
        return re.sub(r"\b(?:Sequence|list|tuple)\[([^\[\],]*)[^\[\]]*\]", r"list of \1", text)
    if annotation in _TYPES:
        return _TYPES[annotation]
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(format_type, inner)))
    if origin in (list, tuple):
        return f"list of {format_type(inner[0])}"
    if origin is not None and hasattr(annotation, "__metadata__"):  # Annotated
        return format_type(inner[0])
    if (spec := find_spec_type(annotation)) is not None:
        return f"{{{', '.join(spec.model_fields)}}}"
    return "mapping" if origin is dict or annotation is dict else getattr(annotation, "__name__", "value")
