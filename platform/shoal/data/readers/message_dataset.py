"""Messages as the samples of a dataset, each in exactly one training step of the weights that are kept.

    source.poll ─► Deduplicator ─► sample ─► the Loader's batch ─► step ─► checkpoint on the disk ─► source.commit

The state of the dataset, which is a part of each checkpoint, says which messages its weights have learnt. They are
acknowledged once the checkpoint is on the disk: none is lost. After a kill, the run goes on from its newest checkpoint;
what was not acknowledged comes again, and what the checkpoint has learnt is dropped: none counts twice.

Called by the Loader, in the training process. One process reads a stream.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Iterator
from typing import Any

from shoal.errors import DataError
from shoal.sources.source import WINDOW, Deduplicator, StreamMessage, StreamSource, StreamState

logger = logging.getLogger(__name__)
POLL_MESSAGES, POLL_S = 256, 1.0


class MessageDataset:
    """An iterable dataset with a state. The first message that is no sample is logged.

    Iterating raises DataError when the source waits for an acknowledgement that the next checkpoint would bring.
    """

    deterministic = True  # it draws no random numbers

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._limit: int | None = getattr(source, "max_unacknowledged", None)
        self._window = max(WINDOW, 2 * (self._limit or 0))  # all that may come again
        self._deduplicator = Deduplicator(self._window)
        self._waiting: deque[StreamMessage] = deque()  # polled, and not yielded
        self._is_open = False
        self._num_covered = 0  # deliveries that the last sample accounts for; at most, since some are malformed
        self._num_committed = 0  # deliveries
        self._has_yielded = self._has_warned = False  # yielded: since the source was opened
        self._opening = ""  # in the states that count deliveries from then on

    def __iter__(self) -> Iterator[Any]:
        if not self._is_open:
            self._source.open(StreamState(0, self._deduplicator.sequences))
            self._is_open = True
            self._has_yielded = False
            self._opening = uuid.uuid4().hex
            self._num_covered = self._num_committed = self._source.num_delivered
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                self._num_covered = self._num_covered + 1 if self._waiting else self._source.num_delivered
                if self._deduplicator.admit(message):
                    self._has_yielded = True
                    yield getattr(message, "value", message)
            if not self._has_yielded and self._num_covered > self._num_committed:
                self.commit(self.state_dict())  # repetitions of what the loaded state has learnt, which is on the disk
            if self._source.is_exhausted:
                return
            delivery = self._source.poll(POLL_MESSAGES, POLL_S)
            name = type(self._source).__name__
            if delivery.malformed and not self._has_warned:
                first = delivery.malformed[0]
                logger.warning("%s: a message of %s is not learnt: %s", name, first.origin, first.problem)
                self._has_warned = True
            self._waiting.extend(delivery.messages)
            num_open = self._source.num_delivered - self._num_committed
            if not delivery.messages and self._limit is not None and num_open >= self._limit:
                problem = f"waits for an acknowledgement: {num_open} messages are not in a checkpoint yet"
                remedy = "lower checkpoint.every_steps, or raise receive_maximum"
                raise DataError("data", name, problem, remedy)

    def state_dict(self) -> dict[str, Any]:
        """What was yielded so far."""
        covered = {"opening": self._opening, "num_delivered": self._num_covered}
        return {**covered, "deduplicator": self._deduplicator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`: what was read beyond it comes again."""
        self.close()
        self._deduplicator = Deduplicator(self._window)
        self._deduplicator.load_state_dict(state["deduplicator"])

    def commit(self, state: dict[str, Any]) -> None:
        """Acknowledge what a state that is on the disk covers, unless it counts from an earlier opening."""
        if self._is_open and state["opening"] == self._opening:
            sequences = {name: highest for name, (highest, _) in state["deduplicator"]["seen"].items()}
            self._source.commit(StreamState(state["num_delivered"], sequences))
            self._num_committed = max(self._num_committed, state["num_delivered"])

    def close(self) -> None:
        """What was not committed goes to the next one. Idempotent."""
        self._waiting.clear()
        if self._is_open:
            self._is_open = False
            self._source.close()
