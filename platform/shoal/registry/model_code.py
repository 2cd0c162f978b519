"""The code of a registered model: the user's own modules, as they were when the version was registered.

Owns the record of that code, and finds it. Called where a version is registered, and where a run that registers one
begins. Follows import statements in the text of modules, and never runs one: what is imported by a name made at run
time is not found. `code_import` loads what is stored.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from shoal.config import Spec
from shoal.errors import ConfigError

MAX_CODE_BYTES = 8 * 2**20
RUN_TEXTS = frozenset({"source", "pickle"})  # arguments of factories: the text of a file, base64 of a pickle
MAX_DATA_BYTES = 2**20  # of a file beside a module; a larger one is data of the training, say
MAX_NAMED_FOLDERS = 3  # below a module's, of the path to a file beside it
OURS = "shoal"
_TITLES = ("task", "word", "reference")  # of the file whose text is `source` beside it


class ModelCode(Spec):
    """The modules that a model's factory, hooks and format are of, with all modules of the project that they import.

    files:    texts by path, as `net/blocks.py`, and text files beside them that a module names next to `__file__`
    binary:   in base64, other files: those that are no text, and extension modules
    packages: the releases of the installed packages that this code imports
    """

    files: dict[str, str] = Field(default_factory=dict)
    binary: dict[str, str] = Field(default_factory=dict)
    packages: dict[str, str] = Field(default_factory=dict)

    @field_validator("files", "binary")
    @classmethod
    def _below_one_folder(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            if path.startswith("/") or "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(f"{path!r} is no path below the folder of a version's code")
        return files

    @cached_property
    def sha256(self) -> str:
        """The hex digest of all files."""
        return hashlib.sha256(json.dumps([self.files, self.binary], sort_keys=True).encode()).hexdigest()

    @cached_property
    def roots(self) -> frozenset[str]:
        """The top-level modules and packages."""
        return frozenset(path.partition("/")[0].partition(".")[0] for path in (*self.files, *self.binary))

    def list_contents(self) -> Iterator[tuple[str, bytes]]:
        """All files, by path."""
        yield from ((path, text.encode()) for path, text in self.files.items())
        yield from ((path, base64.b64decode(text)) for path, text in self.binary.items())

    def describe_other_packages(self) -> str:
        """The packages whose release here is another one, or that are missing; "" for none."""
        here = {name: _find_release(name) for name in self.packages}
        return ", ".join(
            f"{name} {then}, here {here[name]}" for name, then in self.packages.items() if here[name] != then
        )


def collect_code(model: Mapping[str, Any], *folders: Path) -> ModelCode:
    """The code of a ModelFactory's fields, with what its kwargs name: a `module:name`, or the `source` of a file.

    folders: where modules are looked for besides `sys.path`

    Raises ConfigError when the code is too large to be stored with a version.
    """
    collector = _Collector(folders)
    for field in ("factory", "preprocess", "postprocess", "format"):
        collector.add_reference(model[field])
    collector.add_arguments(model["kwargs"])
    size = sum(len(content) for content in collector.contents.values())
    if size > MAX_CODE_BYTES:
        path = max(collector.contents, key=lambda each: len(collector.contents[each]))
        problem = f"{size} bytes are more than the {MAX_CODE_BYTES} that a version may have; the largest file is {path}"
        raise ConfigError("model.code", model["factory"], problem, "install it as a package, and import it from there")
    files, binary = {}, {}
    for path, content in sorted(collector.contents.items()):
        try:
            files[path] = content.decode()
        except UnicodeDecodeError:
            binary[path] = base64.b64encode(content).decode()
    packages: dict[str, str] = {}
    for module in collector.installed:
        has_name = _find_release(module) != "missing"  # as most have: others are looked up, which takes longer
        names = [module] if has_name else _map_modules().get(module, ())
        packages |= {name: _find_release(name) for name in names}
    return ModelCode(files=files, binary=binary, packages=dict(sorted(packages.items())))


def read_modules(file: Path, source: str) -> dict[str, bytes]:
    """The files of the project's modules that the text of a file imports, by path, as they are now."""
    collector = _Collector([])
    collector.add_arguments({"task": str(file), "source": source})
    return collector.contents


def require_installed(model: Mapping[str, Any]) -> None:
    """Check that the code of a ModelFactory's fields is what lies here, byte for byte. Raises ConfigError.

    So nothing is run that only the registry has. Files that may contain code, and are no text, are refused.
    """
    remedy = "install that code here, or let the endpoint run what is registered: code: stored"
    if model.get("format") in ("torch_export", "torchscript"):
        raise ConfigError("code", "installed", f"a file of format {model['format']} can contain code", remedy)
    stored = ModelCode.parse(model["code"] or {})
    here = collect_code({**model, "kwargs": _leave_out_sources(model["kwargs"])})
    texts, texts_here = (  # one that was opened as a text, as a Task's is, has the line ends of Unix
        {path: text.replace("\r\n", "\n").replace("\r", "\n") for path, text in each.files.items()}
        for each in (stored, here)
    )
    for path in sorted({*texts, *stored.binary, *texts_here, *here.binary}):
        if (texts.get(path), stored.binary.get(path)) != (texts_here.get(path), here.binary.get(path)):
            state = "differs from" if path in here.files or path in here.binary else "is missing here, but is of"
            raise ConfigError("code", "installed", f"{path} {state} what was registered", remedy)
    for source in _list_sources(model["kwargs"]):
        if source not in texts_here.values():
            raise ConfigError(
                "code", "installed", "the text of a `source` or `pickle` is no file's that lies here", remedy
            )
    for nested in _list_nested(model["kwargs"]):
        empty = {"factory": "", "preprocess": "", "postprocess": "", "format": "module", "kwargs": {}}
        require_installed({**empty, **nested})


def _list_sources(value: Any) -> Iterator[Any]:
    """The texts that are run among the arguments, but for those of factories with code."""
    if isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if key in RUN_TEXTS and each:
                yield each
            elif not (isinstance(each, Mapping) and _is_factory(each)):
                yield from _list_sources(each)


def list_nested_code(kwargs: Mapping[str, Any]) -> list[tuple[str, ModelCode]]:
    """The code of the factories in a factory's arguments, each with a prefix for its paths."""
    nested = list(_list_nested(kwargs))
    return [(f"{each.get('factory', '').partition(':')[0]}/", ModelCode.parse(each["code"])) for each in nested]


def _leave_out_sources(value: Any) -> Any:
    """The arguments without the texts of files, so that these are looked for here."""
    if isinstance(value, list | tuple):
        return [_leave_out_sources(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {name: _leave_out_sources(each) for name, each in value.items() if name not in RUN_TEXTS}


def _list_nested(value: Any) -> Iterator[Mapping[str, Any]]:
    """The factories with code among the arguments."""
    if isinstance(value, Mapping) and _is_factory(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _list_nested(each)


def _is_factory(value: Mapping[str, Any]) -> bool:
    code = value.get("code")
    return isinstance(code, Mapping) and bool(code) and code.keys() <= ModelCode.model_fields.keys()


class _Collector:
    """Follows imports. contents: files of the project, by path; installed: top-level modules of packages."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.contents: dict[str, bytes] = {}
        self.installed: set[str] = set()
        self._folders = [str(each) for each in folders]
        self._seen: set[str] = set()
        self._data_bytes = 0
        self._sources: set[Path] = set()  # files of the texts among the arguments, in place of which these are stored

    def add_reference(self, reference: str) -> None:
        module, _, name = reference.partition(":")
        if name and module.endswith(".py"):
            self._folders.append(str(Path(module).resolve().parent))
            module = Path(module).stem
        if name and all(part.isidentifier() for part in module.split(".")):
            self._add_module(module)
            is_installed_here = module.partition(".")[0] in self.installed
            if is_installed_here and (spec := find_module(module, self._folders)) and spec.origin:
                self._follow(_read_source(Path(spec.origin)), _get_package(spec), is_own=False)

    def add_arguments(self, value: object) -> None:
        if isinstance(value, str):
            self.add_reference(value)
        elif isinstance(value, Mapping):
            if _is_factory(value):  # within this one, with its own code
                return
            source, title = value.get("source"), next((value[key] for key in _TITLES if value.get(key)), "")
            if source and title:
                file = Path(title.partition(":")[0]).resolve()
                self.contents[f"{file.stem}.py"] = source.encode()
                self._sources.add(file)
                self._folders.append(str(file.parent))
                self._follow(source, "", file.parent, file.parent)
            for each in value.values():
                if not source or each != title:
                    self.add_arguments(each)
        elif isinstance(value, list | tuple):
            for each in value:
                self.add_arguments(each)

    def _add_module(self, name: str) -> None:
        root = name.partition(".")[0]
        if name in self._seen or root in sys.stdlib_module_names or root == "__main__":
            return
        self._seen.add(name)
        spec = find_module(name, self._folders)
        if spec is None:
            return  # of a platform or a package that is not here; its import is within a `try`, or fails
        if spec.origin is None or not spec.has_location:  # a package without a file
            return
        path = Path(spec.origin)
        if root == OURS or is_installed(path):
            self.installed.add(root)
            return
        if parent := name.rpartition(".")[0]:
            self._add_module(parent)
        is_package = spec.submodule_search_locations is not None
        top = path.parents[name.count(".") + is_package]
        self._add_file(path, top)
        if path.suffix == ".py":
            self._follow(_read_source(path), _get_package(spec), path.parent, top)

    def _follow(
        self,
        source: str | bytes,
        package: str,
        folder: Path | None = None,
        top: Path | None = None,
        *,
        is_own: bool = True,
    ) -> None:
        """Add what a text imports and the files beside it that it names; of an installed one, the packages alone."""
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError):
            return  # it fails where it is loaded, with its line
        for node in nodes:
            for name in _list_imported(node, package):
                if is_own:
                    self._add_module(name)
                elif (root := name.partition(".")[0]) not in sys.stdlib_module_names:
                    self.installed.add(root)
        names_itself = any(isinstance(each, ast.Name) and each.id == "__file__" for each in nodes)
        if folder is not None and top is not None and names_itself:
            texts = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            names = {each for each in texts if 0 < len(each) <= 255 and "\0" not in each}
            top, folders = Path(os.path.normpath(top)), {folder}
            for _ in range(MAX_NAMED_FOLDERS):
                named = {Path(os.path.normpath(parent / name)) for parent in folders for name in names}
                folders |= {each for each in named if each.is_dir() and each.is_relative_to(top)}
            files = {Path(os.path.normpath(parent / name)) for parent in folders for name in names}
            sizes = {
                each: each.stat().st_size
                for each in sorted(files)
                if each.is_file() and each.is_relative_to(top) and not _is_excluded(each.relative_to(top))
            }
            # A training's many small ones refuse no run.
            for path, size in sorted(sizes.items(), key=lambda item: item[1]):
                if size <= MAX_DATA_BYTES and self._data_bytes + size <= MAX_CODE_BYTES // 2:
                    self._data_bytes += size
                    self._add_file(path, top)

    def _add_file(self, path: Path, top: Path) -> None:
        name, content = Path(os.path.relpath(path, top)).as_posix(), path.read_bytes()  # a link is what it stands for
        if self.contents.setdefault(name, content) != content and path.resolve() not in self._sources:
            remedy = "rename one of them"
            raise ConfigError("model.code", str(path), f"another file of the model's code is {name}, too", remedy)


def find_module(name: str, folders: Sequence[str] = ()) -> ModuleSpec | None:
    """Where a module lies, without importing it or its package."""
    root, *others = name.split(".")
    try:
        spec = importlib.util.find_spec(root) or PathFinder.find_spec(root, list(folders))
    except (ImportError, ValueError):
        return None
    for each in others:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{each}", list(spec.submodule_search_locations))
    return spec


def _list_imported(node: ast.AST, package: str) -> list[str]:
    """The modules of an import statement, or of `__all__` for `import *`; a name that is imported from one may be a
    module itself."""
    if isinstance(node, ast.Assign) and any(
        isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets
    ):
        texts = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
        return [f"{package}.{each}" for each in texts if package and isinstance(each, str)]
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = node.module or ""
    if node.level:
        parts = package.split(".")
        module = ".".join([*parts[: len(parts) - node.level + 1], *([module] if module else [])])
    return [module, *(f"{module}.{each.name}" for each in node.names)] if module else []


def _is_excluded(path: Path) -> bool:
    """Whether a file that is named is a module, or is hidden or a key, as `.env` is: a version is for many to read."""
    return path.suffix in (".py", ".pem", ".key") or any(each.startswith(".") for each in path.parts)


def _get_package(spec: ModuleSpec) -> str:
    return spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]


def _read_source(path: Path) -> bytes:
    return path.read_bytes() if path.suffix == ".py" else b""


def is_installed(path: Path) -> bool:
    """Whether a file is of an installed package, or of Python, and not of a project."""
    places = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(
        path.is_relative_to(place) for place in places
    )


@cache
def _find_release(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


@cache
def _map_modules() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
