"""The students of a distillation: as the user names them, or narrower than the teacher by default.

Called by `search`. Builds no network.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from shoal.errors import ConfigError
from shoal.extend.models import read_source
from shoal.extend.registry import ModelFactory, activate_code, find_callable
from shoal.extend.train import Task, model_entry
from shoal.libs.optimise import entry
from shoal.yaml_text import parse_yaml

TASK_FACTORY = f"{model_entry.__name__}:build"
_DIVISORS = ("narrow",)  # arguments by which every width is divided
_WIDTHS = ("width", "hidden", "hidden_size", "d_model", "channels")
_REMEDY = "write hidden=64, file.py:Student, or file.py:Student,hidden=64"


@dataclass(frozen=True)
class Student:
    """A network that is to learn from the teacher. title: of its step, as the user wrote it."""

    title: str
    factory: ModelFactory


def parse_student(text: str, teacher: ModelFactory) -> Student:
    """`hidden=64`: the teacher with other arguments; `file.py:Student`, with arguments or without: another network.

    Raises ConfigError.
    """
    first, *others = text.split(",")
    is_own = "=" not in first
    kwargs: dict[str, Any] = {}
    for argument in others if is_own else [first, *others]:
        name, separator, value = argument.partition("=")
        if not (separator and name.strip().isidentifier()):
            raise ConfigError("--student", text, f"{argument!r} is no argument NAME=VALUE", _REMEDY)
        kwargs[name.strip()] = parse_yaml(value)
    if not is_own:
        changed = {**teacher.kwargs, **kwargs}
        if teacher.factory == TASK_FACTORY:
            changed = {**teacher.kwargs, "args": {**teacher.kwargs["args"], **kwargs}}
        return Student(text, teacher.model_copy(update={"kwargs": changed}))
    try:
        source = read_source(first)
    except ValueError as error:
        raise ConfigError("--student", text, str(error), _REMEDY) from None
    own = ModelFactory(
        factory=f"{entry.__name__}:build_student",
        kwargs={"source": source.source, "reference": first, "kwargs": kwargs},
    )
    return Student(text, entry.make_factory(own.with_code(), "fp32", teacher))


def choose_default_student(teacher: ModelFactory, task: Task | None) -> Student | None:
    """The teacher at half its width; None if it has no argument for it."""
    if teacher.factory == TASK_FACTORY:
        arguments, given = inspect.signature(type(task)).parameters, teacher.kwargs["args"]
    else:
        with activate_code(teacher.code):
            arguments = inspect.signature(find_callable("model.factory", teacher.factory)).parameters
        given = teacher.kwargs
    for name, change in (*((each, 2.0) for each in _DIVISORS), *((each, 0.5) for each in _WIDTHS)):
        value = given.get(name, arguments[name].default if name in arguments else None)
        if isinstance(value, int) and not isinstance(value, bool) and value * change >= 1:
            return parse_student(f"{name}={int(value * change)}", teacher)
    return None
