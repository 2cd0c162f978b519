"""Messages as the samples of a dataset, each in exactly one training step of the weights that are kept.

    source.poll ─► Deduplicator ─► sample ─► the Loader's batch ─► step ─► checkpoint on the disk ─► source.commit

The state of the dataset, which is a part of each checkpoint, says which messages its weights have learnt. They are
acknowledged once the checkpoint is on the disk: none is lost. After a kill, the run goes on from its newest checkpoint;
what was not acknowledged comes again, and what the checkpoint has learnt is dropped: none counts twice.

Called by the Loader, in the training process. One process reads a stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from shoal.sources.deduplicator import Deduplicator
from shoal.sources.source import StreamMessage, StreamSource, StreamState

POLL_MESSAGES, POLL_S = 256, 1.0


class MessageDataset:
    """An iterable dataset with a state. num_malformed: messages that were no samples"""

    deterministic = True  # it draws no random numbers

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._deduplicator = Deduplicator()
        self._waiting: deque[StreamMessage] = deque()  # polled, and not yielded
        self._is_open = False
        self._num_covered = 0  # deliveries that the last sample accounts for; at most, since some are malformed
        self.num_malformed = 0

    def __iter__(self) -> Iterator[Any]:
        if not self._is_open:
            self._source.open(StreamState(0, self._deduplicator.sequences))
            self._is_open, self._num_covered = True, self._source.num_delivered
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                self._num_covered = self._num_covered + 1 if self._waiting else self._source.num_delivered
                if self._deduplicator.admit(message):
                    yield getattr(message, "value", message)
            if self._source.is_exhausted:
                return
            delivery = self._source.poll(POLL_MESSAGES, POLL_S)
            self.num_malformed += len(delivery.malformed)
            self._waiting.extend(delivery.messages)

    def state_dict(self) -> dict[str, Any]:
        """What was yielded so far."""
        return {"num_delivered": self._num_covered, "deduplicator": self._deduplicator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`: what was read beyond it comes again."""
        self.close()
        self._deduplicator = Deduplicator()
        self._deduplicator.load_state_dict(state["deduplicator"])

    def commit(self, state: dict[str, Any]) -> None:
        """Acknowledge what a state that is on the disk covers."""
        if self._is_open:
            sequences = {name: highest for name, (highest, _) in state["deduplicator"]["seen"].items()}
            self._source.commit(StreamState(state["num_delivered"], sequences))

    def close(self) -> None:
        """What was not committed goes to the next one. Idempotent."""
        self._waiting.clear()
        if self._is_open:
            self._is_open = False
            self._source.close()
