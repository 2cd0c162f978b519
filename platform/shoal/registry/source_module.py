"""The module of a source text: the user's own code, as a run or a model of the registry holds it.

Called where a network is built from its text, in any process, without the file that it came from.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from types import ModuleType

from shoal.errors import ConfigError


def load_source(source: str, title: str, field: str) -> ModuleType:
    """The module of the text, executed once per process. `title` is its name in tracebacks.

    Raises ConfigError for `field` when it does not run.
    """
    name = f"shoal_registered_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module, file = ModuleType(name), f"<{title}, as registered>"
    module.__file__ = file
    sys.modules[name] = module
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # tracebacks show the lines
    try:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:  # user code may raise anything
        del sys.modules[name]
        problem = f"the registered source does not run: {type(error).__name__}: {error}"
        remedy = "what it imports must be installed here; files beside it are not registered with it"
        raise ConfigError(field, title, problem, remedy) from error
    return module
