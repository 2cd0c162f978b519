"""Where each node has an ingress: what HAProxy's configuration on one of them needs. Imports the standard library only.

Serve starts HAProxy on a node as soon as a replica has a place there, and starts it again when the replica is ready. In
between, the replica installs the node's front (`front.install_front`). A HAProxy without it listens on a unix socket
alone, so it never has an address or a protocol that the endpoint's spec does not have. The front names its node: what a
former cluster has left on a host, or a second node of the same host, opens nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.network_address import is_loopback

# Serve names what is on HAProxy's own node by loopback. Replicas listen at their node's address alone, where the other
# nodes' HAProxies reach them.
_LOCAL_SERVER = re.compile(r"( *server \S+ )(?:127\.0\.0\.1|::1):(\d+ .*)")
# Serve's health check that fails whatever happens: the node is being left, or has heard of no replica yet.
_UNHEALTHY = re.compile(r' *http-request return status 503 .* string "(?!Service Unavailable").*" if healthcheck')
_HEALTH = "    http-request return status 503 errorfiles shoal if { path -m reg ^(/[^/]+)?/v2/health/(live|ready)$ }"


def read_front(path: Path, node: str) -> dict[str, Any] | None:
    """The front in this file for HAProxy of `node`, without addresses if it is another node's; None without a file."""
    front: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return {"hosts": []} if front and front.get("node", node) != node else front


def list_addresses(front: Mapping[str, Any], address: str, port: str, closed: str) -> list[str]:
    """Where a front listens.

    address: that of Serve's configuration, which is used without a front, if it is loopback
    closed:  where no client comes
    """
    hosts = front.get("hosts", [address] if is_loopback(address) else [])
    return [f"{host}:{port}" for host in hosts] or [closed]


def use_node_address(lines: list[str], address: str) -> list[str]:
    """The lines of a back end, with the replicas of HAProxy's node at the node's address; "": they are on loopback."""
    return [_LOCAL_SERVER.sub(rf"\g<1>{address}:\2", line) for line in lines] if address else lines


def refuse_health(front: list[str]) -> list[str]:
    """A rule that fails the protocol's health checks where Serve's own fails: a balancer leaves the node in time."""
    return [_HEALTH] if any(_UNHEALTHY.fullmatch(line) for line in front) else []
