"""Point-to-point messages between ranks of one host through shared memory: for CPU tensors, instead of gloo.

    a message     its bytes in a buffer (memfd) shared by the two ranks, and a note over a socket
    the answer    a flag in that buffer: it is free for the next message of its size

A send does not wait for its receiver: without a free buffer another one is created, so there are as many buffers as
messages were in flight at once. (After some hundreds of unread messages the notes fill the socket; then the sender
receives its own messages, and waits.) Messages between two ranks arrive in order. Gloo wakes threads of its own for
each message, which on a fully loaded host takes milliseconds (decision 010). Called by pipelines, and by `cost`, which
times it.
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

from shoal.parallel.comm.shm_rendezvous import PEER_GONE, Peers, rendezvous, set_socket_timeouts
from shoal.parallel.comm.world import TIMEOUT_S

_HEADER = struct.Struct("<IQ")  # the buffer's number, the message's bytes
_DESCRIPTOR = struct.Struct("@i")
_ANCILLARY_BYTES = socket.CMSG_LEN(_DESCRIPTOR.size)
_HEAD_BYTES = 64  # of a buffer, before the message; the first one is the flag
_FREE, _TAKEN = 0, 1


class _ShmBuffer:
    """Memory for messages of one size, shared by two ranks. The descriptor is closed."""

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            # Unlike Python's own mmap, this keeps no descriptor of its own.
            name, whole = f"/proc/self/fd/{descriptor}", _HEAD_BYTES + size
            memory = torch.from_file(name, shared=True, size=whole, dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.flag, self.message = memory[:1].numpy(), memory[_HEAD_BYTES:].numpy()


class _Channel:
    """One rank's state of its messages with another. `lines`: the channels of all ranks, by socket."""

    def __init__(self, peer: socket.socket, lines: dict[socket.socket, _Channel]) -> None:
        self.peer, self._channels = peer, lines
        self.buffers: list[_ShmBuffer] = []  # for sending
        self.buffers_by_size: dict[int, list[int]] = defaultdict(list)
        self.peer_buffers: dict[int, _ShmBuffer] = {}  # for receiving
        self.arrived: dict[int, tuple[int, int]] = {}  # number of a message -> buffer, bytes
        self.num_arrived = self.num_requested = 0

    def receive_header(self) -> None:
        """Receive the next note. Raises RuntimeError."""
        try:
            # Notes are read as written: a stream does not merge one with a descriptor with the next. (Python's own
            # `recv_fds` and `send_fds` accept no flags.)
            note, beside, _, _ = self.peer.recvmsg(_HEADER.size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError as error:
            raise RuntimeError(_timeout_message("sent")) from error
        except OSError as error:
            raise RuntimeError(PEER_GONE) from error
        if not note:
            raise RuntimeError(PEER_GONE)
        piece, size = _HEADER.unpack(note)
        for _, _, descriptor in beside:  # the first message in a new piece
            self.peer_buffers[piece] = _ShmBuffer(_DESCRIPTOR.unpack(descriptor)[0], size)
        self.arrived[self.num_arrived] = (piece, size)
        self.num_arrived += 1

    def send_header(self, piece: int, size: int, descriptor: int | None = None) -> None:
        """Raises RuntimeError."""
        beside = []
        if descriptor is not None:
            beside.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor)))
        while True:
            try:
                self.peer.sendmsg([_HEADER.pack(piece, size)], beside, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                readable, writable, _ = select.select(list(self._channels), [self.peer], [], TIMEOUT_S)
                for peer in readable:
                    self._channels[peer].receive_header()
                if not readable and not writable:
                    raise RuntimeError(_timeout_message("read")) from None
            except OSError as error:
                raise RuntimeError(PEER_GONE) from error


class _CompletedSend:
    """A message in flight: nothing is left to do."""

    def wait(self) -> bool:
        return True


class _PendingReceive:
    """An expected message."""

    def __init__(self, line: _Channel, number: int, tensor: Tensor) -> None:
        self._channel = line
        self._number = number
        self._tensor = tensor

    def wait(self) -> bool:
        """Wait until it is in the tensor. Raises RuntimeError when the sender is gone, or sends another size."""
        line = self._channel
        while line.num_arrived <= self._number:
            line.receive_header()
        piece, size = line.arrived.pop(self._number)
        if size != self._tensor.nbytes:
            raise RuntimeError(f"a rank of this host sent {size:,} bytes, where {self._tensor.nbytes:,} were expected")
        if size:
            theirs = line.peer_buffers[piece]
            np.copyto(_as_bytes(self._tensor), theirs.message)
            theirs.flag[0] = _FREE
        return True


class ShmP2P:
    """One rank's messages with the others of its group.

    sent_bytes: what it has sent so far
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        set_socket_timeouts(peers)
        lines: dict[socket.socket, _Channel] = {}
        lines |= {peer: _Channel(peer, lines) for peer in peers.values()}
        self._channels = {other: lines[peer] for other, peer in peers.items()}
        self.sent_bytes = 0.0

    @classmethod
    def try_create(cls, group: dist.ProcessGroup) -> ShmP2P | None:
        """Connect the ranks of `group`; None, on all of them, unless gloo carries it within one host. Collective."""
        return rendezvous(group, socket.SOCK_STREAM, cls, cls.close)

    def send(self, tensor: Tensor, to: int) -> _CompletedSend:
        """Send to a rank of the group, which must receive it; the tensor may change at once. Raises RuntimeError."""
        line, size = self._channels[to], tensor.nbytes
        self.sent_bytes += size
        if not size:
            line.send_header(0, 0)
            return _CompletedSend()
        free = next((each for each in line.buffers_by_size[size] if line.buffers[each].flag[0] == _FREE), None)
        if free is not None:
            _fill_buffer(line.buffers[free], tensor)
            line.send_header(free, size)
            return _CompletedSend()
        descriptor, number = os.memfd_create("shoal-messages"), len(line.buffers)
        try:
            os.truncate(descriptor, _HEAD_BYTES + size)
            line.buffers.append(_ShmBuffer(os.dup(descriptor), size))
            line.buffers_by_size[size].append(number)
            _fill_buffer(line.buffers[number], tensor)
            line.send_header(number, size, descriptor)
        finally:
            os.close(descriptor)
        return _CompletedSend()

    def receive(self, tensor: Tensor, sender: int) -> _PendingReceive:
        """Receive the next message of a rank of the group; it is in `tensor`, contiguous, after `wait()`."""
        line = self._channels[sender]
        line.num_requested += 1
        return _PendingReceive(line, line.num_requested - 1, tensor)

    def redirect_ops(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """The messages of torch's schedules, sent this way instead of by the group."""
        ours = {dist.isend: self.send, dist.irecv: self.receive}
        for op in ops:  # torch calls any function other than its own two with the other rank as `group_src`
            transfer = ours[op.op]
            op.op = lambda tensor, *, group_src, transfer=transfer, **_: transfer(tensor.detach(), group_src)
        return ops

    def close(self) -> None:
        """Leave; ranks that wait for this one are notified. Idempotent."""
        for line in self._channels.values():
            line.peer.close()
            line.buffers.clear()
            line.buffers_by_size.clear()
            line.peer_buffers.clear()


def _timeout_message(what: str) -> str:
    return f"Timed out: a rank of this host {what} nothing for {TIMEOUT_S:.0f} s"


def _as_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _fill_buffer(piece: _ShmBuffer, tensor: Tensor) -> None:
    piece.flag[0] = _TAKEN
    np.copyto(piece.message, _as_bytes(tensor))
