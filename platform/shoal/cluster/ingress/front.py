"""How clients reach HAProxy: its addresses, its certificate, the proxies it trusts. Written for `haproxy_config`.

`install_front` writes a cluster's front into the folder of HAProxy's files, once per host, before an endpoint starts;
`haproxy_config` reads it each time HAProxy starts. Without one HAProxy listens in plain HTTP where Serve puts it, if
that is loopback. The files hold the private key, and only their owner may read them. Imports no Ray.
"""

from __future__ import annotations

import csv
import errno
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shoal.atomic_file import replace_synced
from shoal.cluster.ingress.haproxy_config import FRONT_FILE
from shoal.cluster.ingress.shared_listener import TIMEOUT_S, ask_haproxy
from shoal.errors import ConfigError

CERTIFICATE_FILE, CLIENT_CA_FILE = "front.pem", "client-ca.pem"
MAX_PROXIES = 8  # trusted proxies in a row before a client
# The subject of the client's certificate, whose control characters RFC 2253 escapes.
_ADD_SUBJECT = (
    'http-request set-header shoal-from "%[req.fhdr(shoal-from)] %[ssl_c_s_dn(,0,rfc2253)]" if { ssl_c_used }'
)


class CertificateFiles(NamedTuple):
    """The user's files; `client_ca` "" where clients need no certificate."""

    certificate: str
    key: str
    client_ca: str = ""


@dataclass(frozen=True)
class Front:
    """The front of a cluster's endpoints.

    host:      an address, of IPv4 or IPv6; 0.0.0.0 and :: are every one of their kind, and :: also those of IPv4
    pem:       the certificate, its chain and its key; empty for plain HTTP
    client_ca: the authorities of which a client needs a certificate; empty: it needs none
    trusted_proxies: networks whose X-Forwarded-* count
    num_threads: HAProxy's
    spec:      the fields of the endpoint's spec that this is made of, for endpoints that join it
    node, address: where each node has an ingress, the node's id and address (`every_node`); else ""
    """

    host: str = "127.0.0.1"
    pem: bytes = field(default=b"", repr=False)
    client_ca: bytes = b""
    trusted_proxies: tuple[str, ...] = ()
    num_threads: int = 1
    spec: str = "{}"
    node: str = ""
    address: str = ""


def install_front(front: Front, folder: Path) -> None:
    """Write the front into the folder of HAProxy's files."""
    write_certificate(front.pem, front.client_ca, folder)
    replace_synced(folder / FRONT_FILE, json.dumps(_describe(front, folder)).encode())


def read_front_field(folder: Path, name: str) -> str:
    """`Front.spec` or `Front.node` of the front in this folder; "" without one."""
    path = folder / FRONT_FILE
    return str(json.loads(path.read_text()).get(name, "")) if path.exists() else ""


def write_certificate(pem: bytes, client_ca: bytes, folder: Path) -> None:
    """Write, or remove, the files that HAProxy reads when it starts."""
    for name, content in ((CERTIFICATE_FILE, pem), (CLIENT_CA_FILE, client_ca)):
        if content:
            replace_synced(folder / name, content)
        else:
            (folder / name).unlink(missing_ok=True)


def _describe(front: Front, folder: Path) -> dict[str, object]:
    options = {"http": "", "grpc": ""}
    if front.pem:
        verify = f" ca-file {folder / CLIENT_CA_FILE} verify required no-tls-tickets" if front.client_ca else ""
        for protocol, offered in (("http", "h2,http/1.1"), ("grpc", "h2")):
            options[protocol] = f" ssl crt {folder / CERTIFICATE_FILE} alpn {offered}{verify}"
    # Two sockets for ::, so that clients of IPv4 have addresses of IPv4. The kernel has v6only for any other address of
    # IPv6 as well, and HAProxy takes over its predecessor's socket only if the configuration says the same.
    hosts = ["0.0.0.0", "::"] if front.host == "::" else [front.host]
    v6only = " v6only" if ":" in front.host else ""
    return {
        "hosts": hosts,
        "options": {protocol: v6only + text for protocol, text in options.items()},
        "num_threads": front.num_threads,
        "trusts": bool(front.trusted_proxies),
        "rules": [*_trust(front.trusted_proxies), *([_ADD_SUBJECT] if front.client_ca else ())],
        "spec": front.spec,
        **({"node": front.node, "address": front.address} if front.node else {}),
    }


def _trust(networks: Sequence[str]) -> list[str]:
    """Rules that take the client's address from X-Forwarded-For: the last one that is no trusted proxy's.

    An entry counts only if all after it, and the connection, are trusted proxies'. One that is no address ends it.
    """
    if not networks:
        return []
    rules = []
    trusted = "via-1"
    those = " ".join(networks)
    rules.append(f"acl via-1 src {those}")
    for number in range(1, MAX_PROXIES + 1):
        entry = f"req.hdr_ip(x-forwarded-for,-{number})"
        rules.append(f'http-request set-header shoal-from "%[{entry}]" if {trusted} {{ {entry} -m found }}')
        rules.append(f"acl via-{number + 1} {entry} {those}")
        trusted += f" via-{number + 1}"
    return rules


def require_listenable(host: str, ports: Mapping[str, int | None]) -> None:
    """Raises ConfigError for an address that is not this host's, or a port that others have.

    ports: by field; none, and 0, is any free one
    """
    for name, port in {"host": 0, **ports}.items():
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that end are no listeners
                listener.bind(address)
        except OSError as error:
            if name == "host":
                problem, remedy = f"is no address of the cluster's head ({error.strerror})", "0.0.0.0 or :: for all"
                raise ConfigError("endpoint.host", host, problem, f"give one of it, or {remedy} of them") from None
            problem = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            remedy = "give another, or 0 for a free one"
            raise ConfigError(f"endpoint.{name}", port, f"{problem} at {host}", remedy) from None


def is_listening(host: str, port: int) -> bool:
    """Whether this host accepts connections at this address."""
    try:
        with socket.create_connection((host, port), TIMEOUT_S):
            return True
    except OSError:
        return False


def is_routed(application: str, admin_socket: Path) -> bool:
    """Whether HAProxy, asked at its socket, sends requests to a replica of this application of Serve's."""
    try:
        rows = list(csv.DictReader(ask_haproxy(admin_socket, "show stat").splitlines()))
    except OSError:  # it is starting
        return False
    servers = [row for row in rows if row["# pxname"] == f"http-{application}" and row["act"] == "1"]
    return any(row["status"].startswith("UP") for row in servers if row["svname"] != "BACKEND")
