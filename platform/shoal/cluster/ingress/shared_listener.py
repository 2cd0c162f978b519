"""HAProxy's listening sockets, in another process: a connection then waits for whichever of the two accepts it first.

HAProxy hands its sockets to its successor by its admin socket (`expose-fd listeners`). A replica takes them in the same
way. Both processes have the same socket and the same queue of connections: neither loses one when the other stops
accepting. `haproxy_config` writes a `Mark` whenever HAProxy starts with one replica and nothing to balance. Imports the
standard library only.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shoal.cluster.ingress.backup_listener import MAX_HTTP

ADMIN_SOCKET = "a.sock"  # as `serve_environment` names it; Serve puts it into a folder of the node's id
MARK_FILE, PAUSED_FILE = "alone.json", "paused.lst"  # beside HAProxy's configuration; the second says "on" in memory
RETURN_SOCKET = "r.sock"  # where HAProxy takes over a client's connection, which begins with a line of PROXY
TIMEOUT_S = 5.0
MAX_FDS = 253  # in a message of HAProxy's


class Mark(NamedTuple):
    """The only replica behind HAProxy's front: host:port of its server, HAProxy's process, the front's port."""

    server: str
    pid: int
    port: int


def write_mark(mark: Mark | None, folder: Path) -> None:
    """Write, or remove, the mark of the HAProxy that starts next with the configuration in `folder`."""
    (folder / PAUSED_FILE).touch()
    if mark is None:
        (folder / MARK_FILE).unlink(missing_ok=True)
    else:
        draft = folder / f"{MARK_FILE}.new"
        draft.write_text(json.dumps(mark))
        draft.replace(folder / MARK_FILE)


def read_mark(folder: Path) -> Mark | None:
    try:
        return Mark(*json.loads((folder / MARK_FILE).read_text()))
    except FileNotFoundError:
        return None


def pause_front(folder: Path, is_paused: bool) -> None:
    """Let HAProxy accept no connection of the front for HTTP, and close those that it has with their next answer; or
    accept them again."""
    most, change = (0, "add acl {} on") if is_paused else (MAX_HTTP, "clear acl {}")
    ask_haproxy(
        folder / ADMIN_SOCKET, f"set maxconn frontend http_frontend {most}; {change.format(folder / PAUSED_FILE)}"
    )


def is_running(mark: Mark, folder: Path) -> bool:
    """Whether the HAProxy of the mark has the admin socket; its predecessor has it until then."""
    match = re.search(r"^Pid: (\d+)$", ask_haproxy(folder / ADMIN_SOCKET, "show info"), re.MULTILINE)
    return match is not None and int(match[1]) == mark.pid


def ask_haproxy(admin: Path, command: str) -> str:
    """HAProxy's answer at its admin socket. Raises OSError."""
    with _connect(admin) as connection:
        connection.sendall(f"{command}\n".encode())
        with connection.makefile(errors="replace") as answer:
            return answer.read()


@contextmanager
def _connect(admin: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(admin))
        yield connection


def take_listeners(folder: Path, port: int) -> list[socket.socket]:
    """Duplicates of HAProxy's sockets that listen at a port. Raises OSError."""
    sockets: list[socket.socket] = []
    with _connect(folder / ADMIN_SOCKET) as connection:
        connection.sendall(b"_getsocks\n")
        count = connection.recv(4)
        num = int.from_bytes(count, sys.byteorder)
        if len(count) < 4:
            raise OSError("HAProxy has not said how many sockets it has")
        while len(sockets) < num:
            _, fds, *_ = socket.recv_fds(connection, 65_536, MAX_FDS)
            if not fds:
                raise OSError("HAProxy has not sent its sockets")
            sockets += (socket.socket(fileno=fd) for fd in fds)
            connection.sendall(b"\0")
    others = [each for each in sockets if each.family == socket.AF_UNIX or each.getsockname()[1] != port]
    for each in others:
        each.close()
    return [each for each in sockets if each not in others]
