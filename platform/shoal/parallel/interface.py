"""The network interface that a rank's gloo speaks by: that of the address by which the other ranks know its host.

Left to itself gloo asks what the host's own name means. Debian says 127.0.1.1, where no other host is, and a name that
nothing resolves becomes loopback as well. Called before a group is formed. Nccl finds its interface by itself.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"  # of torch; what a user has set stays
_ANY_PORT = 9  # nothing is sent
_ELSEWHERE = "192.0.2.1"  # of RFC 5737: nobody's


def speak_from(address: str) -> None:
    """Groups that this process forms from now on speak by the interface that has `address`, when one has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address.partition("%")[0] for each in addresses):
            os.environ.setdefault(VARIABLE, name)
            return


def speak_towards(first_host: str, has_others: bool) -> None:
    """The same by the address that leads to `first_host`, where there are ranks on other hosts, too: of the first host
    itself, whose own name leads to loopback, that which leads out."""
    address = address_towards(first_host)
    if address is not None and has_others and ipaddress.ip_address(address).is_loopback:
        address = address_towards(_ELSEWHERE)
    if address is not None:
        speak_from(address)


def address_towards(host: str) -> str | None:
    """The address by which `host` sees this one; None when there is no way there."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(place)
            return str(asking.getsockname()[0])
    except (OSError, UnicodeError):  # the latter of what can be no name
        return None
