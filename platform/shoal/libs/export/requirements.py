"""The packages of an exported folder, pinned to the versions that are installed here, and their size."""

from __future__ import annotations

import os
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal.errors import ConfigError

PACKAGES = ("msgspec", "numpy", "onnxruntime")  # which the runtime imports; the others are onnxruntime's own


def list_requirements() -> dict[str, Distribution]:
    """List the packages and what they need, by name. Raises ConfigError for one that is not installed."""
    found: dict[str, Distribution] = {}
    to_visit = list(PACKAGES)
    while to_visit:
        name = canonicalize_name(to_visit.pop())
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError as error:
            problem = f"cannot be pinned: {name} is not installed here"
            raise ConfigError("requirements", name, problem, f"pip install {name}") from error
        needed = map(Requirement, found[name].requires or [])
        to_visit += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return dict(sorted(found.items()))


def format_requirements(found: dict[str, Distribution]) -> str:
    """The text of requirements.txt."""
    return "".join(f"{name}=={each.version}\n" for name, each in found.items())


def measure_packages(found: dict[str, Distribution]) -> int:
    """The bytes of their installed files."""
    paths = [str(file.locate()) for each in found.values() for file in each.files or []]
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
