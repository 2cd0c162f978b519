"""Where a network of the user's own comes from: `model=my_net.py:Net` or `model=package.module:Net`.

Part of the spec of a run. A file is read once, where it is named: from then on its text is in the spec, in the
run's record and in the registry, and travels to every process. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from shoal.config import Spec


class NetworkSource(Spec):
    """word: as it was given; name: of the class; source: the text of its file, or "" for an installed module."""

    word: str
    name: str
    source: str = ""


def _parse_source(value: object) -> object:
    if isinstance(value, Mapping):
        return NetworkSource.parse(value)
    return read_source(value) if isinstance(value, str) else value


def read_source(reference: str) -> NetworkSource:
    """Raises ValueError when it names no class, or a file that cannot be read."""
    location, _, name = reference.rpartition(":")
    if not location or not name.isidentifier():
        raise ValueError("name a class: my_net.py:Net, or package.module:Net")
    if not location.endswith(".py"):
        if not all(part.isidentifier() for part in location.split(".")):
            raise ValueError(f"{location!r} is no file and no module: give my_net.py:Net, or package.module:Net")
        return NetworkSource(word=reference, name=name)
    try:
        source = Path(location).read_text()
    except (OSError, UnicodeError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise ValueError(f"{location} cannot be read from {Path.cwd()}: {reason}") from None
    return NetworkSource(word=reference, name=name, source=source)


AnyNetworkSource = Annotated[NetworkSource | None, BeforeValidator(_parse_source)]
