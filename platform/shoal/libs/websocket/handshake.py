"""Which requests become connections: by path, origin, and no token in the address. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import parse_qs, unquote, urlsplit

from shoal.network_address import is_loopback


@dataclass(frozen=True)
class HandshakeRules:
    """Of one gateway.

    policy:  its name; empty where it has none
    origins: of pages that may connect
    is_tls:  the address is `wss`: what it names is what has the certificate
    """

    policy: str
    origins: Collection[str]
    is_tls: bool

    def find_problem(
        self, path: str, host: str, origin: str | None, others: Collection[str]
    ) -> tuple[HTTPStatus, str] | None:
        """Why a request is rejected; None for a good one. others: policies of the same run, which have paths here."""
        if {"token", "access_token"} & parse_qs(path.partition("?")[2], keep_blank_values=True).keys():
            return HTTPStatus.BAD_REQUEST, "the token goes into hello, not into the address: addresses are logged"
        name = find_policy(path)
        if not (name in others or name == self.policy or (not name and not others)):
            paths = " or ".join(f"/{each}" for each in sorted({self.policy, *others}))
            return HTTPStatus.NOT_FOUND, f"no policy has the path /{name[:64]}: connect to {paths}"
        if origin is not None and origin not in self.origins and not self._is_own(origin, host):
            return (
                HTTPStatus.FORBIDDEN,
                f"pages of {origin[:256]} may not connect: gateway.origins names those that may",
            )
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether it is a page of this address, and no other site can make the address mean this machine."""
        try:
            site, own = urlsplit(origin).hostname or "", urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return (is_loopback(site) and is_loopback(own)) or (site == own != "" and (self.is_tls or _is_address(own)))


def find_policy(path: str) -> str:
    """The name in a path; "" without one."""
    return unquote(path.partition("?")[0]).strip("/")


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False
