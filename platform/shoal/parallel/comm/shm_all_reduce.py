"""Sums and gathers between ranks of one host through shared memory: for CPU tensors, instead of gloo over loopback.

    one group    one anonymous file (memfd), mapped by all ranks: [2 turns][n ranks][CHUNK_BYTES]
    pieces       another file, [n ranks][size], for values that are born there, and read there by all
    one barrier  a message between each pair of ranks, over private sockets: the number of values

A rank copies its values into its row (`next_row`) and waits at a barrier. Of two ranks, each adds the other's row to
its values; of more, each adds up a part of all rows, and a second barrier signals that all parts are done. So all have
the same bits. Turns alternate: a rank that reuses a row knows that all have read it, since a
barrier lay in between. Neither file nor sockets have a name that outlives their processes, and /dev/shm's limit does
not apply.

Gloo wakes threads of its own for each sum, which on a fully loaded host takes longer than the sum (decision 010); and
it copies what it gathers or scatters, into fresh memory (decision 076). Called by plans that average gradients, by
sharded ones, and by batch normalisation.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shoal.parallel.comm.shm_rendezvous import PEER_GONE, Peers, rendezvous, set_socket_timeouts
from shoal.parallel.comm.world import TIMEOUT_S

CHUNK_BYTES = 4 << 20  # larger values are summed in chunks of this size
_COUNT_STRUCT = struct.Struct("<Q")


class _BufferRows(NamedTuple):
    rows: list[Tensor]
    message: bytes


class ShmAllReduce:
    """One rank's part in the sums of its group. Every rank makes the same calls in the same order.

    waited_s:   seconds that this rank has spent in sums so far
    sent_bytes: the bytes that a ring would have sent, as the cost of collectives is counted
    memory:     shared by the ranks, [2 turns, n ranks, CHUNK_BYTES]
    pieces:     of each rank, which all can read (`reserve`)
    gathered:   the first of them once more, where all ranks write
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        """Raises OSError."""
        self.rank, self._peers = rank, list(peers.values())
        self.size = len(peers) + 1
        self.waited_s = self.sent_bytes = 0.0
        memory = _map_shared_memory(self._peers, rank, 2 * self.size * CHUNK_BYTES)
        set_socket_timeouts(peers)
        self.memory = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, CHUNK_BYTES)
        self.gathered, self.pieces = torch.empty(0), list[Tensor]()
        self._buffer_index = 0
        self._rows: dict[tuple[int, int, torch.dtype], _BufferRows] = {}
        self._next = _BufferRows([], b"")

    @classmethod
    def try_create(cls, group: dist.ProcessGroup) -> ShmAllReduce | None:
        """Connect the ranks of `group`; None, on all of them, unless gloo carries it within one host. Collective."""
        return rendezvous(group, socket.SOCK_STREAM, cls, cls.close)

    def sum(self, values: Tensor, factor: float = 1.0) -> Tensor:
        """Replace `values`, which are contiguous, by the sum over all ranks times `factor`; returns them. Collective.

        Raises RuntimeError when another rank is gone, does not come, or calls with other values.
        """
        flat = values.view(-1)
        most = CHUNK_BYTES // flat.element_size()
        for part in (flat,) if flat.numel() <= most else flat.split(most):
            began_s = time.perf_counter()
            self.next_row(part).copy_(part)
            self.waited_s += time.perf_counter() - began_s
            self.sum_rows([part], lambda row: [row])
            if factor != 1.0:
                part.mul_(factor)
        return values

    def has_row_for(self, values: Tensor) -> bool:
        """Whether `next_row` is large enough."""
        return values.nbytes <= CHUNK_BYTES

    def next_row(self, like: Tensor) -> Tensor:
        """Where the values of this rank belong for the next `sum_rows`, as many as those of `like` and of its type.

        like: has a row (`has_row_for`)
        """
        self._next = self._next_rows(like)
        return self._next.rows[self.rank]

    def sum_rows(self, values: list[Tensor], divide: Callable[[Tensor], list[Tensor]]) -> None:
        """Replace `values`, which this rank has copied into its `next_row`, by their sums over all ranks. Collective;
        raises as `sum` does.

        divide: the parts of a row, as `values`
        """
        began_s = time.perf_counter()
        rows, message = self._next
        self._sync_peers(message)
        if self.size == 2:  # two numbers have the same sum in either order
            torch._foreach_add_(values, divide(rows[1 - self.rank]))
        else:
            # Each rank adds up one part, in the first row, where no other rank reads that part.
            total, *others = (row.tensor_split(self.size)[self.rank] for row in rows)
            for other in others:
                total.add_(other)
            self._sync_peers(message)
            torch._foreach_copy_(values, divide(rows[0]))
        self.sent_bytes += 2 * rows[0].nbytes * (self.size - 1) / self.size
        self.waited_s += time.perf_counter() - began_s

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's values, [n, *mine], of at most CHUNK_BYTES each. Collective; raises as `sum` does."""
        began_s = time.perf_counter()
        flat = mine.view(-1)
        rows, message = self._next_rows(flat)
        rows[self.rank].copy_(flat)
        self._sync_peers(message)
        everyone = torch.stack(rows).view(self.size, *mine.shape)
        self.sent_bytes += mine.nbytes * (self.size - 1)
        self.waited_s += time.perf_counter() - began_s
        return everyone

    def reserve(self, size_bytes: int) -> None:
        """Map a piece of memory for each rank, of `size_bytes`, to `lend`. Pages exist once used. Collective; raises
        OSError."""
        size_bytes += -size_bytes % mmap.PAGESIZE
        memory = _map_shared_memory(self._peers, self.rank, self.size * size_bytes)
        first, *others = (
            torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes, offset=rank * size_bytes)
            for rank in (0, *range(self.size))
        )
        self.gathered, self.pieces = first, others

    def lend(self, piece: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for `size` values in `piece`, once every rank has come here: none reads what is in any piece.
        Collective; raises as `sum` does."""
        began_s = time.perf_counter()
        self._sync_peers(_COUNT_STRUCT.pack(size))
        self.waited_s += time.perf_counter() - began_s
        return piece[: size * dtype.itemsize].view(dtype)

    def gather_lent(self, mine: Tensor) -> None:
        """Wait until every rank has written its part, as large as `mine`, into what was lent of `gathered`. Collective;
        raises as `sum` does."""
        began_s = time.perf_counter()
        self._sync_peers(_COUNT_STRUCT.pack(mine.numel()))
        self.sent_bytes += mine.nbytes * (self.size - 1)
        self.waited_s += time.perf_counter() - began_s

    def sum_scattered(self, total: Tensor, parts: Tensor, factor: float = 1.0) -> None:
        """Fill `total` [k] with this rank's part of the sum over all ranks of `parts` [n * k], times `factor`. Each of
        them has been lent of its rank's piece. Collective; raises as `sum` does."""
        began_s = time.perf_counter()
        self._sync_peers(_COUNT_STRUCT.pack(parts.numel()))
        begin, size = self.rank * total.nbytes, total.nbytes
        first, second, *others = (piece[begin : begin + size].view(parts.dtype) for piece in self.pieces)
        torch.add(first, second, out=total)
        for other in others:
            total.add_(other)
        if factor != 1.0:
            total.mul_(factor)
        self.sent_bytes += parts.nbytes * (self.size - 1) / self.size
        self.waited_s += time.perf_counter() - began_s

    def _next_rows(self, part: Tensor) -> _BufferRows:
        """Each rank's row of the next turn, as far as `part` needs it; and the message for the barrier."""
        self._buffer_index ^= 1
        key = (self._buffer_index, part.numel(), part.dtype)
        if key not in self._rows:
            size = part.numel() * part.element_size()
            with _disable_current_modes():  # checkpointed layers note operators, which the next time has not
                rows = [row[:size].view(part.dtype) for row in self.memory[self._buffer_index]]
            self._rows[key] = _BufferRows(rows, _COUNT_STRUCT.pack(part.numel()))
        return self._rows[key]

    def _sync_peers(self, message: bytes) -> None:
        """Wait for all ranks. The system calls also order the earlier writes."""
        try:
            for peer in self._peers:
                peer.send(message)
            for peer in self._peers:
                received = peer.recv(len(message), socket.MSG_WAITALL)
                if not received:
                    raise ConnectionError
                if received != message:
                    numbers = [_COUNT_STRUCT.unpack(each)[0] for each in (message, received)]
                    raise RuntimeError("ranks sum different things: {:,} values here, {:,} there".format(*numbers))
        except BlockingIOError as error:
            raise RuntimeError(f"Timed out: a rank of this host did not come within {TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise RuntimeError(PEER_GONE) from error

    def close(self) -> None:
        """Leave; ranks that wait for this one are notified. Idempotent."""
        for peer in self._peers:
            peer.close()
        self._rows.clear()
        self._next = _BufferRows([], b"")
        self.memory = self.gathered = torch.empty(0)  # the last references to the mappings
        self.pieces = []


def _map_shared_memory(peers: list[socket.socket], rank: int, size: int) -> mmap.mmap:
    """The memory: created by the first rank, sent to all others. Raises OSError."""
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
