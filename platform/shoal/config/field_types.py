"""The types of a spec's fields, as annotations have them. Pure functions; called by
`shoal.config`, whose Spec they do not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError


def reject_booleans(spec: type[BaseModel], values: Any) -> None:
    """Raise ValidationError for a boolean where a field has numbers only: pydantic would read `true` as 1."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        field = spec.model_fields.get(name)
        if field is not None and _has_boolean(value) and _holds_numbers_only(field.annotation):
            problem = {"error": ValueError("is a boolean, and the field takes numbers")}
            line = {"type": "value_error", "loc": (name,), "input": value, "ctx": problem}
            raise ValidationError.from_exception_data(spec.__name__, [line])  # type: ignore[list-item]


def find_spec_type(annotation: Any) -> type[BaseModel] | None:
    """The spec in a type, also of `X | None`, and in a container."""
    candidates = (annotation, *get_args(annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def find_nested_type(annotation: Any, part: int | str) -> Any:
    """The type of the element `part` in a value of the type `annotation`; None if unknown."""
    spec = find_spec_type(annotation)
    if spec is None:
        return next(iter(get_args(annotation)), None)
    if get_origin(annotation) in (dict, list):
        return spec
    return spec.model_fields[part].annotation if isinstance(part, str) and part in spec.model_fields else None


def _has_boolean(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_has_boolean, inner))


def _holds_numbers_only(annotation: Any) -> bool:
    """Whether a type has numbers, and nothing in it can be a boolean."""
    types = list(_list_types(annotation))
    return any(each in (int, float) for each in types) and not any(
        each in (bool, Any, object) or isinstance(each, bool) or find_spec_type(each) for each in types
    )


def _list_types(annotation: Any) -> Iterator[Any]:
    """A type and, of unions and containers, all in it."""
    yield annotation
    for each in get_args(annotation):
        yield from _list_types(each)


@dataclass(frozen=True)
class SpecMapping:
    """The owner of the entries of a `dict[str, Spec]`: any name, and a Spec under each."""

    spec: type[BaseModel]


FieldOwner: TypeAlias = type[BaseModel] | SpecMapping | None  # None: a plain mapping without a known type


def find_field_owner(owner: FieldOwner, name: str) -> FieldOwner:
    """The owner of the fields below the field `name`, also through `X | None`."""
    if isinstance(owner, SpecMapping):
        return owner.spec
    if owner is None or name not in owner.model_fields:
        return None
    annotation = owner.model_fields[name].annotation
    spec = find_spec_type(annotation)
    return SpecMapping(spec) if spec is not None and get_origin(annotation) is dict else spec
