"""Connect ranks of one host: private sockets, in addition to their process group.

Called by `shm_all_reduce` and `shm_p2p`, which define the messages and use of memory.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

import torch.distributed as dist

from shoal.channel.memory import get_boot_id
from shoal.parallel.comm.world import TIMEOUT_S

T = TypeVar("T")
Peers = dict[int, socket.socket]  # by rank of the group, without this one
PEER_GONE = "Connection closed by peer: a rank of this host is gone"
_RANK_STRUCT = struct.Struct("<I")
_CONNECT_TIMEOUT_S = 10.0


def rendezvous(
    group: dist.ProcessGroup, kind: socket.SocketKind, make: Callable[[int, Peers], T], undo: Callable[[T], None]
) -> T | None:
    """The result of `make` with a rank and its connections to all others, on every rank; None, on all of them, unless
    gloo carries the group within one host and `make` succeeds on every rank. Collective.

    make: may raise OSError
    undo: releases the result if other ranks failed
    """
    if dist.get_backend(group) != "gloo" or not hasattr(os, "memfd_create"):
        return None
    with ExitStack() as closing:
        listener = closing.enter_context(socket.socket(socket.AF_UNIX, kind))
        listener.bind("")  # an abstract name, chosen by Linux, without a file
        listener.listen(dist.get_world_size(group))
        ranks = _all_gather((identify_host(), listener.getsockname(), secrets.token_bytes(16)), group)
        if len({host for host, _, _ in ranks}) > 1:
            return None
        result: T | None = None
        with suppress(OSError):
            result = _connect_peers(dist.get_rank(group), listener, [(name, token) for _, name, token in ranks], make)
        if all(_all_gather(result is not None, group)):
            return result
        if result is not None:
            undo(result)
        return None


def _connect_peers(
    rank: int, listener: socket.socket, known: list[tuple[bytes, bytes]], make: Callable[[int, Peers], T]
) -> T:
    """Connect to the ranks before this one, and accept those after it. Raises OSError."""
    with ExitStack() as undo:
        peers: Peers = {}
        for other, (name, token) in enumerate(known[:rank]):
            peers[other] = peer = undo.enter_context(socket.socket(socket.AF_UNIX, listener.type))
            peer.settimeout(_CONNECT_TIMEOUT_S)
            peer.connect(name)
            peer.sendall(token + _RANK_STRUCT.pack(rank))
        listener.settimeout(_CONNECT_TIMEOUT_S)
        while len(peers) < len(known) - 1:
            peer = undo.enter_context(listener.accept()[0])
            peer.settimeout(_CONNECT_TIMEOUT_S)
            greeting = peer.recv(20, socket.MSG_WAITALL)
            if greeting[:16] == known[rank][1]:  # any process on this host can connect
                peers[_RANK_STRUCT.unpack(greeting[16:])[0]] = peer
        result = make(rank, {other: peers[other] for other in sorted(peers)})
        undo.pop_all()
    return result


def set_socket_timeouts(peers: Peers) -> None:
    """Set the system's own timeout of the socket, which saves a call to poll."""
    for peer in peers.values():
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(TIMEOUT_S), 0))


def identify_host() -> str:
    """An id that is equal for two processes that can reach each other's sockets and memory."""
    return f"{get_boot_id()} {os.stat('/proc/self/ns/net').st_ino}"


def _all_gather(value: T, group: dist.ProcessGroup) -> list[T]:
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
