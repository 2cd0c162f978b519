"""The file of a job: where it is found, and what it is asked before anything starts for it. Called by `shoal run`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ConfigError, RunError
from shoal.recipes import find_recipe, recipe_names
from shoal.runs.record.provenance import split_secrets

_TAKES_CHECK = re.compile(r"\b(job|train)_main\b")  # in the file of a job whose words we read


def find_job(job: str) -> Path:
    """The file of a job: a path, or the name of one in ./jobs or of a recipe. Raises ConfigError with what there is."""
    for candidate in (Path(job), Path("jobs") / f"{job}.py", find_recipe(job)):
        if candidate is not None and candidate.is_file():
            return candidate.resolve()
    here = sorted(path.stem for path in Path("jobs").glob("*.py"))
    known = ", ".join(dict.fromkeys([*here, *recipe_names()])) or "none here"
    raise ConfigError("job", job, "is neither a file nor in ./jobs", f"jobs: {known}")


def split_secret_overrides(path: Path, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words without secrets, which travel in the environment; all of them for a job that reads its words itself."""
    shown, secrets = split_secrets(words)
    return (shown, secrets) if secrets and _supports_check(path) else (list(words), {})


def validate_overrides(path: Path, words: Sequence[str]) -> None:
    """Let the job look at its words before a cluster is started for it. Raises RunError with the job's own words."""
    if not words or not _supports_check(path):
        return
    checked = subprocess.run([sys.executable, str(path), *words, "--check"], capture_output=True, text=True)
    if checked.returncode:
        said = checked.stderr.strip() or "it said nothing"
        _, is_typed, error = f"\n{said}".rpartition("\nerror: ")
        raise RunError(error if is_typed else said)  # what is not typed is the user's own, with its traceback


def _supports_check(path: Path) -> bool:
    return bool(_TAKES_CHECK.search(path.read_text(errors="replace")))  # in whichever encoding it is
