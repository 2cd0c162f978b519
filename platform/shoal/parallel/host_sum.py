"""Sums over ranks of one host, through memory that they share: for CPU tensors, in place of gloo over loopback.

    one group    one anonymous file (memfd) that all have mapped: [2 turns][n ranks][CHUNK_BYTES]
    one meeting  from each rank to each other one, over sockets that only they hold: how many values it brings

A rank copies its values into its row, meets the others, and adds up all rows in the order of ranks, so that all have
the same bits; of more than two ranks each adds up a part, and a second meeting tells that all parts are there. Turns
alternate: who writes a row for the second time knows that all have read it, since they came to a meeting in between.
Neither file nor sockets have a name that outlives their processes, and no limit of /dev/shm holds.

Gloo wakes threads of its own for each sum, which on a host whose cores all compute takes longer than the sum itself
(docs/log.md). Called by plans that average gradients, and by batch normalisation.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.parallel.world import TIMEOUT_S

T = TypeVar("T")
CHUNK_BYTES = 4 << 20  # of larger values so much is summed at a time
_WORD = struct.Struct("<I")
_FORMING_S = 10.0


class _Rows(NamedTuple):
    rows: list[Tensor]
    word: bytes


class HostSum:
    """One rank's place in the sums of its group. Every rank makes the same calls in the same order.

    waited_s:   seconds that this rank has spent in sums so far
    sent_bytes: what it would have sent for them in a ring, as the cost of collectives is counted
    """

    def __init__(self, rank: int, peers: list[socket.socket], memory: mmap.mmap) -> None:
        self._rank, self._peers = rank, peers
        self.size = len(peers) + 1
        self.waited_s = self.sent_bytes = 0.0
        for peer in peers:
            peer.settimeout(None)  # the system's own limit saves a call to poll
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(TIMEOUT_S), 0))
        self._turns = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, CHUNK_BYTES)
        self._turn = 0
        self._rows: dict[tuple[int, int, torch.dtype], _Rows] = {}

    @classmethod
    def form(cls, group: dist.ProcessGroup) -> HostSum | None:
        """Meet the other ranks of `group`; None, on all of them, unless gloo carries it within one host. Collective."""
        if dist.get_backend(group) != "gloo" or not hasattr(os, "memfd_create"):
            return None
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind("")  # Linux finds a name, which no file has
            listener.listen(dist.get_world_size(group))
            found = _gathered((_host(), listener.getsockname(), secrets.token_bytes(16)), group)
            if len({host for host, _, _ in found}) > 1:
                return None
            made: HostSum | None = None
            with suppress(OSError):
                made = cls._joined(dist.get_rank(group), listener, [(name, token) for _, name, token in found])
            if all(_gathered(made is not None, group)):
                return made
            if made is not None:
                made.close()
            return None

    @classmethod
    def _joined(cls, rank: int, listener: socket.socket, known: list[tuple[bytes, bytes]]) -> HostSum:
        """Connect to the ranks before this one, and be connected to by those after it. Raises OSError."""
        size = len(known)
        with ExitStack() as undo:
            peers: dict[int, socket.socket] = {}
            for other, (name, token) in enumerate(known[:rank]):
                peers[other] = peer = undo.enter_context(socket.socket(socket.AF_UNIX))
                peer.settimeout(_FORMING_S)
                peer.connect(name)
                peer.sendall(token + _WORD.pack(rank))
            listener.settimeout(_FORMING_S)
            while len(peers) < size - 1:
                peer = undo.enter_context(listener.accept()[0])
                peer.settimeout(_FORMING_S)
                said = peer.recv(20, socket.MSG_WAITALL)
                if said[:16] == known[rank][1]:  # anybody on this host can connect
                    peers[_WORD.unpack(said[16:])[0]] = peer
            memory = _shared([peers[other] for other in sorted(peers)], rank, 2 * size * CHUNK_BYTES)
            undo.pop_all()
        return cls(rank, [peers[other] for other in sorted(peers)], memory)

    def sum(self, values: Tensor, factor: float = 1.0) -> Tensor:
        """Make `values`, which are contiguous, the sum over all ranks times `factor`, and return them. Collective.

        Raises RuntimeError when another rank is gone, does not come, or comes with something else.
        """
        began_s = time.perf_counter()
        flat = values.view(-1)
        most = CHUNK_BYTES // flat.element_size()
        for part in (flat,) if flat.numel() <= most else flat.split(most):
            rows, word = self._next_rows(part)
            rows[self._rank].copy_(part)
            self._meet(word)
            if self.size == 2:
                torch.add(rows[0], rows[1], out=part)
            else:
                self._sum_share(rows)
                self._meet(word)
                part.copy_(rows[0])
            if factor != 1.0:
                part.mul_(factor)
        self.sent_bytes += 2 * values.nbytes * (self.size - 1) / self.size
        self.waited_s += time.perf_counter() - began_s
        return values

    def _sum_share(self, rows: list[Tensor]) -> None:
        """Of many rows, each rank adds up one part, in the first of them: nobody else reads that part there."""
        total, *others = (row.tensor_split(self.size)[self._rank] for row in rows)
        for other in others:
            total.add_(other)

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's values, [n, *mine], of at most CHUNK_BYTES each. Collective; raises as `sum` does."""
        began_s = time.perf_counter()
        flat = mine.view(-1)
        rows, word = self._next_rows(flat)
        rows[self._rank].copy_(flat)
        self._meet(word)
        everyone = torch.stack(rows).view(self.size, *mine.shape)
        self.sent_bytes += mine.nbytes * (self.size - 1)
        self.waited_s += time.perf_counter() - began_s
        return everyone

    def _next_rows(self, part: Tensor) -> _Rows:
        """Each rank's row of the next turn, as much of it as `part` needs; and what to say at the meeting."""
        self._turn ^= 1
        key = (self._turn, part.numel(), part.dtype)
        if key not in self._rows:
            size = part.numel() * part.element_size()
            rows = [row[:size].view(part.dtype) for row in self._turns[self._turn]]
            self._rows[key] = _Rows(rows, _WORD.pack(part.numel()))
        return self._rows[key]

    def _meet(self, word: bytes) -> None:
        """Return when every rank has come here. The calls of the system order the writes before them, too."""
        try:
            for peer in self._peers:
                peer.send(word)
            for peer in self._peers:
                said = peer.recv(len(word), socket.MSG_WAITALL)
                if not said:
                    raise ConnectionError
                if said != word:
                    numbers = [_WORD.unpack(each)[0] for each in (word, said)]
                    raise RuntimeError("ranks sum different things: {:,} values here, {:,} there".format(*numbers))
        except BlockingIOError as error:
            raise RuntimeError(f"Timed out: a rank of this host did not come within {TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise RuntimeError("Connection closed by peer: a rank of this host is gone") from error

    def close(self) -> None:
        """Leave; who waits for this rank is told. Idempotent."""
        for peer in self._peers:
            peer.close()
        self._rows.clear()
        self._turns = self._turns.new_empty(0)  # the last that keeps the memory mapped


def _host() -> str:
    """The same for two processes that can reach each other's sockets and memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    found: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _shared(peers: list[socket.socket], rank: int, size: int) -> mmap.mmap:
    """The memory: made by the first rank, handed to all others. Raises OSError."""
    if rank == 0:
        descriptor = os.memfd_create("shoal-sums")
        os.truncate(descriptor, size)
        for peer in peers:
            socket.send_fds(peer, [b"\x01"], [descriptor])
    else:
        _, descriptors, _, _ = socket.recv_fds(peers[0], 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise ConnectionError("the first rank is gone")
        [descriptor] = descriptors
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
