"""Find the cluster to use: the requested one, the one of the environment, or the one that `shoal up` started.

Called by the CLI before it starts an embedded cluster. Owns `$SHOAL_HOME/cluster.json`, the record of the cluster of
`shoal up`, and the lock under which that record changes. Starts and stops nothing.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from shoal.cluster.cluster_handle import FOLDER_VARIABLE, ClusterHandle, load_handle
from shoal.errors import ClusterError, ConfigError
from shoal.home import file_lock, home, ray_token_path, require_header_safe

LOCK_TIMEOUT_S = 120.0  # starting and stopping may each take a minute


def find_cluster(address: str | None = None) -> ClusterHandle | None:
    """The cluster at `address`, else that of $RAY_ADDRESS, else the one that `shoal up` started; None if there is none.

    An address is the dashboard's URL (`http://head.example:8265`) or, for a cluster of this machine, the host:port that
    `shoal status` shows. "local" means none. Raises ConfigError for an unusable address.
    """
    if address == "local":
        return None
    if address:
        return _resolve_address("address", address)
    from_environment = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if from_environment and from_environment not in ("auto", "local"):
        return _resolve_address("RAY_ADDRESS", from_environment)
    return find_running_cluster()


def find_running_cluster() -> ClusterHandle | None:
    """The cluster that `shoal up` started on this host, if it is still alive."""
    handle = _load_local_handle()
    return handle if handle is not None and handle.is_head_alive() else None


def list_clusters() -> list[ClusterHandle]:
    """The cluster that `find_cluster` finds, and those that runs of this $SHOAL_HOME have started for themselves."""
    found = find_cluster()
    clusters = {} if found is None else {found.dashboard_url: found}
    for path in sorted(Path("/tmp").glob("shoal-*/cluster.json")):
        with suppress(ClusterError, OSError):  # of another user, or of a cluster that ends
            handle = load_handle(path)
            ours = handle is not None and handle.environment.get("RAY_AUTH_TOKEN_PATH") == str(ray_token_path())
            if handle is not None and ours and handle.is_on_this_host and handle.is_head_alive():
                clusters.setdefault(handle.dashboard_url, handle)
    return list(clusters.values())


def load_saved_cluster() -> ClusterHandle | None:
    """The recorded cluster of `shoal up`, dead or alive. Raises ClusterError when it is on another host."""
    handle = load_handle(state_path())
    if handle is not None and not handle.is_on_this_host:
        raise ClusterError(f"a cluster is up on {handle.host}: {format_remote_remedy(handle, state_path())}")
    return handle


def format_remote_remedy(handle: ClusterHandle, path: Path) -> str:
    """The remedy for a record, at `path`, of another host's cluster."""
    return f"end it there, or remove {path} if {handle.host} is gone"


def state_path() -> Path:
    """The record that `shoal up` writes of its cluster."""
    return home() / "cluster.json"


def lock_cluster_state() -> AbstractContextManager[None]:
    """Keep every other `shoal up` and `shoal down` waiting; a killed holder lets go by dying.

    Raises ClusterError when another process holds the lock for LOCK_TIMEOUT_S.
    """
    busy = ClusterError("another `shoal up` or `shoal down` is at work: wait for it, or end it")
    return file_lock(home() / "up.lock", LOCK_TIMEOUT_S, busy)


def _resolve_address(field: str, address: str) -> ClusterHandle:
    url = address.partition("#")[0].rstrip("/")  # a browser shows the dashboard's as http://HOST:8265/#/overview
    folder = os.environ.get(FOLDER_VARIABLE)  # this process is a client of that cluster by its environment, or its job
    of_environment = load_handle(Path(folder) / "cluster.json") if folder else None
    for handle in (_load_local_handle(), of_environment):
        if handle is not None and url in (handle.address, handle.dashboard_url):
            if not handle.is_head_alive():
                raise ConfigError(field, address, "is a cluster that has ended", "`shoal up` starts a new one")
            return handle
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        is_url = False
    if not is_url:
        raise ConfigError(field, address, "is not the URL of a dashboard", "write http://HOST:8265, or unset it")
    # A cluster on other machines: Ray's own rules for the token come first, then the token of
    # $SHOAL_HOME.
    environment = {"RAY_ADDRESS": url, "RAY_API_SERVER_ADDRESS": url, "RAY_AUTH_MODE": "token"}
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if token:
        require_header_safe("RAY_AUTH_TOKEN", token)
        return ClusterHandle(url, url, token, {**environment, "RAY_AUTH_TOKEN": token})
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given or os.path.expanduser("~/.ray/auth_token"))  # unchanged when the home folder is unknown
    if given and not path.exists():
        raise ConfigError("RAY_AUTH_TOKEN_PATH", str(path), "does not exist", "copy the cluster's token file there")
    if not path.exists():
        path = ray_token_path()
    token = path.read_text().strip()
    if not token:
        raise ConfigError("RAY_AUTH_TOKEN_PATH", str(path), "holds no token", "copy the cluster's token file there")
    require_header_safe("RAY_AUTH_TOKEN_PATH", token)
    return ClusterHandle(url, url, token, {**environment, "RAY_AUTH_TOKEN_PATH": str(path)})


def _load_local_handle() -> ClusterHandle | None:
    handle = load_handle(state_path())
    return handle if handle is not None and handle.is_on_this_host else None
