"""Parses the address of an endpoint as a user writes it: its host, and the proxy before it.

Called by the clients, by the search for an endpoint, and before a token is sent. Opens no connection.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shoal.errors import ConfigError
from shoal.network_address import is_loopback


def normalize_address(text: str) -> str:
    """The address without a final slash; `http://` is the default before HOST:PORT. Raises ConfigError."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    parse_host(url)
    return url


def parse_host(url: str) -> str:
    """The host, for IPv6 without brackets. Raises ConfigError for an invalid address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if "[" in parts.netloc:
            ipaddress.ip_address(host)
        host.encode("idna")  # as the system's resolver does
        is_address = bool(host) and parts.port != 0  # it raises for a port above 65535
    except ValueError:
        is_address = False
    is_plain = url.isprintable() and not set(url) & set(" ?#\\")
    if not (is_address and is_plain and parts.scheme in ("http", "https")):
        raise ConfigError("url", url, "is not the address of an endpoint", "write http://HOST:PORT")
    return host


def find_proxy(url: str) -> str | None:
    """The environment's proxy for this address, unparsed; None without one, and for this machine."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = (proxies.get(parts.scheme) or proxies.get("all") or "").strip()
    if not proxy or is_loopback(parse_host(url)) or any(map(proxy_bypass, (parts.netloc, parse_host(url)))):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
