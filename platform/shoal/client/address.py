"""The address of an endpoint as a user writes it: which host is meant, asked in one place by all who decide by it.

Called by the clients, by who looks for an endpoint, and by who gives a token away. Opens no connection.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from shoal.errors import ConfigError


def address_of(text: str) -> str:
    """The address without a slash at its end; `http://` is understood before HOST:PORT. Raises ConfigError."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    host_of(url)
    return url


def host_of(url: str) -> str:
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
