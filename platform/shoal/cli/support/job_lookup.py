"""Find the file of a job, and check its overrides before anything starts. Called by `shoal run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from shoal.errors import ConfigError, RunError
from shoal.recipes import find_recipe, recipe_names
from shoal.runs.record.provenance import split_secrets

CHECKED_RUN = "SHOAL_CHECKED_RUN"  # see shoal/train/launch/checked_run.py
_PREFIX, _MAX_VARIABLE_CHARS = "checked run: ", 100_000  # Linux takes 131,072 bytes
_TAKES_CHECK = re.compile(r"\b(job|stream|sweep|train)_main\b")  # in the file of a job that parses overrides by Shoal


def find_job(job: str) -> Path:
    """The file of a job: a path, or the name of one in ./jobs or of a recipe. Raises ConfigError with the known
    jobs."""
    for candidate in (Path(job), Path("jobs") / f"{job}.py", find_recipe(job)):
        if candidate is not None and candidate.is_file():
            return candidate.resolve()
    here = sorted(path.stem for path in Path("jobs").glob("*.py"))
    known = ", ".join(dict.fromkeys([*here, *recipe_names()])) or "none here"
    raise ConfigError("job", job, "is neither a file nor in ./jobs", f"jobs: {known}")


def split_secret_overrides(path: Path, overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The overrides without secrets, which travel in the environment; unchanged for a job that parses its own."""
    shown, secrets = split_secrets(overrides)
    return (shown, secrets) if secrets and _supports_check(path) else (list(overrides), {})


def validate_overrides(
    path: Path, overrides: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Let the job check its overrides, and what the `variables` say, before a cluster starts. Raises RunError with the
    job's own error.

    Returns variables for the job, with what its check has found: it need not check again.
    """
    if not (overrides or variables) or not _supports_check(path):
        return {}
    command = [sys.executable, str(path), *overrides, "--check"]
    environment = {**os.environ, **variables, CHECKED_RUN: "print"}
    checked = subprocess.run(command, capture_output=True, text=True, env=environment)
    if checked.returncode:
        said = checked.stderr.strip() or "it said nothing"
        _, is_typed, error = f"\n{said}".rpartition("\nerror: ")
        raise RunError(error if is_typed else said)  # an untyped error is the user's own, with its traceback
    found = [line.removeprefix(_PREFIX) for line in checked.stdout.splitlines() if line.startswith(_PREFIX)]
    return {CHECKED_RUN: found[-1]} if found and len(found[-1]) < _MAX_VARIABLE_CHARS else {}


def _supports_check(path: Path) -> bool:
    return bool(_TAKES_CHECK.search(path.read_text(errors="replace")))  # whatever its encoding
