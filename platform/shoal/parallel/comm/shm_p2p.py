"""Tensors from one rank of a host to another, through memory that they share: for CPU tensors, in place of gloo.

    a message     its bytes in a piece of memory (memfd) that only the two have, and a note over a socket
    the answer    a flag in that piece: it is free, and the next message of its size goes into it

A send does not wait for who reads it: where no piece is free another one is made, so that there are as many as there
were messages under way at once. (Of some hundreds that nobody reads, the notes fill the socket; then it takes in what
others send, and waits.) What is sent from one rank to another arrives in that order. Gloo wakes threads of its own for
each message, which on a host whose cores all compute takes milliseconds (docs/log.md). Called by pipelines, and by
`cost`, which times them.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.parallel.comm.shm_rendezvous import GONE, Peers, formed, wait_in_the_system
from shoal.parallel.comm.world import TIMEOUT_S

_NOTE = struct.Struct("<IQ")  # the number of the piece, the bytes in it
_DESCRIPTOR = struct.Struct("@i")
_BESIDE = socket.CMSG_LEN(_DESCRIPTOR.size)
_HEAD_BYTES = 64  # of a piece, before the message; the first one is the flag
_FREE, _TAKEN = 0, 1


class _Piece:
    """Memory for messages of one size, which two ranks have. The descriptor is closed."""

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            # Unlike Python's own mmap, this keeps no descriptor of its own.
            name, whole = f"/proc/self/fd/{descriptor}", _HEAD_BYTES + size
            memory = torch.from_file(name, shared=True, size=whole, dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.flag, self.message = memory[:1].numpy(), memory[_HEAD_BYTES:].numpy()


class _Line:
    """What one rank knows of its messages with another. `lines`: those with everybody, by socket."""

    def __init__(self, peer: socket.socket, lines: dict[socket.socket, _Line]) -> None:
        self.peer, self._lines = peer, lines
        self.pieces: list[_Piece] = []  # in which this rank sends
        self.by_size: dict[int, list[int]] = defaultdict(list)
        self.theirs: dict[int, _Piece] = {}  # in which the other one sends
        self.arrived: dict[int, tuple[int, int]] = {}  # number of a message -> piece, bytes
        self.num_arrived = self.num_asked = 0

    def read(self) -> None:
        """The next note. Raises RuntimeError."""
        try:
            # As each note was written: a stream does not run over from one with a descriptor into the next. (Python's
            # own `recv_fds` and `send_fds` do not hear of flags.)
            note, beside, _, _ = self.peer.recvmsg(_NOTE.size, _BESIDE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError as error:
            raise RuntimeError(_late("sent")) from error
        except OSError as error:
            raise RuntimeError(GONE) from error
        if not note:
            raise RuntimeError(GONE)
        piece, size = _NOTE.unpack(note)
        for _, _, descriptor in beside:  # the first message in a new piece
            self.theirs[piece] = _Piece(_DESCRIPTOR.unpack(descriptor)[0], size)
        self.arrived[self.num_arrived] = (piece, size)
        self.num_arrived += 1

    def write(self, piece: int, size: int, descriptor: int | None = None) -> None:
        """Raises RuntimeError."""
        beside = []
        if descriptor is not None:
            beside.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor)))
        while True:
            try:
                self.peer.sendmsg([_NOTE.pack(piece, size)], beside, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                readable, writable, _ = select.select(list(self._lines), [self.peer], [], TIMEOUT_S)
                for peer in readable:
                    self._lines[peer].read()
                if not readable and not writable:
                    raise RuntimeError(_late("read")) from None
            except OSError as error:
                raise RuntimeError(GONE) from error


class _Sent:
    """A message that is on its way: nothing is left to do."""

    def wait(self) -> bool:
        return True


class _Asked:
    """A message that is expected."""

    def __init__(self, line: _Line, number: int, tensor: Tensor) -> None:
        self._line, self._number, self._tensor = line, number, tensor

    def wait(self) -> bool:
        """Until it is in the tensor. Raises RuntimeError when the other rank is gone, or sends something else."""
        line = self._line
        while line.num_arrived <= self._number:
            line.read()
        piece, size = line.arrived.pop(self._number)
        if size != self._tensor.nbytes:
            raise RuntimeError(f"a rank of this host sent {size:,} bytes, where {self._tensor.nbytes:,} were expected")
        if size:
            theirs = line.theirs[piece]
            np.copyto(_bytes(self._tensor), theirs.message)
            theirs.flag[0] = _FREE
        return True


class HostMessages:
    """One rank's messages with the others of its group.

    sent_bytes: what it has sent so far
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        wait_in_the_system(peers)
        lines: dict[socket.socket, _Line] = {}
        lines |= {peer: _Line(peer, lines) for peer in peers.values()}
        self._lines = {other: lines[peer] for other, peer in peers.items()}
        self.sent_bytes = 0.0

    @classmethod
    def form(cls, group: dist.ProcessGroup) -> HostMessages | None:
        """Meet the other ranks of `group`; None, on all of them, unless gloo carries it within one host. Collective."""
        return formed(group, socket.SOCK_STREAM, cls, cls.close)

    def send(self, tensor: Tensor, to: int) -> _Sent:
        """Send to a rank of the group, which has to ask for it; the tensor may change at once. Raises RuntimeError."""
        line, size = self._lines[to], tensor.nbytes
        self.sent_bytes += size
        if not size:
            line.write(0, 0)
            return _Sent()
        free = next((each for each in line.by_size[size] if line.pieces[each].flag[0] == _FREE), None)
        if free is None:
            self._send_in_new_piece(line, tensor)
        else:
            _fill(line.pieces[free], tensor)
            line.write(free, size)
        return _Sent()

    @staticmethod
    def _send_in_new_piece(line: _Line, tensor: Tensor) -> None:
        descriptor, number = os.memfd_create("shoal-messages"), len(line.pieces)
        try:
            os.truncate(descriptor, _HEAD_BYTES + tensor.nbytes)
            line.pieces.append(_Piece(os.dup(descriptor), tensor.nbytes))
            line.by_size[tensor.nbytes].append(number)
            _fill(line.pieces[number], tensor)
            line.write(number, tensor.nbytes, descriptor)
        finally:
            os.close(descriptor)

    def receive(self, tensor: Tensor, sender: int) -> _Asked:
        """Ask for the next message of a rank of the group; it is in `tensor`, contiguous, after `wait()`."""
        line = self._lines[sender]
        line.num_asked += 1
        return _Asked(line, line.num_asked - 1, tensor)

    def take_over(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """The same messages, as torch's schedules make them up, by this way instead of the group's."""
        ours = {dist.isend: self._isend, dist.irecv: self._irecv}
        for op in ops:
            op.op = ours[op.op]
        return ops

    # torch calls whatever is neither of its own functions with the other rank as `group_src`.

    def _isend(self, tensor: Tensor, *, group_src: int, **others: Any) -> _Sent:
        return self.send(tensor.detach(), group_src)

    def _irecv(self, tensor: Tensor, *, group_src: int, **others: Any) -> _Asked:
        return self.receive(tensor.detach(), group_src)

    def close(self) -> None:
        """Leave; who waits for this rank is told. Idempotent."""
        for line in self._lines.values():
            line.peer.close()
            line.pieces.clear()
            line.by_size.clear()
            line.theirs.clear()


def _late(what: str) -> str:
    return f"Timed out: a rank of this host {what} nothing for {TIMEOUT_S:.0f} s"


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _fill(piece: _Piece, tensor: Tensor) -> None:
    piece.flag[0] = _TAKEN
    np.copyto(piece.message, _bytes(tensor))
