"""Create and bind the gateway's socket: buffer sizes, encryption with the run's keys, and port.

Called by the gateway when it starts. Never reads or writes a message.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import zmq

from shoal.errors import ConfigError
from shoal.network_address import EXTERNAL_PROBE_HOST, WILDCARDS, find_local_address, is_loopback
from shoal.rl.part_specs import GatewaySpec
from shoal.rl.spec import RLSpec

MAX_UNREAD_MESSAGES = 16  # of one connection here; further ones wait at the sender
# A peer that vanishes silently (no network, no power) frees its descriptor after 60 + 4 * 15 s.
_KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 60),
    (zmq.TCP_KEEPALIVE_INTVL, 15),
    (zmq.TCP_KEEPALIVE_CNT, 4),
)
# Requested from the system: each connection uses one. Most systems default to 1,024; beyond that, libzmq leaves new
# clients without an answer and retries accepting them all the time.
MAX_OPEN_FILES = 65_536
_PORT_WAIT_S = 1.0  # for the previous gateway to release the port


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    spec: GatewaySpec,
    remembered_port: int = 0,
    curve_keys: tuple[bytes, bytes] | None = None,
) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER socket and its port: `spec.port`, or if that is 0, the remembered one while it is free, or any.

    Raises ConfigError when that fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_MESSAGES)  # limits memory for clients before their hello
    socket.setsockopt(zmq.MAXMSGSIZE, spec.max_message_bytes)
    socket.setsockopt(zmq.LINGER, 500)
    for option, value in _KEEPALIVE:
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IPV6, ":" in spec.host)
    if spec.curve and curve_keys is not None:
        socket.curve_publickey, socket.curve_secretkey = curve_keys
        socket.curve_server = True
    if spec.port or not remembered_port or not _try_bind(socket, spec.host, remembered_port):
        _bind(socket, spec.host, spec.port)
    endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return socket, int(endpoint.rpartition(":")[2])


def format_address(scheme: str, host: str, port: int) -> str:
    """The address for actors; an IPv6 address stands in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def resolve_reachable_host(host: str, node: str) -> str:
    """The host in the address for actors.

    For a wildcard, the address of this `node`; if the cluster knows the node only by loopback, this machine's outside
    address, if it has one.
    """
    if host not in WILDCARDS:
        return host
    return (find_local_address(EXTERNAL_PROBE_HOST) or node) if is_loopback(node) else node


def _format_endpoint(host: str, port: int | str) -> str:
    """The endpoint to bind: for localhost its address, since the resolver may lack it, or resolve it otherwise."""
    return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> None:
    try:
        socket.bind(_format_endpoint(host, port or "*"))
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if port and error.errno == zmq.EADDRINUSE:
            remedy = "end the process that listens there, choose another port, or 0 for any free one"
            raise ConfigError("gateway.port", port, f"cannot be bound on {host}: {error}", remedy) from None
        remedy = "choose an address of this machine, and a port that this process may listen on"
        raise ConfigError("gateway.host", host, f"cannot be bound with port {port}: {error}", remedy) from None


def _try_bind(socket: zmq.Socket[bytes], host: str, port: int) -> bool:
    """Bind the remembered port; False when another process holds it."""
    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            socket.bind(_format_endpoint(host, port))
        except zmq.ZMQError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def load_curve_keys(folder: Path) -> tuple[bytes, bytes]:
    """The run's CURVE key pair (public, secret), created once and stored privately in its folder."""
    path = folder / "curve.json"
    if not path.exists():
        public, secret = zmq.curve_keypair()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"public": public.decode(), "secret": secret.decode()}, file)
    pair: Mapping[str, str] = json.loads(path.read_text())
    return pair["public"].encode(), pair["secret"].encode()


def require_reachable_gateway(spec: RLSpec, host: str, head: str) -> None:
    """Raise ConfigError for a gateway on the loopback of a host that is not the head: no actor is there.

    host, head: the addresses of the gateway's host and of the head
    """
    gateway = spec.gateway
    if host == head or not is_loopback(gateway.host) or gateway.advertise or spec.learn_from_endpoint:
        return
    problem = f"is the loopback of {host}, which is not the head, and actors elsewhere cannot reach it"
    remedy = "give gateway.host=0.0.0.0 and gateway.curve=true, or gateway.advertise for a tunnel to it"
    raise ConfigError("gateway.host", gateway.host, problem, remedy)
