"""Addresses of hosts: loopback or not, how other hosts reach this one, and connections to one that is lost."""

from __future__ import annotations

import ipaddress
import re
import socket

EXTERNAL_PROBE_HOST = "192.0.2.1"  # of RFC 5737, assigned to no host: routed like any address outside
WILDCARDS = ("*", "0.0.0.0", "::")  # all addresses of this machine
_ANY_PORT = 9
_ORIGIN = re.compile(r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:\d{1,5})?")
_IS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; 0 without a port. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    if found is None:
        raise ValueError("is not HOST or HOST:PORT, with an IPv6 address in brackets")
    host, port = found[1] or found[2], int(found[3]) if found[3] else 0
    if found[1]:
        ipaddress.IPv6Address(host)
    elif host not in WILDCARDS and not _IS_NAME.fullmatch(host):
        raise ValueError("has no host name or address before its port")
    if found[3] and not 0 < port <= 65535:
        raise ValueError(f"has the port {port}, which is not within 1 and 65535")
    return host, port


def require_origin(origin: str) -> str:
    """Check the origin of a web page, as browsers send it. Raises ValueError."""
    if origin != "null" and _ORIGIN.fullmatch(origin) is None:
        remedy = "in lower case, without a path and the scheme's own port"
        raise ValueError(f"{origin!r} is no origin such as https://game.example, {remedy}")
    return origin


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
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, lost_s - 1),
        (socket.TCP_USER_TIMEOUT, lost_s * 1000),
    ):
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
