"""Writes an exported folder: complete or not at all, with copies of the modules that it runs.

A module is copied with its imports of ours made relative: the folder's package `runtime` is flat, and has no Shoal.
"""

from __future__ import annotations

import inspect
import os
import re
from contextlib import suppress
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal.errors import ConfigError
from shoal.libs.export.runtime.model import DESCRIPTION_FILE

DESCRIPTION_FILES = (DESCRIPTION_FILE, "policy.json")  # of a folder that serves itself, or is for a game
PACKAGE = "runtime"
PACKAGES = ("msgspec", "numpy", "onnxruntime")  # which the runtime imports; the others are onnxruntime's own
COPIED = (
    "shoal.errors",
    "shoal.frame",
    "shoal.open_inference.binary_tensors",
    "shoal.open_inference.datatypes",
    "shoal.open_inference.json_tensors",
    "shoal.open_inference.messages",
    "shoal.open_inference.request_schema",
    "shoal.open_inference.rows",
    "shoal.serve.http.codec",
    "shoal.serve.http.response",
    "shoal.serve.http.routes",
    "shoal.serve.messages.infer_call",
    "shoal.serve.messages.model_errors",
    "shoal.serve.model.output_check",
    "shoal.serve.protocol.request_limits",
    "shoal.libs.export.runtime.model",
    "shoal.libs.export.runtime.onnx_session",
    "shoal.libs.export.runtime.self_test",
)
COPIED_FOR = {
    "container": ("shoal.libs.export.runtime.http_server", "shoal.libs.export.runtime.server_process"),
    "lambda": ("shoal.libs.export.runtime.lambda_events", "shoal.libs.export.runtime.runtime_api"),
}
HEADER = "# A part of Shoal, under the Apache License 2.0 (see LICENSE), copied by `shoal export`.\n"
_IMPORT = re.compile(r"^(\s*)from (shoal\.[\w.]+) import ", re.MULTILINE)


class _Description(msgspec.Struct):
    """What every export says of itself."""

    format: int
    name: str
    target: str


def require_target(into: Path, model: str, *, replace: bool) -> None:
    """Require that the folder can be written. Raises ConfigError unless it is absent, empty, or to be replaced and an
    export of the same model."""
    if not into.exists() or (into.is_dir() and not any(into.iterdir())):
        return
    if not into.is_dir():
        raise ConfigError("into", str(into), "is no folder", "name another")
    exported = None
    for file in DESCRIPTION_FILES:
        with suppress(OSError, msgspec.DecodeError):
            exported = msgspec.json.decode((into / file).read_bytes(), type=_Description).name
    if exported is None:
        raise ConfigError("into", str(into), "has files that are no export", "name another folder, or empty this one")
    if exported != model:
        problem, remedy = f"is an export of {exported!r}, not of {model!r}", "name another folder, or remove it"
        raise ConfigError("into", str(into), problem, remedy)
    if not replace:
        raise ConfigError("into", str(into), "is an export of this model", "--replace writes it anew")


def copy_runtime(folder: Path, target: str) -> None:
    """Copy what a folder of this target runs, and the license."""
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text(f'{HEADER}"""What this folder runs."""\n')
    modules = (*COPIED, *COPIED_FOR[target])
    names = {module: module.rpartition(".")[2] for module in modules}
    for module, name in names.items():
        source = inspect.getsource(import_module(module))
        source = _IMPORT.sub(lambda found: f"{found[1]}from .{names[found[2]]} import ", source)  # of copied ones alone
        (package / f"{name}.py").write_text(HEADER + source)
    copy_license(folder)


def copy_license(folder: Path) -> None:
    """Copy the license of what the folder has of ours."""
    text = distribution("shoal").read_text("licenses/LICENSE")
    assert text is not None, "the installed package has its license"
    (folder / "LICENSE").write_text(text)


def measure_folder(folder: Path) -> int:
    """The bytes of its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def list_requirements() -> dict[str, Distribution]:
    """List the packages and what they need, by name. Raises ConfigError for one that is not installed."""
    distributions: dict[str, Distribution] = {}
    to_visit = list(PACKAGES)
    while to_visit:
        name = canonicalize_name(to_visit.pop())
        if name in distributions:
            continue
        try:
            distributions[name] = distribution(name)
        except PackageNotFoundError as error:
            problem = f"cannot be pinned: {name} is not installed here"
            raise ConfigError("requirements", name, problem, f"pip install {name}") from error
        needed = map(Requirement, distributions[name].requires or [])
        to_visit += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return dict(sorted(distributions.items()))


def format_requirements(distributions: dict[str, Distribution]) -> str:
    """The text of requirements.txt."""
    return "".join(f"{name}=={each.version}\n" for name, each in distributions.items())


def measure_packages(distributions: dict[str, Distribution]) -> int:
    """The bytes of their installed files."""
    paths = [str(file.locate()) for each in distributions.values() for file in each.files or []]
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
