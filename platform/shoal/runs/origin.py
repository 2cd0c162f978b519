"""Where a run comes from: the git revision of the working folder, and the command that started the process.

Called once when a run is created. Never fails: what cannot be found out is None.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

GIT_TIMEOUT_S = 5.0


def git_revision(folder: Path) -> tuple[str | None, bool]:
    """(full commit hash, whether tracked files were changed); (None, False) outside a repository or without git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            describe, cwd=folder, env=environment, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, False
    revision = done.stdout.strip()
    return revision.removesuffix("-dirty") or None, revision.endswith("-dirty")


def command_line() -> str:
    """What to type to start this process again."""
    if Path(sys.argv[0]).name == "shoal":
        return shlex.join(["shoal", *sys.argv[1:]])
    return shlex.join(["python", *sys.orig_argv[1:]])
