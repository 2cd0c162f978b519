"""Sums over ranks of one host, through memory that they share: for CPU tensors, in place of gloo over loopback.

    one group    one anonymous file (memfd) that all have mapped: [2 turns][n ranks][CHUNK_BYTES]
    one meeting  from each rank to each other one, over sockets that only they hold: how many values it brings

A rank copies its values into its row, meets the others, and adds up all rows in the order of ranks, so that all have
the same bits; of more than two ranks each adds up a part, and a second meeting tells that all parts are there. Turns
alternate: who writes a row for the second time knows that all have read it, since they came to a meeting in between.
Neither file nor sockets have a name that outlives their processes, and no limit of /dev/shm holds.

Gloo wakes threads of its own for each sum, which on a host whose cores all compute takes longer than the sum itself
(docs/log). Called by plans that average gradients, and by batch normalisation.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.parallel.comm.shm_rendezvous import PEER_GONE, Peers, rendezvous, set_socket_timeouts
from shoal.parallel.comm.world import TIMEOUT_S

CHUNK_BYTES = 4 << 20  # of larger values so much is summed at a time
_COUNT_STRUCT = struct.Struct("<I")


class _BufferRows(NamedTuple):
    rows: list[Tensor]
    word: bytes


class ShmAllReduce:
    """One rank's place in the sums of its group. Every rank makes the same calls in the same order.

    waited_s:   seconds that this rank has spent in sums so far
    sent_bytes: what it would have sent for them in a ring, as the cost of collectives is counted
    memory:     that the ranks share, [2 turns, n ranks, CHUNK_BYTES]
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        """Raises OSError."""
        self._rank, self._peers = rank, list(peers.values())
        self.size = len(peers) + 1
        self.waited_s = self.sent_bytes = 0.0
        memory = _map_shared_memory(self._peers, rank, 2 * self.size * CHUNK_BYTES)
        set_socket_timeouts(peers)
        self.memory = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, CHUNK_BYTES)
        self._buffer_index = 0
        self._rows: dict[tuple[int, int, torch.dtype], _BufferRows] = {}

    @classmethod
    def try_create(cls, group: dist.ProcessGroup) -> ShmAllReduce | None:
        """Meet the other ranks of `group`; None, on all of them, unless gloo carries it within one host. Collective."""
        return rendezvous(group, socket.SOCK_STREAM, cls, cls.close)

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
            self._sync_peers(word)
            if self.size == 2:
                torch.add(rows[0], rows[1], out=part)
            else:
                self._sum_share(rows)
                self._sync_peers(word)
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
        self._sync_peers(word)
        everyone = torch.stack(rows).view(self.size, *mine.shape)
        self.sent_bytes += mine.nbytes * (self.size - 1)
        self.waited_s += time.perf_counter() - began_s
        return everyone

    def _next_rows(self, part: Tensor) -> _BufferRows:
        """Each rank's row of the next turn, as much of it as `part` needs; and what to say at the meeting."""
        self._buffer_index ^= 1
        key = (self._buffer_index, part.numel(), part.dtype)
        if key not in self._rows:
            size = part.numel() * part.element_size()
            rows = [row[:size].view(part.dtype) for row in self.memory[self._buffer_index]]
            self._rows[key] = _BufferRows(rows, _COUNT_STRUCT.pack(part.numel()))
        return self._rows[key]

    def _sync_peers(self, word: bytes) -> None:
        """Return when every rank has come here. The calls of the system order the writes before them, too."""
        try:
            for peer in self._peers:
                peer.send(word)
            for peer in self._peers:
                said = peer.recv(len(word), socket.MSG_WAITALL)
                if not said:
                    raise ConnectionError
                if said != word:
                    numbers = [_COUNT_STRUCT.unpack(each)[0] for each in (word, said)]
                    raise RuntimeError("ranks sum different things: {:,} values here, {:,} there".format(*numbers))
        except BlockingIOError as error:
            raise RuntimeError(f"Timed out: a rank of this host did not come within {TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise RuntimeError(PEER_GONE) from error

    def close(self) -> None:
        """Leave; who waits for this rank is told. Idempotent."""
        for peer in self._peers:
            peer.close()
        self._rows.clear()
        self.memory = self.memory.new_empty(0)  # the last that keeps it mapped


def _map_shared_memory(peers: list[socket.socket], rank: int, size: int) -> mmap.mmap:
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
