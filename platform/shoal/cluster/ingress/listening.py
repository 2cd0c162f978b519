"""Whether this host can listen at an endpoint's address, and whether it does.

The former is asked before anything starts: HAProxy would end, with a page of reasons. Imports no Ray.
"""

from __future__ import annotations

import csv
import errno
import socket
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ConfigError

ADMIN_TIMEOUT_S = 5.0


def require_listenable(host: str, ports: Mapping[str, int | None]) -> None:
    """Raises ConfigError for an address that is not this host's, or a port that others have.

    ports: by field; none, and 0, is any free one
    """
    for field, port in {"host": 0, **ports}.items():
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that end are no listeners
                listener.bind(address)
        except OSError as error:
            if field == "host":
                problem, remedy = f"is no address of the cluster's head ({error.strerror})", "0.0.0.0 or :: for all"
                raise ConfigError("endpoint.host", host, problem, f"give one of it, or {remedy} of them") from None
            problem = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            remedy = "give another, or 0 for a free one"
            raise ConfigError(f"endpoint.{field}", port, f"{problem} at {host}", remedy) from None


def is_listening(host: str, port: int) -> bool:
    """Whether this host accepts connections at this address."""
    try:
        with socket.create_connection((host, port), ADMIN_TIMEOUT_S):
            return True
    except OSError:
        return False


def is_routed(application: str, admin_socket: Path) -> bool:
    """Whether HAProxy, asked at its socket, sends requests to a replica of this application of Serve's."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ADMIN_TIMEOUT_S)
        try:
            connection.connect(str(admin_socket))
            connection.sendall(b"show stat\n")
            with connection.makefile() as answer:
                rows = list(csv.DictReader(answer))
        except OSError:  # it is starting
            return False
    servers = [row for row in rows if row["# pxname"] == f"http-{application}" and row["act"] == "1"]
    return any(row["status"].startswith("UP") for row in servers if row["svname"] != "BACKEND")
