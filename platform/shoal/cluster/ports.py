"""Free TCP ports for what is about to be started: chosen where the kernel gives none away, and held until it listens.

Called by whoever starts Ray, or an endpoint; imports no Ray.
"""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20_000  # below are those that programs have by default, Ray's workers among them
_port_counter = itertools.count(secrets.randbelow(1 << 16))


def get_candidate_ports(ephemeral: Path = EPHEMERAL_PORTS) -> range:
    """The ports that the kernel gives to nobody by itself, neither to who connects nor to who listens on any port.

    Below its own, or above when there are more; empty when all are its own. `ephemeral` is a file that names its first
    and last.
    """
    try:
        first, last = map(int, ephemeral.read_text().split())
    except FileNotFoundError:  # not Linux
        first, last = 32_768, 65_535
    return max(range(FIRST_PORT, max(FIRST_PORT, first)), range(max(FIRST_PORT, last + 1), 65_536), key=len)


def find_free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free on `host` a moment ago, and that only somebody who asks for it can take meanwhile.

    A process is given each port once before it is given one again, and begins where others hardly do.
    """
    with _bind_free_port(host) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def reserve_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Free TCP ports of `host` that nobody else is given while the context lasts.

    A server that asks to reuse its address, as Ray's do, can listen on them meanwhile; who only looks for a free port,
    as `find_free_port` in another process, finds them taken.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(_bind_free_port(host)) for _ in range(count)]
        for bound in sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which was to find it free
        yield [bound.getsockname()[1] for bound in sockets]


def _bind_free_port(host: str) -> socket.socket:
    ports = get_candidate_ports()
    for _ in ports:
        with suppress(OSError):
            return _bind(host, ports[next(_port_counter) % len(ports)])
    return _bind(host, 0)


def _bind(host: str, port: int) -> socket.socket:
    """A socket of TCP with this port; raises OSError when that is taken."""
    bound = socket.socket()
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
