"""A connection to a gateway: a DEALER socket, encrypted when the gateway's key is known; its lock, and the pauses
between attempts.

Called by the client for each attempt. An invalid address or key raises ConfigError, never ZMQError.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import threading
import time
import zlib
from collections.abc import Sequence

import zmq

from shoal.errors import Closed, ConfigError, ShoalError
from shoal.network_address import is_loopback

_log = logging.getLogger(__name__)
_ADDRESS_REMEDY = "give tcp://host:port, as the job prints it"
_MOVED_REMEDY = "give all addresses that it may have, tcp://a:5555|tcp://b:5555, or where the run keeps its address"
_LOCATIONS = ("/", "file:", "s3:", "gs:", "az:")
_KEY_REMEDY = "give the gateway's public key: 40 characters of Z85 text, as the job prints it"
_MAX_PAUSE_S = 1.0


def check_address(address: str, server_key: str) -> None:
    """Reject at once an address or key that ZeroMQ would misread."""
    port = address.rpartition(":")[2]
    if not address.startswith("tcp://") or not (port.isdecimal() and 0 < int(port) <= 65535):
        raise ConfigError("connect", address, "is not an address", _ADDRESS_REMEDY)
    if server_key and len(server_key) != 40:  # 32 characters would pass for a key in binary
        raise ConfigError("server-key", server_key, f"has {len(server_key)} characters, not 40", _KEY_REMEDY)


class GatewayAddresses:
    """Where a gateway may be. Each attempt takes the next one; after a session, first the one of that session.

    text:    addresses, with `|` between. One may be a file, or an object of a store by its URL, that has the address.
             Where a run has several gateways, an address is that of each, with `+` between: an actor has one by its id
    current: that of the newest attempt
    """

    def __init__(self, text: str, server_key: str, actor_id: str = "") -> None:
        self._texts = text.split("|")
        self._next_index = 0
        self._read = ""
        self._num_shards = 1
        self._shard = self._welcomed_shard = zlib.crc32(actor_id.encode())
        self.current = self._welcomed = ""
        for each in self._texts:
            if not each.startswith(_LOCATIONS):
                for address in _split_shards(each):
                    check_address(address, server_key)

    def __str__(self) -> str:
        return "|".join(self._texts)

    def get_next(self) -> str:
        """The address for an attempt; "" where it cannot be read."""
        text = self._texts[self._next_index % len(self._texts)]
        self._next_index += 1
        self.current = text
        if text.startswith(_LOCATIONS):
            from shoal.store import open_store  # an actor with an address needs no store

            folder, _, name = text.rpartition("/")
            try:
                address = self._choose(open_store(folder).read(name).decode().strip())
                check_address(address, "")
                self._read = address
            except (OSError, ShoalError, UnicodeDecodeError) as error:
                _log.warning("the gateway's address cannot be read from %s: %s", text, error)
            self.current = self._read
        else:
            self.current = self._choose(text)
        return self.current

    def move(self) -> None:
        """Let the next attempts be at another of the run's gateways, if it has several."""
        self._shard += 1

    @property
    def is_other(self) -> bool:
        """Whether the newest attempt was at another of the run's gateways than the newest session."""
        return self._welcomed != "" and (self._shard - self._welcomed_shard) % self._num_shards != 0

    def keep(self) -> None:
        """The newest attempt has led to a session."""
        self._next_index -= 1
        if self._welcomed not in ("", self.current):
            _log.warning("the gateway has moved from %s to %s", self._welcomed, self.current)
        self._welcomed = self.current
        self._welcomed_shard = self._shard

    def _choose(self, text: str) -> str:
        shards = _split_shards(text)
        self._num_shards = len(shards)
        return shards[self._shard % len(shards)]


def _split_shards(text: str) -> list[str]:
    return re.split(r"\+(?=tcp://)", text)


def describe_silence(server_key: str, has_connected: bool) -> str:
    """Why a gateway may not answer: CURVE fails in silence."""
    if has_connected:
        return f"it did before, so it has ended, or moved to another host: {_MOVED_REMEDY}"
    if server_key:
        return f"if it is there, its server key is another than {server_key}, or it has none"
    return "if it prints a server key, it answers only actors that have it (--server-key)"


def is_on_this_host(address: str) -> bool:
    """Whether a gateway is at a loopback address, which may also be a tunnel's."""
    return is_loopback(address.removeprefix("tcp://").rpartition(":")[0].strip("[]"))


def connect_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: str, server_key: str, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """A socket that connects, and goes on trying to, in the background. Raises ConfigError."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    field = "server-key"
    value = server_key
    problem = "is not a CURVE key"
    remedy = _KEY_REMEDY
    try:
        if server_key:
            socket.curve_serverkey = server_key.encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        field = "connect"
        value = address
        problem = "is not an address"
        remedy = _ADDRESS_REMEDY
        socket.setsockopt(zmq.IPV6, address.count(":") > 2)  # tcp://[::1]:port
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(field, value, f"{problem}: {error}", remedy) from None
    return socket


def make_arrival_poller(socket: zmq.Socket[bytes]) -> zmq.Poller | None:
    """A poller for the next message, for a thread that releases the lock meanwhile; None when one has arrived.

    Another thread with the lock may take the message or its signal: poll again before long.
    """
    if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    poller = zmq.Poller()
    poller.register(socket.fileno(), zmq.POLLIN)
    return poller


def format_actor_options(address: str, env: str, server_key: str, ignored: Sequence[str] = ()) -> list[str]:
    """The options of `python -m shoal.actor` for a run; a key may begin with a dash."""
    options = ["--connect", address, "--env", env, *([f"--server-key={server_key}"] if server_key else [])]
    return [*options, *(f"--ignore={each}" for each in ignored)]


def format_actor_command(address: str, env: str, server_key: str, ignored: Sequence[str] = ()) -> str:
    """The command that starts an actor for a run."""
    return shlex.join(["python", "-m", "shoal.actor", *format_actor_options(address, env, server_key, ignored)])


class SocketLock:
    """The holder owns the socket. Locking raises Closed in a process forked from the one with the context: ZeroMQ's
    threads do not exist there, so nothing would ever be sent or received."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = 0  # of the process with the context; 0 before it exists

    def create_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """Create the socket's context."""
        self._pid = os.getpid()
        return zmq.Context()

    @property
    def is_owned_elsewhere(self) -> bool:
        """Whether the socket belongs to another process."""
        return self._pid not in (0, os.getpid())

    def __enter__(self) -> None:
        if self.is_owned_elsewhere:  # before the lock, which a thread of that process may have held at the fork
            raise Closed("the client belongs to the process that connected it: make one in each")
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class ReconnectBackoff:
    """Pauses between attempts to connect: each is twice the one before, up to a second, until an acknowledgement.

    next_at: the earliest time (time.monotonic()) of the next attempt
    """

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s, self._number = first_pause_s, 0
        self.next_at = 0.0

    def record_attempt(self) -> None:
        """Count an attempt. The pause starts here: short calls in a row must reach an attempt, too."""
        pause_s = min(_MAX_PAUSE_S, self._first_pause_s * 2 ** min(self._number, 10))
        self._number, self.next_at = self._number + 1, time.monotonic() + pause_s

    def reset(self) -> None:
        """The connection works: start again with the first pause."""
        self._number, self.next_at = 0, 0.0
