"""The learners that share each batch: how it is divided among them, and how their gradients become one.

Learner 0, the hub, takes a batch and sends each of the others a share of its segments; or, of an algorithm with a
replay, which only the hub has, a share of each sample. All compute the gradients of their shares, the hub adds them up,
and each takes the step with an optimizer of its own: their weights stay equal. Only the hub publishes and saves. A
learner that dies is missing in the sums from then on; one that joins gets the hub's state with its first share. If the
hub dies, its next incarnation restores its checkpoint and the others join it.

Called by the algorithms, for sums, and by the learner and its replicas. Knows neither Ray nor losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.batch_tree import balance_by_size
from shoal.channel.connection import Channel, ChannelAddress, ChannelListener, connect
from shoal.errors import ConnectionLost
from shoal.rl.experience.queue import ExperienceBatch

REPLY_TIMEOUT_S = 60  # after which the hub goes on without a learner that does not answer


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


class _Share(NamedTuple):
    """What a learner is sent.

    random_state: the hub's, for a part of a batch
    state:        the hub's, for a learner that lacks it
    """

    part: BatchShare | SampleShard
    random_state: Tensor | None
    state: bytes


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


class LearnerHub(LearnerGroup):
    """Learner 0. The others connect to `address`; they take part from the next batch on."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._listener = ChannelListener(host, REPLY_TIMEOUT_S)
        self.address = self._listener.address
        self._members: list[Channel] = []
        self._current: set[Channel] = set()  # those with the weights of the hub, as the last batch has left them
        self._working: dict[int, Channel] = {}  # by the number of the learner in the present batch, from 1 on
        self._learners = np.zeros(0, np.int64)  # [S], of each segment of the present batch
        self.lost = np.zeros(0, np.bool_)  # [S], whether a segment's learner has died

    @property
    def pids(self) -> list[int]:
        """The processes of the other learners."""
        return [each.pid for each in self._members]

    def distribute(self, batch: ExperienceBatch, serialize: Callable[[], bytes]) -> ExperienceBatch:
        """Send the others their shares, and return this learner's. A learner for which there is no segment sits out.

        serialize: the algorithm's state before this batch, for learners that lack it
        """
        self._select_working(len(batch.lengths))
        self._learners = balance_by_size(batch.lengths, self.num_learners)
        self.lost = np.zeros(len(batch.lengths), np.bool_)
        masks = [self._learners == number for number in range(self.num_learners)]
        shares = [BatchShare(batch.select(each), each, batch.lengths) for each in masks]
        self._send(shares[1:], torch.get_rng_state(), serialize)
        self._share = shares[0]
        return self._share.batch

    def renew_weights(self) -> None:
        """Send the others the state with their next shares: this learner's weights have changed without them."""
        self._current.clear()

    def divide_sample(self, sample: SampleShard, serialize: Callable[[], bytes]) -> SampleShard:
        self._select_working(sample.num_items)
        bounds = [sample.num_items * number // self.num_learners for number in range(self.num_learners + 1)]
        shares = [sample.select(*each) for each in pairwise(bounds)]
        self._send(shares[1:], None, serialize)
        return shares[0]

    def _select_working(self, num_parts: int) -> None:
        """Select who gets a share of so many parts."""
        self._admit()
        self._working = dict(enumerate(self._members[: num_parts - 1], 1))
        self.num_learners = 1 + len(self._working)

    def _send(
        self,
        parts: Sequence[BatchShare | SampleShard],
        random_state: Tensor | None,
        serialize: Callable[[], bytes],
    ) -> None:
        """Send each of those who work a share, and with it the state, if it lacks that."""
        state = b""
        for (number, channel), part in zip(list(self._working.items()), parts, strict=True):
            if lacks_state := channel not in self._current:
                state = state or serialize()
            with self._noticing_loss(number):
                channel.send(_Share(part, random_state, state if lacks_state else b""))
        self._current = {*self._working.values()}

    def sum(self, values: Tensor) -> Tensor:
        total = values.cpu()
        for number, channel in list(self._working.items()):
            with self._noticing_loss(number):
                total = total + torch.frombuffer(channel.receive_bytes(REPLY_TIMEOUT_S), dtype=total.dtype)
        for number, channel in list(self._working.items()):
            with self._noticing_loss(number):
                channel.send_bytes(total.numpy().data)
        return total.to(values.device)

    def close(self) -> None:
        """Disconnect the others, which then look for the next hub. Idempotent."""
        self._listener.close()
        self._admit()
        for each in self._members:
            each.close()
        self._members, self._working = [], {}

    @contextmanager
    def _noticing_loss(self, number: int) -> Iterator[None]:
        """Go on without a learner of the present batch that is gone: its segments are lost."""
        try:
            yield
        except ConnectionLost:
            channel = self._working.pop(number)
            channel.close()
            self._members.remove(channel)
            self.lost |= self._learners == number  # of a replay's sample no segment is lost

    def _admit(self) -> None:
        while channel := self._listener.accept(0):
            self._members.append(channel)


class HubLink(LearnerGroup):
    """Another learner's connection to the hub. Raises ConnectionLost when the hub is gone."""

    def __init__(self, address: ChannelAddress) -> None:
        super().__init__()
        self._channel = connect(address, REPLY_TIMEOUT_S)

    def wait_for_share(self, load: Callable[[bytes], None]) -> ExperienceBatch | SampleShard:
        """The next share, when its random state, and before it the hub's state (by `load`), have been applied."""
        share: _Share = self._channel.receive()
        if share.state:
            load(share.state)
        self.num_learners = 2  # or more: each of them has a part of the steps
        if isinstance(share.part, SampleShard):
            return share.part
        assert share.random_state is not None
        torch.set_rng_state(share.random_state)
        self._share = share.part
        return self._share.batch

    def sum(self, values: Tensor) -> Tensor:
        self._channel.send_bytes(values.cpu().numpy().data)
        return torch.frombuffer(self._channel.receive_bytes(), dtype=values.dtype).to(values.device)

    def close(self) -> None:
        self._channel.close()
