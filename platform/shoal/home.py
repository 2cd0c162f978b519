"""Shoal's durable files: the folder `$SHOAL_HOME` (default `~/.shoal`) and the access token in it.

    $SHOAL_HOME/runs.sqlite      the run record          $SHOAL_HOME/registry/   models
    $SHOAL_HOME/runs.lock        held while the record is created
    $SHOAL_HOME/runs/ID/         files of one run        $SHOAL_HOME/token       of actors and clients
    $SHOAL_HOME/found/           results of `shoal find` and `shoal ablate`
    $SHOAL_HOME/kernels/         compiled kernels of populations  $SHOAL_HOME/code/  of models that were loaded
    $SHOAL_HOME/ray-token        of Ray's own clients: full control of the cluster, never for actors
    $SHOAL_HOME/cluster.json     the cluster of `shoal up`; up.lock is held while it starts or ends
    $SHOAL_HOME/endpoints/       states of endpoints              $SHOAL_HOME/audit.jsonl  who changed them

Folders and files are private to their owner: see `atomic_file`. Standard library only: the actor process uses it too.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.atomic_file import make_folder
from shoal.errors import ConfigError

_LOCK_POLL_S = 0.01


def home() -> Path:
    """The folder of all durable files; created, private to the user, if missing. Raises ConfigError."""
    try:
        folder = _resolve_folder()
        make_folder(folder)
    except (OSError, RuntimeError) as error:  # a file, another user's place, or an unknown home folder
        value = os.environ.get("SHOAL_HOME") or "~/.shoal"
        raise ConfigError("SHOAL_HOME", value, f"is no folder: {error}", "set it to one where you may write") from None
    return folder


def load_access_token() -> str:
    """The token of gateways and endpoints: `$SHOAL_TOKEN`, else `$SHOAL_HOME/token`, created if missing.

    Raises ConfigError when the file is empty or cannot be created, and for a token that no HTTP header can carry.
    """
    token = _read_token_variable() or _load_token_file("token")
    require_header_safe("SHOAL_TOKEN", token)
    return token


def require_header_safe(field: str, token: str) -> None:
    """Raises ConfigError, which does not show the token, when no HTTP header can carry it."""
    if not token.isascii() or not token.isprintable() or " " in token:
        remedy = "choose printable ASCII without blanks, as `openssl rand -hex 24` makes it"
        raise ConfigError(field, "***", "cannot be carried by a header", remedy)


def read_existing_token() -> str:
    """Like `load_access_token`, for actors: creates nothing, and returns "" when there is none.

    Raises ConfigError for an unreadable file.
    """
    try:
        return _read_token_variable() or (_resolve_folder() / "token").read_text().strip()
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # RuntimeError: the home folder is unknown
        return ""
    except OSError as error:
        raise ConfigError("token", error.filename, f"cannot be read: {error.strerror}", "set SHOAL_TOKEN") from None


def ray_token_path() -> Path:
    """The file with the token of the embedded Ray; created if missing. Raises ConfigError when it is empty."""
    _load_token_file("ray-token")
    return home() / "ray-token"


def read_number_variable(name: str, default: float, remedy: str) -> float:
    """The number in a variable of the environment, `default` where it is not set. Raises ConfigError."""
    text = os.environ.get(name, "").strip()
    try:
        return float(text or default)
    except ValueError:
        raise ConfigError(name, text, "is no number", remedy) from None


@contextmanager
def file_lock(path: Path, timeout_s: float, error: Exception | None = None) -> Iterator[None]:
    """Hold the lock that is the file at `path`; a killed holder lets go by dying.

    Raises `error` (by default a TimeoutError) when another process, or another holder in this one, does not let go of
    it within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                _lock(descriptor)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise error or TimeoutError(f"{path} is held by another") from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock of an open file; the system releases it when the file is closed. Raises BlockingIOError."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
    else:
        import fcntl  # here, since actors on Windows import this module too

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_token_variable() -> str:
    """Strip it: files and secrets of others often end with a newline."""
    return os.environ.get("SHOAL_TOKEN", "").strip()


def _resolve_folder() -> Path:
    return Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal").expanduser().resolve()


def _load_token_file(name: str) -> str:
    path = home() / name
    try:
        if not path.exists():
            _make_token(path)
        token = path.read_text().strip()
    except OSError as error:
        problem = f"can be neither read nor made: {error.strerror}"
        raise ConfigError(name, str(path), problem, "set SHOAL_HOME to a folder where you may write") from None
    if not token:
        raise ConfigError(name, str(path), "holds no token", "remove the file, and a new one is made")
    return token


def _make_token(path: Path) -> None:
    """Write a draft next to `path` and link it into place: it is complete or absent, and the first one stays."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # readable only by its owner
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(24))
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    finally:
        os.unlink(draft)
