"""Where a run comes from: the git revision of the working folder, and the command that started the process.

Called once when a run is created, and by who starts a job: its words are seen by others (`shoal status`, the dashboard,
`ps`), so those with secrets travel in its environment. Never fails: what cannot be found out is None.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GIT_TIMEOUT_S = 5.0
COMMAND_VARIABLE = "SHOAL_COMMAND"  # set for the job by whoever started it for the user
SECRETS_VARIABLE = "SHOAL_SECRET_WORDS"  # likewise: the words of its command line that are masked there

_DOLLAR = r"\u0024"  # in the environment of a job, for Ray puts values of variables in the place of their names

# endpoint.token=..., endpoint.keys=..., and endpoint={token: ...}; a Task's arguments may have others
_NAMES = r"(?:token|keys|password|secret|api[_-]?key)"
_SECRET = re.compile(
    rf"(?P<name>(?:[\w.]*\.|-*){_NAMES})=|(?P<parent>[\w.]+)=\s*\{{.*\b{_NAMES}\b", re.IGNORECASE | re.DOTALL
)
_OPTION = re.compile(rf"--{_NAMES}", re.IGNORECASE)  # of somebody's own program; its value is the next word


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
    """What to type to start this run again: $SHOAL_COMMAND, or else the command of this process, without secrets."""
    typed = os.environ.get(COMMAND_VARIABLE)
    if typed:
        return typed.replace(_DOLLAR, "$")
    if Path(sys.argv[0]).name == "shoal":
        return format_masked_command(["shoal", *sys.argv[1:]])
    return format_masked_command(["python", *sys.orig_argv[1:]])


def make_command_variable(command: str) -> dict[str, str]:
    """The variable of a job's environment by which `command_line` has this command there."""
    return {COMMAND_VARIABLE: command.replace("$", _DOLLAR)}


def format_masked_command(words: Sequence[str]) -> str:
    """The words of a command as one line for a shell; the value of a token (`endpoint.token=...`) is left out."""
    return shlex.join(_mask_secrets(words))


def mask_command_line(line: str) -> str:
    """A command of somebody else's, as one line for a shell; changed only when there is a secret in it."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation that does not end
        secret = _SECRET.search(line)
        return f"{line[: secret.start()]}***" if secret else line
    return line if words == _mask_secrets(words) else format_masked_command(words)


def split_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a job as everybody may see them, and the variables of its environment that have what is masked."""
    secrets = [word for word in words if _SECRET.match(word)]
    told = json.dumps(secrets).replace("$", _DOLLAR)
    return [_mask_secret(word) for word in words], {SECRETS_VARIABLE: told} if secrets else {}


def restore_secrets(words: Sequence[str]) -> list[str]:
    """In the job: what `apart` was given."""
    secrets: list[str] = json.loads(os.environ.get(SECRETS_VARIABLE, "[]"))
    return [secrets.pop(0) if secrets and word == _mask_secret(secrets[0]) else word for word in words]


def _mask_secrets(words: Sequence[str]) -> list[str]:
    before = ("", *words)
    return [
        "***" if _OPTION.fullmatch(option) else _mask_secret(word) for option, word in zip(before, words, strict=False)
    ]


def _mask_secret(word: str) -> str:
    secret = _SECRET.match(word)
    return f"{secret['name'] or secret['parent']}=***" if secret else word
