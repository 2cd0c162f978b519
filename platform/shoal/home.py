"""Where Shoal keeps what outlives a process: the folder `$SHOAL_HOME` (default `~/.shoal`) and the access token in it.

    $SHOAL_HOME/runs.sqlite      the run record          $SHOAL_HOME/registry/   models
    $SHOAL_HOME/runs/ID/         files of one run        $SHOAL_HOME/token       what actors and clients must show
    $SHOAL_HOME/found/           what `shoal find` and `shoal ablate` found
    $SHOAL_HOME/ray-token        what Ray's own clients must show: full control of the cluster, never for actors

Standard library only: the actor process uses it too.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def home() -> Path:
    """The folder of everything durable; created, private to the user, when it does not exist."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def access_token() -> str:
    """The token that gateways and endpoints ask for: `$SHOAL_TOKEN`, else `$SHOAL_HOME/token`, made when absent."""
    return os.environ.get("SHOAL_TOKEN") or _token_file("token")


def existing_token() -> str:
    """Like `access_token`, for actors, who must have been told: makes nothing, and is "" when there is none."""
    token = os.environ.get("SHOAL_TOKEN")
    try:
        return token or (_folder() / "token").read_text().strip()
    except FileNotFoundError:
        return ""


def ray_token_path() -> Path:
    """The file with the token of the embedded Ray; made when absent."""
    _token_file("ray-token")
    return home() / "ray-token"


def _folder() -> Path:
    return Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal").expanduser().resolve()


def _token_file(name: str) -> str:
    path = home() / name
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        token = secrets.token_hex(24)
        file.write(token)
    return token
