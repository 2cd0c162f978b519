"""The origin of a run: the git revision of the working folder, and the command that started the process.

Called once when a run is created, and when a job is submitted: other users see its command line (`shoal status`, the
dashboard, `ps`), so words with secrets travel in its environment. Never fails: unknown values are None.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

GIT_TIMEOUT_S = 5.0
COMMAND_VARIABLE = "SHOAL_COMMAND"  # set for the job by the command that submits it
OWNER_VARIABLE = "SHOAL_OWNER"  # likewise
MASKED_VARIABLE = "SHOAL_MASKED_VARIABLES"  # likewise: the names of the variables whose values are in no record
MIN_MASKED_CHARS = 6  # a shorter value is no secret, and would mask numbers and words
SECRETS_VARIABLE = "SHOAL_SECRET_WORDS"  # set by the same command: the words to mask on its command line

_DOLLAR = r"\u0024"  # in the environment of a job, since Ray expands variables in values

# endpoint.token=..., endpoint.keys=..., and endpoint={token: ...}; a Task's arguments may have others
_NAMES = r"(?:token|keys|password|secret|api[_-]?key)"
_SECRET = re.compile(
    rf"(?P<name>(?:[\w.]*\.|-*){_NAMES})=|(?P<parent>[\w.]+)=\s*\{{.*\b{_NAMES}\b", re.IGNORECASE | re.DOTALL
)
_USER = re.compile(r"(\w://)[^/@\s]+@")  # of a URL, as of a package in a private repository
_OPTION = re.compile(rf"--{_NAMES}", re.IGNORECASE)  # of a user's own program; its value is the next word


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
    """The command that starts this run again: $SHOAL_COMMAND, or the command of this process, without secrets."""
    typed = os.environ.get(COMMAND_VARIABLE)
    if typed:
        return typed.replace(_DOLLAR, "$")
    if Path(sys.argv[0]).name == "shoal":
        return format_masked_command(["shoal", *sys.argv[1:]])
    return format_masked_command(["python", *sys.orig_argv[1:]])


def make_command_variable(command: str) -> dict[str, str]:
    """The variables that make `command_line` return this command in a job, and `find_owner` this process's user."""
    return {COMMAND_VARIABLE: command.replace("$", _DOLLAR), OWNER_VARIABLE: find_owner().replace("$", _DOLLAR)}


def find_owner() -> str:
    """USER@HOST of who has started this process, or submitted its job."""
    if submitted := os.environ.get(OWNER_VARIABLE):
        return submitted.replace(_DOLLAR, "$")
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container that has no name for it
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def format_masked_command(arguments: Sequence[str]) -> str:
    """The arguments of a command as one line for a shell; values of tokens (`endpoint.token=...`) are masked."""
    return shlex.join(_mask_secrets(arguments))


def mask_command_line(line: str) -> str:
    """Mask the secrets in another program's command, as one line for a shell; unchanged if it has none."""
    try:
        words = shlex.split(line)
    except ValueError:  # an unterminated quotation
        secret = _SECRET.search(line)
        return f"{line[: secret.start()]}***" if secret else line
    return line if words == _mask_secrets(words) else format_masked_command(words)


def mask_values(text: str, values: Iterable[str]) -> str:
    """Mask the values in a text; of MIN_MASKED_CHARS characters at least."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***") if len(value) >= MIN_MASKED_CHARS else text
    return text


def mask_variables(text: str) -> str:
    """In the job: mask the values of the variables that the command has masked."""
    return mask_values(text, [os.environ.get(name, "") for name in os.environ.get(MASKED_VARIABLE, "").split(",")])


def is_secret_name(path: str) -> bool:
    """Whether a field's path is that of a secret, as `endpoint.token` is."""
    return _SECRET.match(f"{path}=") is not None


def split_secrets(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The job's arguments with secrets masked, and the environment variables that hold the masked ones."""
    secrets = [argument for argument in arguments if _SECRET.match(argument)]
    payload = json.dumps(secrets).replace("$", _DOLLAR)
    return [_mask_secret(argument) for argument in arguments], {SECRETS_VARIABLE: payload} if secrets else {}


def restore_secrets(arguments: Sequence[str]) -> list[str]:
    """In the job: undo `split_secrets`."""
    secrets: list[str] = json.loads(os.environ.get(SECRETS_VARIABLE, "[]"))
    return [secrets.pop(0) if secrets and argument == _mask_secret(secrets[0]) else argument for argument in arguments]


def _mask_secrets(arguments: Sequence[str]) -> list[str]:
    before = ("", *arguments)
    return [
        "***" if _OPTION.fullmatch(option) else _USER.sub(r"\1***@", _mask_secret(argument))
        for option, argument in zip(before, arguments, strict=False)
    ]


def _mask_secret(argument: str) -> str:
    secret = _SECRET.match(argument)
    return f"{secret['name'] or secret['parent']}=***" if secret else argument
