"""Addresses of hosts: loopback or not, and how other hosts reach this one. Queries only the system."""

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
