"""Where durable files lie: `$SHOAL_STORE`, else the folder `$SHOAL_HOME`."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from shoal.errors import ConfigError
from shoal.home import home
from shoal.store.folder import FolderStore
from shoal.store.objects import ObjectStore
from shoal.store.store import Store

SCHEMES = ("file", "s3", "gs", "az")
_REMEDY = "write a folder, or a URL of a bucket: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX"


def store_url() -> str:
    """The URL or folder of what is to outlive this host. Raises ConfigError for an invalid `$SHOAL_STORE`."""
    url = os.environ.get("SHOAL_STORE", "").strip()
    return require_location("SHOAL_STORE", url) if url else str(home())


def store_variable() -> dict[str, str]:
    """`$SHOAL_STORE` and its timeout, if set, for processes elsewhere. Raises ConfigError for an invalid one."""
    if not os.environ.get("SHOAL_STORE", "").strip():
        return {}
    timeout = {name: os.environ[name] for name in ["SHOAL_STORE_TIMEOUT_S"] if name in os.environ}
    return {"SHOAL_STORE": store_url(), **timeout}


def require_location(field: str, url: str) -> str:
    """Check a URL or folder without opening it; returns it, a folder as an absolute path. Raises ConfigError."""
    scheme, separator, _ = url.partition(":")
    if not separator or "/" in scheme:
        return str(Path(url).expanduser().absolute())
    if scheme not in SCHEMES:
        raise ConfigError(field, url, f"is of none of the kinds {', '.join(SCHEMES)}", _REMEDY)
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.password:
        raise ConfigError(field, url, "has more than a place", _REMEDY)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ConfigError(field, url, "is not a folder of this host", "write file:///FOLDER")
        return parts.path
    if not parts.netloc or "//" in parts.path or any(part.startswith(".") for part in parts.path.split("/")):
        raise ConfigError(field, url, "names no bucket, or a folder with a dot", _REMEDY)
    return url.rstrip("/")


def open_store(url: str | Path | None = None) -> Store:
    """The store at a URL or folder (`store_url()` when None). Raises ConfigError, OSError, MissingExtra."""
    location = store_url() if url is None else require_location("store", str(url))
    return _open_bucket(location) if "://" in location else FolderStore(Path(location))


def open_shared_store(folder: Path, url: str) -> Store | None:
    """The store at a URL or folder; None where it is `folder`, the host's own home, itself. Raises as `open_store`."""
    store = open_store(url)
    own = store.locate("")
    return None if own is not None and own.resolve() == folder.resolve() else store


_open_bucket = lru_cache(maxsize=64)(ObjectStore)  # one client for all callers: it has their connections
