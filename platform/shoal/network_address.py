"""Addresses of hosts: which of them stay within this machine, and by which others see it. Asks the system alone."""

from __future__ import annotations

import ipaddress
import socket

EXTERNAL_PROBE_HOST = "192.0.2.1"  # of RFC 5737: nobody's, and so beyond every network that this machine is in
_ANY_PORT = 9


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_local_address(host: str) -> str | None:
    """The address by which `host` sees this one; None when there is no way there. Sends nothing: it asks the routing
    table."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the latter of what can be no name
        return None
