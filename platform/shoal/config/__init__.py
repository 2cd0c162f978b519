"""The base of every spec: frozen, strict, printable as YAML, and overridable with `a.b=c` words.

One `Spec` configures every job and service. Unknown keys are rejected, and every error names the field, the value and
what would fit. Called by the CLI, jobs and pillars; knows none of them.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from shoal.atomic_file import log_unknown_fields
from shoal.errors import ConfigError, needs_extra, suggest

with needs_extra("cluster"):
    from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, model_validator
    from pydantic.fields import FieldInfo
    from yaml import YAMLError

    from shoal.config.field_types import (
        FieldOwner,
        SpecMapping,
        find_field_owner,
        find_nested_type,
        find_spec_type,
        reject_booleans,
    )
    from shoal.yaml_text import dump_yaml, parse_yaml

MASKED = str(SecretStr("masked"))  # written by `to_yaml` and `to_record` for every secret


if TYPE_CHECKING:
    _Model = BaseModel
else:

    class _Meta(type(BaseModel)):
        def __call__(cls, *args, **values):
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise _to_config_error(cls, error) from None

    class _Model(BaseModel, metaclass=_Meta):
        """Raises the same errors from a call as from parsing."""


class Spec(_Model):
    """A frozen configuration. Subclasses declare fields; units are part of the field's name.

    Numbers are finite, unless a field allows otherwise, and no booleans. The constructor raises ConfigError, which
    names the first invalid field, with secrets masked.

    recorded_always: fields that readers of a record need, whatever their value
    main_fields:     paths of those that the help of a job shows first, or of a nested spec all; (): all
    page:            of docs/, for errors: where the fields are explained
    """

    recorded_always: ClassVar[tuple[str, ...]] = ()
    main_fields: ClassVar[tuple[str, ...]] = ()
    page: ClassVar[str] = ""
    model_config = ConfigDict(
        ser_json_inf_nan="constants", extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans(cls, values: Any) -> Any:
        reject_booleans(cls, values)
        return values

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Build from a plain mapping. Raises ConfigError naming the first field that does not fit."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise _to_config_error(cls, error) from None

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """Read a YAML file (`Path`) or text (`str`). Raises ConfigError."""
        return cls.parse(_load_mapping(source))

    @classmethod
    def from_record(cls, text: str, overrides: Iterable[str] = (), *, leave_out: Collection[str] = ()) -> Self:
        """Read the output of `to_record`, with `a.b=c` words applied; the other fields have the present defaults.

        Fields that this release does not have are logged, and have no effect. Secrets are masked in a record: the words
        must set them again, unless they are in one of the fields to `leave_out`. Raises ConfigError.
        """
        values = {name: each for name, each in _load_mapping(text).items() if name not in leave_out}
        return cls.parse_known(values, "the record", overrides)

    @classmethod
    def parse_known(cls, values: Mapping[str, Any], source: Path | str, overrides: Iterable[str] = ()) -> Self:
        """Like `parse`, without the fields that this release does not have, which are logged. Raises ConfigError."""
        overrides = list(overrides)
        try:
            return cls._parse_record(values, overrides)
        except ConfigError:
            known = copy.deepcopy(dict(values))
            unknown = [
                f"{path}={MASKED if MASKED in str(each) else each}" for path, each in _remove_unknown_fields(known, cls)
            ]
            if not unknown:
                raise
        result = cls._parse_record(known, overrides)
        log_unknown_fields(source, unknown)
        return result

    @classmethod
    def _parse_record(cls, values: Mapping[str, Any], overrides: Iterable[str]) -> Self:
        changed = copy.deepcopy(dict(values))
        _apply_overrides(changed, cls, overrides)
        try:
            return cls.parse(changed)
        except ConfigError as error:
            for path in _find_masked_paths(changed):
                if f"{error.field}.".startswith(f"{path}."):
                    problem = "is a secret, which no record holds"
                    raise ConfigError(path, MASKED, problem, f"give it again, as in {path}=...") from None
            raise

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """The new value of a field of this type when an `override` sets it to one text; `before` is the old value."""
        return text

    @classmethod
    def list_fields(cls) -> Collection[str]:
        """The names of fields that may be meant by a mistyped one."""
        return cls.model_fields

    @classmethod
    def expand_choice(cls, choice: str) -> dict[str, Any] | None:
        """The fields that one word stands for, where parsing does not know before the kind is chosen."""
        return None

    @classmethod
    def explain_absence(cls, name: str) -> str:
        """Where a field that this type does not have is to be found; "" when unknown."""
        return ""

    @classmethod
    def choose_type(cls, values: Mapping[str, Any]) -> type[Spec]:
        """The type whose fields `values` has, where a field's type has several kinds; this one by default."""
        return cls

    @classmethod
    def list_kinds(cls) -> Collection[str]:
        """The words of all kinds, where a field's type has several, and one of its fields chooses."""
        return ()

    def to_yaml(self) -> str:
        """The full spec as YAML, defaults included; `from_yaml` reads it back."""
        return dump_yaml(self.model_dump(mode="json"))

    def to_record(self) -> str:
        """What was specified, as YAML: the fields that were set; `from_record` reads it.

        A later release, which may rename a field that was not set, then reads the record too.
        """
        return dump_yaml(_dump_specified(self, self.model_dump(mode="json")))

    def override(self, overrides: Iterable[str]) -> Self:
        """A copy with `a.b=c` words applied; values are read as YAML (`true`, `3`, `1e-3`, `[1, 2]`, `text`).

        Raises ConfigError for a word without `=`, an unknown field, or a value that does not fit.
        """
        values = _dump_specified(self, self.model_dump())
        _apply_overrides(values, type(self), overrides)
        return type(self).parse(values)

    def update(self, fields: Mapping[str, Any]) -> Self:
        """A copy with `fields` replaced, nested ones field by field. Raises ConfigError."""
        return type(self).parse(merge(_dump_specified(self, self.model_dump(), fields), dict(fields)))


def _dump_specified(value: Any, dumped: Any, changing: Any = None) -> Any:
    """Of the dump of a value, without the fields of specs that parsing sets anyway.

    changing: fields, of which nested ones too, that the caller is about to change
    """
    changing = changing if isinstance(changing, Mapping) else {}
    if isinstance(value, Spec) and isinstance(dumped, dict):
        fields = type(value).model_fields
        return {
            name: _dump_specified(getattr(value, name), each, changing.get(name))
            for name, each in dumped.items()
            if name in changing or name not in fields or _is_specified(value, name, fields[name])
        }
    if isinstance(value, dict):
        return {key: _dump_specified(*pair) for key, *pair in zip(dumped, value.values(), dumped.values(), strict=True)}
    if isinstance(value, list | tuple):
        return [_dump_specified(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped


def _is_specified(spec: Spec, name: str, field: FieldInfo) -> bool:
    """Whether a field was set, names the type of the spec, or is recorded always."""
    is_tag = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return is_tag or name in spec.model_fields_set or name in spec.recorded_always


def _dump_default(owner: FieldOwner, name: str) -> Any:
    """What an absent field has, as far as parsing would not set it anyway; {} where it has no default."""
    field = owner.model_fields.get(name) if isinstance(owner, type) else None
    if field is None or field.is_required():
        return {}
    default = field.get_default(call_default_factory=True)
    return _dump_specified(default, default.model_dump()) if isinstance(default, Spec) else copy.deepcopy(default)


def merge(base: Any, changes: Any) -> Any:
    """`changes` over `base`, field by field where both are mappings."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return {**base, **{name: merge(base.get(name), each) for name, each in changes.items()}}


def parse_overrides(spec: type[Spec], overrides: Iterable[str]) -> dict[str, Any]:
    """The fields of `spec` that `a.b=c` words set, and no others. Raises ConfigError for an unknown one."""
    values: dict[str, Any] = {}
    _apply_overrides(values, spec, overrides, with_defaults=False)
    return values


def format_override(path: str, value: object) -> str:
    """The word that sets the field at `path` to this value, quoted where YAML would misread it."""
    try:
        is_plain = parse_yaml(value) == value if isinstance(value, str) else False
    except YAMLError:
        is_plain = False
    return f"{path}={value if is_plain else json.dumps(value, ensure_ascii=False)}"


def last_override(overrides: Iterable[str], path: str) -> str:
    """The text to which the last word for `path` sets it; "" if there is none. Raises ConfigError."""
    written = [text for name, _, text in (override.partition("=") for override in overrides) if name == path]
    value = _parse_value(path, written[-1]) if written else ""
    return value if isinstance(value, str) else written[-1]


def _parse_value(path: str, text: str) -> object:
    if text.startswith("*"):  # a pattern; in YAML it would repeat another value of this text, which has no other
        return text
    try:
        return parse_yaml(text)
    except YAMLError as error:
        problem = getattr(error, "problem", None) or "a character that has no place in it"
        raise ConfigError(path, "...", f"is not YAML: {problem}", "put it in quotes") from None  # it may be a secret


def _load_mapping(source: str | Path) -> dict[str, Any]:
    text = source.read_text() if isinstance(source, Path) else source
    try:
        loaded = parse_yaml(text) or {}
    except YAMLError as error:
        raise ConfigError("yaml", str(source)[:80], f"is not YAML ({error})") from None
    if not isinstance(loaded, dict):
        raise ConfigError("yaml", loaded, "is not a mapping", "write `field: value` lines")
    return loaded


def _find_masked_paths(value: object, path: str = "") -> Iterator[str]:
    """The paths of masked secrets, as far as a word can address them: for one in a list, the list's."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _find_masked_paths(each, f"{path}.{name}" if path else str(name))
    elif value == MASKED or (isinstance(value, list) and any([*_find_masked_paths(each)] for each in value)):
        yield path


def _apply_overrides(
    values: dict[str, Any], spec: type[BaseModel], overrides: Iterable[str], *, with_defaults: bool = True
) -> None:
    # Put `a.kind=...` before those that set fields of `a`, whose kind it chooses.
    ordered: list[str] = []
    for override in overrides:
        path, *_ = override.partition("=")
        others, index = [each.partition("=")[0] for each in ordered], len(ordered)
        while path.endswith(".kind") and index and not f"{path}.".startswith(f"{others[index - 1]}."):
            index -= 1
        ordered.insert(index, override)
    for override in ordered:
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise ConfigError(
                "override", override, "is not of the form a.b=c", "for example optimizer.learning_rate=0.001"
            )
        value = _parse_value(path, text) if text else ""
        names = path.split(".")
        node: Any = values
        owner: FieldOwner = spec
        while len(names := _join_entry_name(owner, node, names)) > 1:
            name = names.pop(0)
            _require_field(owner, name, path, value, spec)
            if name not in node:
                node[name] = _dump_default(owner, name) if with_defaults else {}
            owner = find_field_owner(owner, name)
            # None, or a word that stands for a full spec
            if isinstance(owner, type) and not isinstance(node[name], dict):
                node[name] = _expand_spec(owner, node[name])
            node = node[name]
            if isinstance(owner, type) and issubclass(owner, Spec) and isinstance(node, dict):
                try:
                    owner = owner.choose_type(node)
                except ValueError as error:
                    raise ConfigError(path.rpartition(".")[0], str(_mask_secrets(owner, node)), str(error)) from None
            if not isinstance(node, dict):
                raise ConfigError(path, value, f"{name!r} has no fields of its own")
        (leaf,) = names
        _require_field(owner, leaf, path, value, spec)
        inner = find_field_owner(owner, leaf)
        before = node[leaf] if leaf in node else _dump_default(owner, leaf)
        if isinstance(inner, type) and issubclass(inner, Spec) and isinstance(value, str) and isinstance(before, dict):
            value = inner.from_override(value, before)
        node[leaf] = value
        if leaf == "kind" and isinstance(owner, type) and issubclass(owner, Spec):
            with suppress(ValueError):  # parsing names a kind that there is not
                fields = owner.choose_type(node).model_fields
                for name in node.keys() - fields.keys():  # of the kind before
                    del node[name]


def _join_entry_name(owner: FieldOwner, node: Mapping[str, Any], names: list[str]) -> list[str]:
    """Join the first of `names` to the name of a mapping's entry, which may have dots, as a model's: a field of the
    entry follows it."""
    if not isinstance(owner, SpecMapping) or names[0] in node:
        return names
    end = next((index for index in range(1, len(names)) if names[index] in owner.spec.model_fields), 1)
    return [".".join(names[:end]), *names[end:]]


def _remove_unknown_fields(values: Any, owner: FieldOwner, path: str = "") -> Iterator[tuple[str, Any]]:
    """Take out the fields that no spec has, and name them."""
    if isinstance(values, list):
        for index, each in enumerate(values):
            yield from _remove_unknown_fields(each, owner, f"{path}{index}.")
    if not isinstance(values, dict) or owner is None:
        return
    if isinstance(owner, type) and issubclass(owner, Spec):
        try:
            owner = owner.choose_type(values)
        except ValueError:  # a kind that this release does not have: parsing names it
            return
    for name in list(values):
        if isinstance(owner, type) and name not in owner.model_fields:
            yield f"{path}{name}", values.pop(name)
        else:
            yield from _remove_unknown_fields(values[name], find_field_owner(owner, name), f"{path}{name}.")


def _expand_spec(owner: type[BaseModel], value: object) -> dict[str, Any]:
    """Expand a value that is not a mapping: a word such as `ddp`, or an optional spec not yet given.

    Fields without a default stay open, for the following words.
    """
    if value is None:
        fields = owner.model_fields.items()
        return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}
    if isinstance(value, str) and issubclass(owner, Spec) and (expanded := owner.expand_choice(value)) is not None:
        return expanded
    try:
        return owner.model_validate(value).model_dump()
    except ValidationError as error:
        raise _to_config_error(owner, error) from None


def _require_field(owner: FieldOwner, name: str, path: str, value: object, spec: type[BaseModel]) -> None:
    if isinstance(owner, type) and name not in owner.model_fields:
        prefix, _, inner = f".{path}.".partition(f".{name}.")
        remedy = _suggest(name, owner, f"{prefix}.".removeprefix("."), has_fields=bool(inner))
        raise ConfigError(path, value, "no such field", _add_page(remedy, spec))


def _add_page(remedy: str, spec: type[BaseModel]) -> str:
    """A remedy, and the page of docs/ that explains the fields of a spec."""
    page = spec.page if issubclass(spec, Spec) else ""
    return f"{remedy}{'' if remedy.endswith('?') else '.'} See docs/{page}" if page else remedy


def _suggest(name: str, owner: type[BaseModel], prefix: str = "", *, has_fields: bool = False) -> str:
    """prefix: of the owner's fields, as in `optimizer.`; has_fields: one of its own follows the name"""
    nested = list(_list_nested_paths(owner))
    nested = [path for path in nested if not has_fields or any(each.startswith(f"{path}.") for each in nested)]
    if inner := [path for path in nested if path.endswith(f".{name}")]:
        return f"did you mean {' or '.join(map(repr, (f'{prefix}{path}' for path in inner)))}?"
    if issubclass(owner, Spec) and (result := owner.explain_absence(name)):
        return result
    known = {each: each for each in (owner.list_fields() if issubclass(owner, Spec) else ())}
    known |= {path.rpartition(".")[2]: path for path in nested if path.rpartition(".")[2] not in known}
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {prefix + known[near[0]]!r}?" if near else f"fields are: {', '.join(owner.model_fields)}"


def _list_nested_paths(owner: type[BaseModel]) -> Iterator[str]:
    """The paths of all fields of a spec's nested specs."""
    for name, field in owner.model_fields.items():
        if isinstance(part := field.annotation, type) and issubclass(part, BaseModel):
            own = part.list_fields() if issubclass(part, Spec) else part.model_fields
            yield from (f"{name}.{path}" for path in (*own, *_list_nested_paths(part)))


def _to_config_error(spec: type[BaseModel], error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or spec.__name__
    annotation: Any = spec
    located = first["loc"][:-1] if first["type"] == "missing" else first["loc"]  # then its input is what encloses it
    for part in located:
        annotation = find_nested_type(annotation, part)
    value = _mask_secrets(annotation, first["input"])
    remedy = ""
    if first["type"] == "extra_forbidden":
        owner: FieldOwner = spec
        for part in first["loc"][:-1]:
            is_known = isinstance(owner, SpecMapping) or (owner is not None and part in owner.model_fields)
            owner = find_field_owner(owner, str(part)) if is_known else None
        *outer, name = map(str, first["loc"])
        prefix = "".join(f"{each}." for each in outer)
        remedy = _suggest(name, owner, prefix) if isinstance(owner, type) else ""
        return ConfigError(field, value, "no such field", _add_page(remedy, spec))
    problem = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]  # our own message
    if first["type"] in ("tuple_type", "list_type"):
        remedy = f"write a list, as in {field}='[{value}]'"
    if first["type"] in ("literal_error", "enum") and isinstance(value, str):
        remedy = suggest(value, re.findall(r"'([^']+)'", first["ctx"]["expected"]), least=0.7)
    return ConfigError(field, value, problem, remedy)


def _mask_secrets(annotation: Any, value: Any) -> Any:
    """A value as an error may repeat it."""
    spec = find_spec_type(annotation)
    if isinstance(value, Mapping):
        of = spec if get_origin(annotation) is list else annotation  # one value where a list was expected
        if spec is not None and issubclass(spec, Spec) and get_origin(annotation) is not dict:
            try:
                of = spec.choose_type(value)
            except ValueError:  # unknown, and so is what it has
                return {name: each if name in spec.model_fields else MASKED for name, each in value.items()}
        return {name: _mask_secrets(find_nested_type(of, name), each) for name, each in value.items()}
    if isinstance(value, list):
        return [_mask_secrets(find_nested_type(annotation, index), each) for index, each in enumerate(value)]
    fields = spec.model_fields.values() if spec is not None else ()
    types = (annotation, *get_args(annotation), *(field.annotation for field in fields))
    is_secret = any(SecretStr in (each, *get_args(each)) for each in types)
    return SecretStr("masked") if is_secret and isinstance(value, str) else value
