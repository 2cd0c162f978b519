"""Find the cluster to use: the one that was asked for, the one of the environment, or the one that `shoal up` started.

Called by the CLI before it starts an embedded cluster. Owns `$SHOAL_HOME/cluster.json`, where `shoal up` leaves word of
its cluster, and the lock that whoever changes it holds. It starts and stops nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from shoal.cluster.cluster_handle import FOLDER_VARIABLE, ClusterHandle, load
from shoal.errors import ClusterError, ConfigError
from shoal.home import exclusive, home, ray_token_path, require_header

LOCK_TIMEOUT_S = 120.0  # a start may take a minute, and so may an end


def find_cluster(address: str | None = None) -> ClusterHandle | None:
    """The cluster at `address`, else that of $RAY_ADDRESS, else the one that `shoal up` started; None if there is none.

    An address is the dashboard's URL (`http://head.example:8265`) or, for a cluster of this machine, the host:port that
    `shoal status` shows. "local" says to use none. Raises ConfigError for an address that cannot be used.
    """
    if address == "local":
        return None
    if address:
        return _resolve("address", address)
    from_environment = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if from_environment and from_environment not in ("auto", "local"):
        return _resolve("RAY_ADDRESS", from_environment)
    return started_by_up()


def started_by_up() -> ClusterHandle | None:
    """The cluster that `shoal up` started on this host, if it is still alive."""
    handle = _left_here()
    return handle if handle is not None and handle.head_is_alive() else None


def left_by_up() -> ClusterHandle | None:
    """The cluster that `shoal up` left word of, dead or alive. Raises ClusterError when that is another host's."""
    handle = load(state_path())
    if handle is not None and not handle.is_of_this_host:
        raise ClusterError(f"a cluster is up on {handle.host}: {remedy_elsewhere(handle, state_path())}")
    return handle


def remedy_elsewhere(handle: ClusterHandle, path: Path) -> str:
    """What to do about the word, at `path`, of another host's cluster."""
    return f"end it there, or remove {path} if {handle.host} is gone"


def state_path() -> Path:
    """Where `shoal up` leaves word of its cluster."""
    return home() / "cluster.json"


@contextmanager
def only_one() -> Iterator[None]:
    """Keep every other `shoal up` and `shoal down` waiting; a killed holder lets go by dying.

    Raises ClusterError when another is at work for LOCK_TIMEOUT_S.
    """
    with ExitStack() as held:
        try:
            held.enter_context(exclusive(home() / "up.lock", LOCK_TIMEOUT_S))
        except TimeoutError:
            raise ClusterError("another `shoal up` or `shoal down` is at work: wait for it, or end it") from None
        yield


def _resolve(field: str, address: str) -> ClusterHandle:
    url = address.partition("#")[0].rstrip("/")  # a browser shows the dashboard's as http://HOST:8265/#/overview
    for handle in (_left_here(), _of_environment()):
        if handle is not None and url in (handle.address, handle.dashboard_url):
            if not handle.head_is_alive():
                raise ConfigError(field, address, "is a cluster that has ended", "`shoal up` starts a new one")
            return handle
    if not _is_url(url):
        raise ConfigError(field, address, "is not the URL of a dashboard", "write http://HOST:8265, or unset it")
    return _remote(url)


def _is_url(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        return False


def _left_here() -> ClusterHandle | None:
    handle = load(state_path())
    return handle if handle is not None and handle.is_of_this_host else None


def _of_environment() -> ClusterHandle | None:
    """The local cluster whose client environment this process has (or whose job it is)."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return load(Path(folder) / "cluster.json") if folder else None


def _remote(url: str) -> ClusterHandle:
    """A cluster on other machines, with Ray's own rules for the token, and at last the token of $SHOAL_HOME."""
    environment = {"RAY_ADDRESS": url, "RAY_API_SERVER_ADDRESS": url, "RAY_AUTH_MODE": "token"}
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if token:
        require_header("RAY_AUTH_TOKEN", token)
        return ClusterHandle(url, url, token, {**environment, "RAY_AUTH_TOKEN": token})
    said = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(said or os.path.expanduser("~/.ray/auth_token"))  # which stays as it is where nobody knows the home
    if said and not path.exists():
        raise ConfigError("RAY_AUTH_TOKEN_PATH", str(path), "does not exist", "copy the cluster's token file there")
    if not path.exists():
        path = ray_token_path()
    token = path.read_text().strip()
    if not token:
        raise ConfigError("RAY_AUTH_TOKEN_PATH", str(path), "holds no token", "copy the cluster's token file there")
    require_header("RAY_AUTH_TOKEN_PATH", token)
    return ClusterHandle(url, url, token, {**environment, "RAY_AUTH_TOKEN_PATH": str(path)})
