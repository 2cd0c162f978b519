"""Turns a Task class that was defined in a notebook or in the running script into a file for other processes.

Called by `shoal.fit`, which names every Task by a word. The file has the class and everything of the running program
that it uses: imports, functions, classes, and constants with a literal form.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import symtable
import sys
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from shoal.atomic_file import replace_synced
from shoal.errors import ConfigError
from shoal.home import home
from shoal.train.task import Task

MAIN = "__main__"


def get_task_path(task: type[Task]) -> str:
    """The word for the class in a spec: `package.module:Class`, or `path.py:Class`.

    Raises ConfigError for a class within a function, and for one that uses what only the running program has.
    """
    if "<locals>" in task.__qualname__:
        raise ConfigError("task", task.__qualname__, "is defined within a function", "define it at the top level")
    if task.__module__ == MAIN:
        return f"{_write_source(task)}:{task.__name__}"
    file = getattr(sys.modules[task.__module__], "__file__", None)
    is_of_file = task.__module__.startswith("shoal_task_") and file is not None
    return f"{file if is_of_file else task.__module__}:{task.__name__}"


def build_standalone_source(task: type[Task]) -> str:
    """Python text that defines the class, with everything that it uses of `__main__`. Raises ConfigError."""
    main = sys.modules[MAIN]
    head, body = _collect_definitions(task, main, set())
    future = ["from __future__ import annotations"] if hasattr(main, "annotations") else []
    return "\n".join([*future, *sorted(set(head))]) + "\n\n\n" + "\n\n\n".join(body) + "\n"


def _write_source(task: type[Task]) -> Path:
    text = build_standalone_source(task)
    folder = home() / "tasks"
    path = folder / f"{task.__name__.lower()}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    if not path.exists():
        replace_synced(path, text.encode())
    return path


def _collect_definitions(found: type | FunctionType, main: ModuleType, seen: set[str]) -> tuple[list[str], list[str]]:
    """Import lines, and definitions in an order in which each follows its dependencies."""
    seen.add(found.__name__)
    text = _get_source_text(found)
    head: list[str] = []
    body: list[str] = []
    for name in _global_names(text):
        if name in seen or name not in vars(main):
            continue
        value = vars(main)[name]
        if getattr(value, "__module__", None) == MAIN and isinstance(value, type | FunctionType):
            more_head, more_body = _collect_definitions(value, main, seen)
            head += more_head
            body += more_body
        else:
            seen.add(name)
            line = _import_line(name, value)
            (head if line.startswith(("import ", "from ")) else body).append(line)
    return head, [*body, text]


def _import_line(name: str, value: Any) -> str:
    """The statement that defines `value` as `name` in another process. Raises ConfigError."""
    if isinstance(value, ModuleType):
        parent, _, last = value.__name__.rpartition(".")
        if last == name and parent:
            return f"from {parent} import {name}"
        return f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and qualname and "." not in qualname and getattr(sys.modules.get(module), qualname, None) is value:
        return f"from {module} import {qualname}" + (f" as {name}" if qualname != name else "")
    try:
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    except (ValueError, SyntaxError):
        pass
    problem = f"is used by the Task, and is a {type(value).__name__} that only this program has"
    raise ConfigError(name, type(value).__name__, problem, "make it within the Task, or put the Task into a file")


def _global_names(text: str) -> list[str]:
    """The module's names that the text reads, without builtins."""
    names: dict[str, None] = {}

    def walk(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            is_free = symbol.is_global() if table.get_type() != "module" else not symbol.is_assigned()
            if is_free and symbol.is_referenced():
                names[symbol.get_name()] = None
        for child in table.get_children():
            walk(child)

    walk(symtable.symtable(text, "<task>", "exec"))
    return [name for name in names if not hasattr(builtins, name)]


def _get_source_text(found: type | FunctionType) -> str:
    """The text of a class or function. Raises ConfigError where Python has not kept it."""
    try:
        return textwrap.dedent(inspect.getsource(found)).rstrip()
    except (OSError, TypeError):  # of a class in a notebook Python knows no file, but its methods know their cell
        for method in vars(found).values():
            if isinstance(method, FunctionType) and (text := _find_class_text(found.__name__, method)):
                return text
    remedy = "put it into a file, and give file.py:Class"
    raise ConfigError("task", found.__name__, "has no source here, from which other processes could build it", remedy)


def _find_class_text(name: str, method: FunctionType) -> str | None:
    cell = "".join(linecache.getlines(method.__code__.co_filename))
    for node in ast.parse(cell).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
    return None
