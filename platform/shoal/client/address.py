"""The address of an endpoint as a user writes it: which host is meant, asked in one place by all who decide by it; and
whether a proxy stands before it.

Called by the clients, by who looks for an endpoint, and by who gives a token away. Opens no connection.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shoal.errors import ConfigError
from shoal.network_address import is_loopback


def normalize_address(text: str) -> str:
    """The address without a slash at its end; `http://` is understood before HOST:PORT. Raises ConfigError."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    parse_host(url)
    return url


def parse_host(url: str) -> str:
    """The host, of IPv6 without brackets. Raises ConfigError for what is not the address of an endpoint."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if "[" in parts.netloc:
            ipaddress.ip_address(host)
        host.encode("idna")  # as the system does when it looks for the host
        is_address = bool(host) and parts.port != 0  # of a port above 65535 it raises
    except ValueError:
        is_address = False
    is_plain = url.isprintable() and not set(url) & set(" ?#\\")
    if not (is_address and is_plain and parts.scheme in ("http", "https")):
        raise ConfigError("url", url, "is not the address of an endpoint", "write http://HOST:PORT")
    return host


def find_proxy(url: str) -> str | None:
    """The proxy that the environment has for this address, as it stands there; None for none, and on this machine."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = (proxies.get(parts.scheme) or proxies.get("all") or "").strip()
    if not proxy or is_loopback(parse_host(url)) or any(map(proxy_bypass, (parts.netloc, parse_host(url)))):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
