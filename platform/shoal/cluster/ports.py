"""Free TCP ports for servers about to start: chosen outside the kernel's ephemeral range, and reserved until used.

Called before Ray or an endpoint starts; imports no Ray.
"""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20_000  # lower ones are many programs' defaults, Ray's workers among them
BLOCK_SIZE = 512
_port_counter = itertools.count(secrets.randbelow(1 << 16))


def get_candidate_ports(ephemeral: Path = EPHEMERAL_PORTS) -> range:
    """The ports outside the kernel's ephemeral range.

    Below that range, or above it if more are there; empty when the range covers all. `ephemeral` is the file with its
    first and last port.
    """
    try:
        first, last = map(int, ephemeral.read_text().split())
    except FileNotFoundError:  # not Linux
        first, last = 32_768, 65_535
    return max(range(FIRST_PORT, max(FIRST_PORT, first)), range(max(FIRST_PORT, last + 1), 65_536), key=len)


def find_free_port(host: str = LOOPBACK) -> int:
    """A TCP port that was free on `host` a moment ago, and that the kernel assigns to no other process.

    A process gets each port once before any is repeated, and starts where other processes rarely do.
    """
    with _bind_free_port(host) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def reserve_ports(count: int) -> Iterator[list[int]]:
    """Free TCP ports of loopback, reserved while the context lasts.

    A server that reuses addresses, as Ray's do, can listen on them meanwhile. `find_free_port` in another process finds
    them taken.
    """
    with ExitStack() as reserved:
        sockets = [reserved.enter_context(_bind_free_port(LOOPBACK)) for _ in range(count)]
        for bound in sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which must find it free
        yield [bound.getsockname()[1] for bound in sockets]


@contextmanager
def reserve_port_block() -> Iterator[range]:
    """`BLOCK_SIZE` ports that no other caller on this machine has; empty when all blocks are taken.

    Its first port says so: it is reserved while the context lasts, and a server must listen on it from then on, for as
    long as the block is used. Single ports of the block may be in use by anybody.
    """
    ports = get_candidate_ports()
    blocks = range(ports.start, ports.stop - BLOCK_SIZE + 1, BLOCK_SIZE)
    begin = next(_port_counter)
    for number in range(len(blocks)):
        first = blocks[(begin + number) % len(blocks)]
        with suppress(OSError):
            bound = _bind(LOOPBACK, first)
            break
    else:
        yield range(0)
        return
    with bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield range(first, first + BLOCK_SIZE)


def _bind_free_port(host: str) -> socket.socket:
    ports = get_candidate_ports()
    for _ in ports:
        with suppress(OSError):
            return _bind(host, ports[next(_port_counter) % len(ports)])
    return _bind(host, 0)


def _bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to this port. Raises OSError when the port is taken."""
    bound = socket.socket()
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
