"""Loads the code that is stored with a model: each version's own, side by side, whatever else has its names here.

The modules of a `ModelCode` become those of a package of their own, `shoal_code_HASH`, and import each other there;
all other modules they import as ever. Their files are written to `$SHOAL_HOME/code`, for tracebacks and for what lies
beside them, but what is run is the stored text.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import linecache
import logging
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from shoal.atomic_file import make_folder
from shoal.errors import ConfigError
from shoal.home import home
from shoal.plugins.find import load_reference
from shoal.registry.model_code import ModelCode, find_module, is_installed

logger = logging.getLogger(__name__)
_active: ContextVar[ModelCode | None] = ContextVar("active", default=None)
_opened: dict[str, _StoredCode] = {}  # by the name of their package
_compared: set[str] = set()
_lock = threading.RLock()


@contextmanager
def activate_code(code: ModelCode | None) -> Iterator[None]:
    """Within this context `import_module` and `load_source` take stored modules first. None: as it was."""
    if code is None:
        yield
        return
    if code.packages and (names := code.describe_other_packages()) and names not in _compared:
        _compared.add(names)
        logger.warning("a model was registered with other packages: %s", names)
    token = _active.set(code)
    try:
        yield
    finally:
        _active.reset(token)


def import_module(name: str) -> ModuleType:
    """The module of that name: of the active code, if it is one of its modules. Raises ImportError."""
    code = _active.get()
    if code is None or name.partition(".")[0] not in code.roots:
        return importlib.import_module(name)
    return importlib.import_module(f"{_open(code).package}.{name}")


def load_object(reference: str) -> Any:
    """What `module:name` or `file.py:name` names, of the active code or of what lies here. Raises ValueError."""
    module, _, name = reference.partition(":")
    stem = Path(module).stem if module.endswith(".py") else module
    code = _active.get()
    if code is None or stem.partition(".")[0] not in code.roots:
        return load_reference(reference)
    try:
        return getattr(import_module(stem), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{reference} cannot be loaded ({error})") from error


def load_source(source: str, title: str, field: str) -> ModuleType:
    """The module of a text, executed once per process and active code. `title` is its name in tracebacks.

    Raises ConfigError for `field` when it does not run.
    """
    code = _active.get()
    stored = _open(code) if code is not None and code.roots else None
    digest = hashlib.sha256(source.encode() + (stored.package.encode() if stored else b"")).hexdigest()
    name, file = f"shoal_registered_{digest[:16]}", f"<{title}, as registered>"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = file
        if stored is not None:
            module.__file__ = str(stored.folder / Path(title.partition(":")[0]).name)
            vars(module)["__builtins__"] = stored.builtins
        sys.modules[name] = module
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # tracebacks show the lines
        try:
            exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
        except Exception as error:  # user code may raise anything
            del sys.modules[name]
            problem = f"the registered source does not run: {type(error).__name__}: {error}"
            remedy = "the packages that it imports must be installed here"
            raise ConfigError(field, title, problem, remedy) from error
        return module


class _StoredCode:
    """A `ModelCode` as a package of this process."""

    def __init__(self, code: ModelCode) -> None:
        self.code, self.package = code, f"shoal_code_{code.sha256[:16]}"
        self.folder = home() / "code" / code.sha256[:16]
        self.contents = dict(code.list_contents())
        for path, content in self.contents.items():
            file = self.folder / path
            if not file.is_file() or file.read_bytes() != content:
                make_folder(file.parent)
                draft = file.with_name(
                    f".{file.name}.{secrets.token_hex(4)}"
                )  # of this process among those that load it
                draft.write_bytes(content)
                draft.replace(file)
        self.builtins = {**vars(builtins), "__import__": self._import}
        root = ModuleType(self.package)
        root.__path__ = [str(self.folder)]
        sys.modules[self.package] = root

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What an import statement of a stored module calls."""
        if level or name.partition(".")[0] not in self.code.roots:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        result = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or (), 0)
        return result if fromlist else sys.modules[f"{self.package}.{name.partition('.')[0]}"]


class _Loader(SourceFileLoader):
    """Runs the stored text of a module."""

    def __init__(self, fullname: str, path: str, stored: _StoredCode) -> None:
        super().__init__(fullname, path)
        self._stored = stored

    def get_code(self, fullname: str) -> CodeType:
        source = self._stored.contents[Path(self.path).relative_to(self._stored.folder).as_posix()]
        return compile(source, self.path, "exec", dont_inherit=True)  # of bytes, which say how they are encoded

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._stored.builtins
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of stored code below their package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        stored = _opened.get(fullname.partition(".")[0])
        if stored is None or path is None:
            return None
        own = [each for each in path if Path(each).is_relative_to(stored.folder)]
        spec = PathFinder.find_spec(fullname, own, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, str(spec.origin), stored)
        if spec is None and not any(Path(each, "__init__.py").is_file() for each in own):
            installed = find_module(fullname.partition(".")[2])
            places = installed and [installed.origin or "", *(installed.submodule_search_locations or ())]
            if places and any(map(is_installed, map(Path, places))):
                return ModuleSpec(fullname, _InstalledLoader())
        return spec


class _InstalledLoader(Loader):
    """Imports the installed module of a namespace package that has modules of the project, too."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(module.__name__.partition(".")[2])


def _open(code: ModelCode) -> _StoredCode:
    name = f"shoal_code_{code.sha256[:16]}"
    with _lock:
        if name not in _opened:
            if not _opened:
                sys.meta_path.insert(0, _Finder())
            _opened[name] = _StoredCode(code)
        return _opened[name]
