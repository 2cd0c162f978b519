"""Addresses of hosts: loopback or not, how other hosts reach this one, and connections to one that is lost."""

from __future__ import annotations

import ipaddress
import socket

EXTERNAL_PROBE_HOST = "192.0.2.1"  # of RFC 5737, assigned to no host: routed like any address outside
_ANY_PORT = 9


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_local_address(host: str) -> str | None:
    """This machine's address as seen by `host`; None without a route. Sends nothing: it queries the routing table."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # UnicodeError: not a host name
        return None


def watch_host(opened: socket.socket, lost_s: int) -> None:
    """Let a TCP connection fail when nothing has come from the peer's host for so long, also while it is idle.

    A dead process closes its connections by itself, a lost host none.
    """
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, lost_s - 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_s * 1000)
