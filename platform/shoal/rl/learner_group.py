"""The learners that share each batch: how it is divided among them, and how their gradients become one.

Learner 0, the hub, takes a batch and sends each of the others a share of its segments; or, of an algorithm with a
replay, which only the hub has, a share of each sample. All compute the gradients of their shares, the hub adds them up,
and each takes the step with an optimizer of its own: their weights stay equal. Only the hub publishes and saves. A
learner that dies is missing in the sums from then on; one that joins gets the hub's state with its first share. If the
hub dies, its next incarnation restores its checkpoint and the others join it.

Called by the algorithms, for sums, and by the learner and its replicas. Knows neither Ray nor losses.
"""

from __future__ import annotations

import heapq
import os
import socket as network
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.errors import Closed
from shoal.rl.experience.queue import ExperienceBatch
from shoal.weights import decode_tensors, encode_tensors

REPLY_TIMEOUT_S = 60.0  # after which the hub goes on without a learner that does not answer
_CONNECT_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 0.5
_MAX_STRANGERS = 64  # connections that have not proved the key
_GONE = (EOFError, OSError)


class BatchShare(NamedTuple):
    """One learner's part of a batch.

    keep:    bool [S], of the segments of the whole batch those that are its own
    lengths: int64 [S], the steps of each segment of the whole batch
    """

    batch: ExperienceBatch
    keep: np.ndarray
    lengths: np.ndarray


class SampleShard(NamedTuple):
    """One learner's part of a sample of a replay.

    arrays:    by name, with a row for each of its items [b, ...]
    first:     the position of the first of them among the `num_items` of the whole sample
    num_steps: environment steps that the whole sample trains
    """

    arrays: Mapping[str, np.ndarray]
    first: int
    num_items: int
    num_steps: int

    def select(self, begin: int, end: int) -> SampleShard:
        """The share of some of its items."""
        return self._replace(arrays={name: each[begin:end] for name, each in self.arrays.items()}, first=begin)


def divide(lengths: np.ndarray, num_learners: int) -> np.ndarray:
    """The learner of each segment [S]: the longest first, each to one with the fewest steps so far (Graham 1969)."""
    learners = np.zeros(len(lengths), np.int64)
    loads = [(0, learner) for learner in range(num_learners)]
    for segment in np.argsort(-lengths, kind="stable"):
        num_steps, learner = loads[0]
        learners[segment] = learner
        heapq.heapreplace(loads, (num_steps + int(lengths[segment]), learner))
    return learners


class _Share(msgspec.Struct, frozen=True):
    """What a learner is sent: a BatchShare, with the hub's random state, or a SampleShard.

    tensors:   of a batch `keep`, `lengths` and `random_state`, of a sample its arrays
    batch:     its segments
    sizes:     of a sample: first, num_items, num_steps
    has_state: the hub's state is the next message, for a learner that lacks it; it may be too large for MessagePack
    """

    tensors: bytes
    batch: bytes = b""
    sizes: tuple[int, int, int] | None = None
    has_state: bool = False


_DECODER = msgspec.msgpack.Decoder(_Share)


class LearnerGroup:
    """A single learner: its shares are whole batches, and its sums are its own."""

    num_learners = 1  # that share the present batch

    def __init__(self) -> None:
        self._share: BatchShare | None = None

    def locate(self, batch: ExperienceBatch) -> tuple[Tensor, int]:
        """The positions int64 [n] of a share's steps in the whole batch, and the number of steps in that."""
        share = self._find_share(batch)
        return torch.from_numpy(np.flatnonzero(np.repeat(share.keep, share.lengths))), int(share.lengths.sum())

    def locate_segments(self, batch: ExperienceBatch) -> tuple[np.ndarray, np.ndarray]:
        """The positions int64 [s] of a share's segments in the whole batch, and the lengths int64 [S] of all there."""
        share = self._find_share(batch)
        return np.flatnonzero(share.keep), share.lengths

    def _find_share(self, batch: ExperienceBatch) -> BatchShare:
        """The present share, or all of a batch that was not divided."""
        if self._share is not None and self._share.batch is batch:
            return self._share
        return BatchShare(batch, np.ones(len(batch.lengths), np.bool_), batch.lengths)

    def divide_sample(self, sample: SampleShard, serialize: Callable[[], bytes]) -> SampleShard:
        """Send the others their shares of a whole sample, and return this learner's. serialize: as in `distribute`"""
        return sample

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over the learners of the batch, equal on all of them."""
        return values

    def gather(self, values: Tensor, share: SampleShard) -> Tensor:
        """Collect, for each item of the sample [num_items], `values` [b] of its learner; NaN where one has died."""
        if self.num_learners == 1:
            return values
        padded = values.new_zeros(2, share.num_items)
        padded[:, share.first : share.first + len(values)] = torch.stack([values, torch.ones_like(values)])
        known, is_known = self.sum(padded.flatten()).view(2, -1)
        return torch.where(is_known > 0, known, torch.nan)

    def sum_gradients(
        self, parameters: Iterable[Tensor], metrics: Mapping[str, Tensor], num_mine: int, num_steps: int
    ) -> dict[str, float]:
        """Make the gradients of `parameters` those of all learners, and return the sums of the metrics.

        Both are sums over `num_mine` steps, divided by the `num_steps` of all learners. Where one has died, what the
        others have is scaled to the steps that they have.
        """
        values = torch.stack([each.detach().float() for each in metrics.values()])
        if self.num_learners == 1:
            return dict(zip(metrics, values.tolist(), strict=True))
        gradients = [each.grad for each in parameters if each.grad is not None]
        mine = torch.cat([*(each.flatten() for each in gradients), values, values.new_tensor([num_mine])])
        total = self.sum(mine)
        if 0 < (num_summed := float(total[-1])) != num_steps:
            total *= num_steps / num_summed
        parts = total.split([*(each.numel() for each in gradients), len(values) + 1])
        for each, part in zip(gradients, parts[:-1], strict=True):
            each.copy_(part.view_as(each))
        return dict(zip(metrics, parts[-1][:-1].tolist(), strict=True))


SINGLE = LearnerGroup()


def standardize(values: Tensor, group: LearnerGroup) -> Tensor:
    """`values` [n] with the mean 0 and the standard deviation 1 that they have over the steps of all learners."""
    wide = values.double()
    total, squares, count = group.sum(torch.stack([wide.sum(), wide.square().sum(), wide.new_tensor(len(wide))]))
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    standardized: Tensor = (wide - mean) / (deviation + 1e-8)
    return standardized.to(values.dtype)


@dataclass(eq=False)
class _Member:
    """The hub's connection to another learner. has_weights: those of the hub, as the last batch has left them."""

    connection: Connection
    pid: int
    has_weights: bool = False


class LearnerHub(LearnerGroup):
    """Learner 0. The others connect to `address` with the key; they take part from the next batch on.

    | queue                  | capacity  | what blocks | who unblocks | close()          |
    |------------------------|-----------|-------------|--------------|------------------|
    | learners that connect  | unbounded | nothing     |              | disconnects them |
    """

    def __init__(self, host: str, key: bytes) -> None:
        super().__init__()
        self._key = key
        self._server = network.create_server((host, 0))
        self._is_closing = False
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self.address: tuple[str, int] = (host, self._server.getsockname()[1])
        self._arrived: list[_Member] = []
        self._members: list[_Member] = []
        self._working: dict[int, _Member] = {}  # by the number of the learner in the present batch, from 1 on
        self._learners = np.zeros(0, np.int64)  # [S], of each segment of the present batch
        self.lost = np.zeros(0, np.bool_)  # [S], whether a segment's learner has died
        threading.Thread(target=self._accept, name="learner-hub", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes of the other learners."""
        return [each.pid for each in self._members]

    def distribute(self, batch: ExperienceBatch, serialize: Callable[[], bytes]) -> ExperienceBatch:
        """Send the others their shares, and return this learner's. A learner for which there is no segment sits out.

        serialize: the algorithm's state before this batch, for learners that lack it
        """
        self._select_working(len(batch.lengths))
        self._learners = divide(batch.lengths, self.num_learners)
        self.lost = np.zeros(len(batch.lengths), np.bool_)
        random_state = torch.get_rng_state().numpy()
        masks = [self._learners == number for number in range(self.num_learners)]
        shares = [BatchShare(batch.select(each), each, batch.lengths) for each in masks]
        messages = []
        for batch_share in shares[1:]:
            tensors = {"keep": batch_share.keep, "lengths": batch.lengths, "random_state": random_state}
            messages.append(_Share(encode_tensors(tensors), batch_share.batch.to_bytes()))
        self._send(messages, serialize)
        self._share = shares[0]
        return self._share.batch

    def renew_weights(self) -> None:
        """Send the others the state with their next shares: this learner's weights have changed without them."""
        for each in self._members:
            each.has_weights = False

    def divide_sample(self, sample: SampleShard, serialize: Callable[[], bytes]) -> SampleShard:
        self._select_working(sample.num_items)
        bounds = [sample.num_items * number // self.num_learners for number in range(self.num_learners + 1)]
        shares = [sample.select(*each) for each in pairwise(bounds)]
        self._send([_Share(encode_tensors(share.arrays), sizes=share[1:]) for share in shares[1:]], serialize)
        return shares[0]

    def _select_working(self, num_parts: int) -> None:
        """Select who gets a share of so many parts."""
        self._admit()
        self._working = dict(enumerate(self._members[: num_parts - 1], 1))
        self.num_learners = 1 + len(self._working)

    def _send(self, shares: Sequence[_Share], serialize: Callable[[], bytes]) -> None:
        """Send each of those who work a share, and with it the state, if it lacks that."""
        state = b""
        working = list(self._working.items())
        for (number, member), share in zip(working, shares, strict=True):
            if not member.has_weights:
                state = state or serialize()
                share = msgspec.structs.replace(share, has_state=True)
            try:
                member.connection.send_bytes(msgspec.msgpack.encode(share))
                if share.has_state:
                    member.connection.send_bytes(state)
            except _GONE:
                self._lose(number)
        for each in self._members:
            each.has_weights = any(each is member for _, member in working)

    def sum(self, values: Tensor) -> Tensor:
        total = values.cpu()
        for number, member in list(self._working.items()):
            try:
                if not member.connection.poll(REPLY_TIMEOUT_S):
                    raise EOFError
                total = total + _read(member.connection.recv_bytes(), total.dtype)
            except _GONE:
                self._lose(number)
        payload = total.numpy().tobytes()
        for number, member in list(self._working.items()):
            try:
                member.connection.send_bytes(payload)
            except _GONE:
                self._lose(number)
        return total.to(values.device)

    def close(self) -> None:
        """Disconnect the others, which then look for the next hub. Idempotent."""
        self._is_closing = True
        with suppress(OSError):  # closed before
            self._server.shutdown(network.SHUT_RDWR)  # wakes the thread
        self._server.close()
        self._admit()
        for each in self._members:
            each.connection.close()
        self._members, self._working = [], {}

    def _lose(self, number: int) -> None:
        member = self._working.pop(number)
        member.connection.close()
        self._members.remove(member)
        self.lost |= self._learners == number  # of a replay's sample no segment is lost

    def _admit(self) -> None:
        while self._arrived:  # another thread adds to it
            self._members.append(self._arrived.pop(0))

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._server.accept()
            except OSError:
                if self._is_closing:
                    return
                time.sleep(_ACCEPT_PAUSE_S)  # out of files, for instance
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._authenticate, args=(accepted,), daemon=True).start()
            else:
                accepted.close()

    def _authenticate(self, accepted: network.socket) -> None:
        # Of a learner that is stopped in the middle of a message nothing more may be expected.
        _limit_waiting(accepted, network.SO_RCVTIMEO, _CONNECT_TIMEOUT_S)
        connection = _make_connection(accepted)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._arrived.append(_Member(connection, int(connection.recv_bytes())))
        except (*_GONE, AuthenticationError, ValueError):  # no learner of this run
            connection.close()
        finally:
            self._strangers.release()


class HubLink(LearnerGroup):
    """Another learner's connection to the hub. Raises Closed when the hub is gone."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        super().__init__()
        try:
            self._connection = _make_connection(network.create_connection(address, _CONNECT_TIMEOUT_S))
            answer_challenge(self._connection, key)
            deliver_challenge(self._connection, key)
            self._connection.send_bytes(str(os.getpid()).encode())
        except _GONE as error:
            raise Closed(f"there is no learner at {address}") from error

    def wait_for_share(self, load: Callable[[bytes], None]) -> ExperienceBatch | SampleShard:
        """The next share, when its random state, and before it the hub's state (by `load`), have been applied."""
        message = _DECODER.decode(self._receive())
        if message.has_state:
            load(self._receive())
        self.num_learners = 2  # or more: each of them has a part of the steps
        tensors = decode_tensors(message.tensors)
        if message.sizes is not None:  # copies are writable, as torch wants them
            return SampleShard({name: each.copy() for name, each in tensors.items()}, *message.sizes)
        self._share = BatchShare(ExperienceBatch.from_bytes(message.batch), tensors["keep"], tensors["lengths"])
        torch.set_rng_state(torch.from_numpy(tensors["random_state"].copy()))
        return self._share.batch

    def sum(self, values: Tensor) -> Tensor:
        mine = values.cpu()
        try:
            self._connection.send_bytes(mine.numpy().tobytes())
        except _GONE as error:
            raise Closed("the hub is gone") from error
        return _read(self._receive(), mine.dtype).to(values.device)

    def close(self) -> None:
        self._connection.close()

    def _receive(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except _GONE as error:
            raise Closed("the hub is gone") from error


def _make_connection(socket: network.socket) -> Connection:
    socket.settimeout(None)
    socket.setsockopt(network.IPPROTO_TCP, network.TCP_NODELAY, 1)
    socket.setsockopt(network.SOL_SOCKET, network.SO_KEEPALIVE, 1)
    _limit_waiting(socket, network.SO_SNDTIMEO, REPLY_TIMEOUT_S)
    return Connection(socket.detach())


def _limit_waiting(socket: network.socket, option: int, timeout_s: float) -> None:
    """Make reading or writing raise OSError when nothing moves for so long."""
    seconds = int(timeout_s)
    value = struct.pack("ll", seconds, int(1e6 * (timeout_s - seconds)))
    socket.setsockopt(network.SOL_SOCKET, option, value)


def _read(payload: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=dtype)  # a writable copy
