"""The files that a command leaves: pictures and numbers, in a folder of the user's or in $SHOAL_HOME.

Called by commands that measure. Never overwrites a file of another second.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.home import home


def prepare_output_folder(out: Path | None, name: str = "found") -> Path:
    """`out` or the folder `name` in $SHOAL_HOME, created before hours of work. Raises ConfigError when it is not
    writable."""
    folder = out or home() / name
    with _translate_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def write_files(folder: Path, stem: str, files: dict[str, bytes]) -> list[Path]:
    """Write STEM-TIME.SUFFIX for each suffix into `folder`; the paths. Raises ConfigError."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    paths = []
    with _translate_write_errors(folder):
        for suffix, content in files.items():
            path = folder / f"{stem}-{stamp}.{suffix}"
            path.write_bytes(content)
            paths.append(path)
    return paths


@contextmanager
def _translate_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"takes no files: {error.strerror}"
        raise ConfigError("--out", str(folder), problem, "name a folder where you may write") from None


def to_json_value(value: Any) -> Any:
    """Ready for JSON: NaN and infinities become null."""
    if isinstance(value, dict):
        return {name: to_json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [to_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
