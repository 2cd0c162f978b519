"""Names a Task class of the running program, so that other processes can build it. Called by `shoal.fit`.

A script that starts its training under `if __name__ == "__main__":` is a file that can be imported, and so it is.
Anything else would train again, or has no file: a script without the guard, a notebook, a program on stdin. Of these a
file is written, with the class and everything of the running program that it uses: imports, functions, classes, and
constants, as literals or pickled. Any other object, such as a DataLoader, stays in the program: methods that only
training calls may use it there.
"""

from __future__ import annotations

import ast
import base64
import builtins
import hashlib
import inspect
import io
import linecache
import pickle
import symtable
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from types import FunctionType, ModuleType
from typing import Any

from shoal.atomic_file import replace_synced
from shoal.errors import ConfigError
from shoal.home import home
from shoal.train.spec import TrainSpec
from shoal.train.task import MAIN, Task, adopt_program, get_program_text, load_task_file

MAX_PICKLE_BYTES = 2**16  # of a constant, in base64: data is not code
_STAYING = "__staying__"  # of a file's module: the names of its ProgramObjects
_TRAINING_ONLY = frozenset(
    (
        *("setup", "data", "datamodule", "loss", "metrics", "optimizer", "optimizers", "train_step", "eval_step"),
        *("sample_losses", "stateful_metrics", "update_metric", "finish_evaluation", "callbacks", "augmentations"),
    )
)


class ProgramObject:
    """In the place of an object that only the program has which defined the Task. Any use raises ConfigError."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, attribute: str) -> Any:
        problem = "is an object of the program that defined the Task, and this is another process"
        raise ConfigError(self.name, None, problem, "make it within the Task, or put the Task into a file")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


def get_task_path(task: type[Task]) -> str:
    """The word for the class in a spec: `package.module:Class`, or `path.py:Class`.

    Raises ConfigError for a class within a function, and for one that uses what only the running program has.
    """
    if "<locals>" in task.__qualname__:
        raise ConfigError("task", task.__qualname__, "is defined within a function", "define it at the top level")
    if task.__module__ == MAIN:
        text = get_program_text()
        word = adopt_program() if text and _is_importable(text) else _write_source(task)
        return f"{word}:{task.__name__}"
    file = getattr(sys.modules[task.__module__], "__file__", None)
    is_of_file = task.__module__.startswith("shoal_task_") and file is not None
    return f"{file if is_of_file else task.__module__}:{task.__name__}"


def _is_importable(text: str) -> bool:
    """Whether the script can be imported: it now runs what stands below its guard, and uses nothing of there above."""
    main, body = vars(sys.modules[MAIN]), ast.parse(text).body
    stack = walk_stack(inspect.currentframe())
    line = next((at for frame, at in stack if frame.f_globals is main and frame.f_code.co_name == "<module>"), 0)
    guards = [each for each in body if isinstance(each, ast.If) and "__name__" in ast.unparse(each.test)]
    above = [each for each in body if each not in guards]
    steps = [ast.unparse(each) for each in above if not isinstance(each, ast.ClassDef | ast.FunctionDef)]
    takes_arguments = any("parse_args(" in each or "sys.argv" in each for each in steps)
    source = ast.unparse(ast.Module(above, []))
    symbols = symtable.symtable(source, "", "exec").get_symbols()
    made = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()} | {"__file__"}
    changed = {name for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Global) for name in each.names}
    is_alone = main.keys() & {*_global_names(source)} <= made - changed
    return is_alone and not takes_arguments and any(each.lineno <= line <= (each.end_lineno or 0) for each in guards)


def _write_source(task: type[Task]) -> Path:
    main, staying = sys.modules[MAIN], list[str]()
    head, body = _collect_definitions(task, main, {}, staying)
    if staying:
        head.append(f"from {__name__} import {ProgramObject.__name__}")
        body[:0] = [f"{name} = {ProgramObject.__name__}({name!r})" for name in staying]
    future = ["from __future__ import annotations"] if hasattr(main, "annotations") else []
    text = "\n".join([*future, *sorted(set(head))]) + "\n\n\n" + "\n\n\n".join(body) + "\n"
    folder = home() / "tasks"
    path = folder / f"{task.__name__.lower()}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    if not path.exists():
        replace_synced(path, text.encode())
    if staying:
        here = vars(load_task_file(path, f"{path}:{task.__name__}"))
        here.update({name: vars(sys.modules[MAIN])[name] for name in staying}, **{_STAYING: staying})
    return path


def require_standalone(spec: TrainSpec) -> None:
    """Raises ConfigError for workers of a Task that uses objects of this program."""
    module = next(
        (each for each in sys.modules.values() if getattr(each, "__file__", "") == spec.task.partition(":")[0]), None
    )
    if names := getattr(module, _STAYING, None):
        problem = f"train in other processes, which do not have {', '.join(names)} of this program"
        raise ConfigError("workers", spec.workers, problem, "make it within the Task, or leave workers out")


def _collect_definitions(
    found: type | FunctionType, main: ModuleType, seen: dict[str, bool], staying: list[str]
) -> tuple[list[str], list[str]]:
    """Import lines, and definitions in an order in which each follows its dependencies. Adds to `staying`.

    seen: names, and whether their definition is complete
    """
    seen[found.__name__] = False
    text = _get_source_text(found)
    may_stay = _list_training_names(text) if isinstance(found, type) and issubclass(found, Task) else frozenset()
    head: list[str] = []
    body: list[str] = []
    for name in _global_names(text):
        if name in seen or name not in vars(main):
            continue
        value = vars(main)[name]
        line = ""
        needed = list[type | FunctionType]()
        if getattr(value, "__module__", None) == MAIN and isinstance(value, type | FunctionType):
            needed = [value]
        else:
            seen[name] = True
            line = _import_line(name, value)
            if not line and name in may_stay:
                staying.append(name)
                continue
            if not line:
                line, needed = _pickle_constant(name, value)
                head.append(f"from {__name__} import {unpickle.__name__}")
        for each in needed:
            if not seen.get(each.__name__, True):  # a constant that is to come before what it names
                raise _make_error(name, value)
            if each.__name__ not in seen:
                more_head, more_body = _collect_definitions(each, main, seen, staying)
                head += more_head
                body += more_body
        (head if line.startswith(("import ", "from ")) else body).append(line)
    seen[found.__name__] = True
    return head, [*filter(None, body), text]


def _import_line(name: str, value: Any) -> str:
    """The statement that defines `value` as `name` in another process; "" where it has no literal form."""
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
    return ""


def _pickle_constant(name: str, value: Any) -> tuple[str, list[Any]]:
    """The statement that defines it in another process, and the classes of the program that it names. Raises
    ConfigError."""
    with suppress(Exception):  # a user's object may raise anything
        text, named = base64.b64encode(pickle.dumps(value, 4)).decode(), list[Any]()
        unpickle(text, lambda each: named.append(vars(sys.modules[MAIN])[each]) or named[-1])  # type: ignore[func-returns-value]
        if len(text) <= MAX_PICKLE_BYTES:
            return f"{name} = {unpickle.__name__}({text!r}, globals().get)", named
    raise _make_error(name, value)


def _make_error(name: str, value: object) -> ConfigError:
    problem = f"is used by the Task, and is a {type(value).__name__} that only this program has"
    is_script = get_program_text() is not None
    remedy = (
        'make it above `if __name__ == "__main__":`, and call `fit` below' if is_script else "make it within the Task"
    )
    return ConfigError(name, type(value).__name__, problem, f"{remedy}, or put the Task into a file")


def unpickle(text: str, find: Callable[[str], Any]) -> Any:
    """A constant that `_pickle_constant` has written. find: gives classes and functions of the program"""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return find(name) if module == MAIN else super().find_class(module, name)

    return Unpickler(io.BytesIO(base64.b64decode(text))).load()


def _list_training_names(text: str) -> frozenset[str]:
    """The module's names that only methods of training read."""
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            rest = [each for each in node.body if getattr(each, "name", "") not in _TRAINING_ONLY]
            node.body = rest or [ast.Pass()]
    return frozenset(_global_names(text)) - frozenset(_global_names(ast.unparse(tree)))


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
    remedy = "put it into a cell without %%time or the like, or into a file, and give file.py:Class"
    raise ConfigError("task", found.__name__, "has no source here, from which other processes could build it", remedy)


def _find_class_text(name: str, method: FunctionType) -> str | None:
    cell = "".join(linecache.getlines(method.__code__.co_filename))
    for node in ast.parse(cell).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
    return None
