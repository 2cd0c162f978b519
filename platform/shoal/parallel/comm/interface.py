"""The network interface that a rank's gloo speaks by: that of the address by which the other ranks know its host.

Left to itself gloo asks what the host's own name means. Debian says 127.0.1.1, where no other host is, and a name that
nothing resolves becomes loopback as well. Called before a group is formed. Nccl finds its interface by itself.
"""

from __future__ import annotations

import os

import psutil

from shoal.network_address import ELSEWHERE, address_towards, is_loopback

VARIABLE = "GLOO_SOCKET_IFNAME"  # of torch; what a user has set stays


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
    if address is not None and has_others and is_loopback(address):
        address = address_towards(ELSEWHERE)
    if address is not None:
        speak_from(address)
