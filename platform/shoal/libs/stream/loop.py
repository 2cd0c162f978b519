"""The loop of a stream: take, log, answer, learn, checkpoint, acknowledge. Each message is learnt exactly once.

    source ─► Deduplicator ─► BatchLog.append ─► OnlineTrainer.process ─► answers
                                   │                    │  every group of messages
                                   ▼                    ▼
                              fsync of the log ─► checkpoint, fsynced, renamed ─► source.commit: acknowledgements

**The protocol.** A *group* is the batches between two checkpoints.

1. `append(batch)`: the batch, its messages and their order, reaches the log before anything is learnt from it.
2. `process(batch)`: answers, then learns if enough is pending. It is a function of the state before and of the batch:
   no clock, no chance. Where the clock decides, in a pause of the stream, it makes a batch without messages, which is
   logged like any other and learns what is pending.
3. `snapshot`: what is pending is learnt, by such a batch; then the trainer and the deduplicator are copied in memory.
   Learning continues.
4. `save`, in a thread: the log is fsynced; then the copy is written beside the older checkpoints, fsynced and renamed.
5. `commit`: the deliveries that the snapshot accounts for are acknowledged.

**After a kill** at any moment, `recover` loads the newest checkpoint and processes the batches that the log has beyond
it. Then the broker's redelivery is taken.

| killed                | log      | checkpoint | acknowledged | what recovery does                                   |
|-----------------------|----------|------------|--------------|------------------------------------------------------|
| before or in 1        | no, torn | no         | no           | passes over a torn record; its messages come again   |
| after 1, in 2 or in 3 | yes      | no         | no           | answers and learns it; what comes again is dropped   |
| answered, but pending | yes      | no         | no           | the same: the rows that are pending follow from it   |
| in 4                  | yes      | no         | no           | the same: a draft without its name does not exist    |
| after 4, in 5         | yes      | yes        | in part      | loads it; what comes again is dropped                |

*Nothing is lost*: a message is acknowledged (5) only after a durable checkpoint contains its update (3, 4). *Nothing is
learnt twice*: what the deduplicator has admitted is in the same checkpoint as its update, and batches beyond the
checkpoint pass through it again. *The same bits*: weights are a function of the log alone (2), and the log never
changes; from a torn record nothing was learnt (1). Recovery publishes the answers of the open group
again, the same to the bit.

A kill of the process loses nothing that was written; a power cut may lose what was not fsynced: batches of the open
group, and of the one before it while that is saved. Their messages were not acknowledged: they come again, and are
batched again. So do those of batches that are left, but follow a lost one.

Called by the flow and by tests. Knows no broker and no run record.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.checkpoint import files
from shoal.checkpoint.directory import list_newest_first, parse_step
from shoal.errors import CheckpointError
from shoal.libs.stream.batch_log import BatchLog, LoggedBatch
from shoal.libs.stream.messages import Message
from shoal.libs.stream.spec import CommitSpec
from shoal.libs.stream.trainer import OnlineTrainer, PrequentialTotals, SensorForecast
from shoal.sources import Delivery, StreamSource, StreamState
from shoal.sources.source import WINDOW, Deduplicator

POLL_S = 0.05  # how long an idle loop waits before it looks whether to stop or to commit
PAUSE_S = 0.005  # without a message for so long, what is pending is learnt
MAX_REPORTED = 5  # publishers of one event


class _Group(NamedTuple):
    """A snapshot on its way to the disk."""

    state: StreamState
    saved: Future[None]
    began_s: float


class StreamStatistics:
    """What a stream run measures of itself between two reports: rate, lag, latency, errors."""

    def __init__(self) -> None:
        self.begin(PrequentialTotals())

    def begin(self, totals: PrequentialTotals) -> None:
        """Forget what was measured. totals: of all messages so far"""
        self._began_s = time.monotonic()
        self._totals = vars(totals).copy()
        self.num_batches = 0
        self.lags_ms = list[float]()
        self.learn_ms = list[float]()
        self.commit_ms = list[float]()

    def take(self, totals: PrequentialTotals) -> dict[str, float]:
        """The metrics since the last call, by name. Lags are from the publishers' clocks to the answer."""
        since = {name: value - self._totals[name] for name, value in vars(totals).items()}
        metrics = {"stream/per_s": since["num_messages"] / (time.monotonic() - self._began_s)}
        if self.num_batches:
            metrics["stream/batch"] = since["num_messages"] / self.num_batches
        for name, values in (("lag", self.lags_ms), ("learn", self.learn_ms)):
            if values:
                middle, high = np.percentile(values, (50, 99))
                metrics |= {f"stream/{name}_p50_ms": float(middle), f"stream/{name}_p99_ms": float(high)}
        if self.commit_ms:
            metrics["stream/commit_ms"] = float(np.median(self.commit_ms))
        if num_forecasts := since["num_forecasts"]:
            metrics["prequential/mae"] = since["absolute_error"] / num_forecasts
            metrics["prequential/as_now"] = since["naive_error"] / num_forecasts
            metrics["prequential/scaled"] = since["scaled_error"] / num_forecasts
        self.begin(totals)
        return metrics


class StreamLoop:
    """Runs one trainer on one source, in the caller's thread; see the module's docstring.

    folder:  of the run: `log/`, `checkpoints/`
    publish: takes answers as soon as they are made
    report:  called with the kind and the details of each event: `recovered`, `malformed`, `drift`, `checkpoint_failed`,
             `publisher_restarted`
    on_saved: called with the trainer's state when a checkpoint of it is on the disk, from the writer's thread
    """

    def __init__(
        self,
        trainer: OnlineTrainer,
        source: StreamSource,
        folder: Path,
        spec: CommitSpec,
        publish: Callable[[list[SensorForecast]], None] = lambda answers: None,
        report: Callable[..., None] = lambda kind, **details: None,
        on_saved: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        self.trainer, self.statistics = trainer, StreamStatistics()
        # What is not acknowledged may come again, however much it is.
        self.deduplicator = Deduplicator(max(WINDOW, getattr(source, "max_unacknowledged", 0)))
        self.malformed, self.num_redelivered = Counter[str](), 0
        self._source = source
        self._spec = spec
        self._publish = publish
        self._report, self._on_saved = report, on_saved
        self._checkpoints, self._log = folder / "checkpoints", BatchLog(folder / "log")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._group: _Group | None = None
        self._num_snapshotted = self._num_committed = 0  # deliveries
        self._snapshotted_s = self._failed_s = -math.inf

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Recover, then learn until `should_stop` or the source's end; the last group is committed.

        Raises CheckpointError when the state cannot be read, or the last group not be written.
        """
        try:
            self.recover()
            while not should_stop() and not self._source.is_exhausted:
                delivery = self._source.poll(self._spec.max_batch, PAUSE_S if self.trainer.num_pending else POLL_S)
                self.take(delivery)
                if not delivery.messages and self.trainer.num_pending:
                    self._process([])
                self._advance_commit()
            if self._group is not None:  # the end: all that was learnt is committed
                self._group.saved.exception()  # waits
                self._acknowledge()
            if self._source.num_delivered > self._num_snapshotted:
                self._snapshot().saved.result()
                self._acknowledge()
        finally:
            self._writer.shutdown()
            self._source.close()
            self._log.close()

    def recover(self) -> None:
        """Become what the last process was when it ended, and open the source."""
        loaded = files.load_latest(self._checkpoints)
        if loaded is not None:
            self.trainer.load_state_dict(loaded.state["trainer"])
            self.deduplicator.load_state_dict(loaded.state["deduplicator"])
            self.num_redelivered = loaded.state["counts"][1]
            self.malformed = Counter(loaded.state["malformed"])
        newest = max((parse_step(path.name) for path in list_newest_first(self._checkpoints)), default=0)
        batches = self._log.recover(self.trainer.num_batches, synced=newest)
        self._source.open(StreamState(0, self.deduplicator.sequences))
        for batch in batches:
            self._admit(batch.messages)
            self.trainer.process(batch.messages, self._publish)
        if loaded is not None or batches:
            damaged = loaded.damaged if loaded is not None else []
            self._report("recovered", batch=self.trainer.num_batches, relearnt=len(batches), damaged=damaged)
        self._snapshotted_s = time.monotonic()
        self.statistics.begin(self.trainer.totals)

    def take(self, delivery: Delivery) -> None:
        """Log, answer and learn what is new of a delivery."""
        self.num_redelivered += delivery.num_redelivered
        for each in delivery.malformed:
            if not self.malformed[each.reason]:
                self._report("malformed", **{name: getattr(each, name) for name in each.__struct_fields__})
            self.malformed[each.reason] += 1
        if not delivery.messages:
            return
        num_stale = self.deduplicator.num_stale
        new = self._admit(delivery.messages)
        if self.deduplicator.num_stale > num_stale == 0:
            self._report(
                "publisher_restarted", publishers=sorted({each.publisher for each in delivery.messages})[:MAX_REPORTED]
            )
        if new:
            self._process(new)

    def _admit(self, messages: list[Message]) -> list[Message]:
        """Those that are new. Readings of one payload, of different sensors, follow each other with its identity: the
        first one decides."""
        new: list[Message] = []
        identity = None
        sensors = set[str]()
        is_new = False
        for message in messages:
            if (message.publisher, message.sequence) != identity or message.sensor in sensors:
                identity, sensors = (message.publisher, message.sequence), set()
                is_new = self.deduplicator.admit(message, message.is_first)
            sensors.add(message.sensor)
            new += [message] * is_new
        return new

    def _process(self, messages: list[Message]) -> None:
        """Log a batch, then answer and learn it; one without messages learns what is pending."""
        self._log.append(LoggedBatch(self.trainer.num_batches + 1, messages))
        statistics = self.statistics
        began_s = time.perf_counter()
        num_updates = self.trainer.num_updates

        def answer(forecasts: list[SensorForecast]) -> None:
            self._publish(forecasts)
            now_s = time.time()
            statistics.lags_ms += [1e3 * (now_s - each.message.time_s) for each in forecasts]

        drifting = self.trainer.process(messages, answer)
        statistics.num_batches += len(messages) > 0
        if self.trainer.num_updates > num_updates:
            statistics.learn_ms.append(1e3 * (time.perf_counter() - began_s))
        if drifting:
            self._report("drift", sensors=drifting)

    # -- commits

    def _advance_commit(self) -> None:
        """Acknowledge a saved group; begin to save the next one when it is due."""
        if self._group is not None and self._group.saved.done():
            self._acknowledge()
        num_open = self._source.num_delivered - self._num_snapshotted
        now_s, interval_s = time.monotonic(), self._spec.interval_s
        is_due = num_open >= self._spec.messages or now_s - self._snapshotted_s >= interval_s
        if self._group is None and num_open and is_due and now_s - self._failed_s >= interval_s:
            self._snapshot()

    def _snapshot(self) -> _Group:
        if self.trainer.num_pending:  # what is acknowledged has been learnt
            self._process([])
        state = {
            "trainer": self.trainer.state_dict(),
            "deduplicator": self.deduplicator.state_dict(),
            "counts": [self.malformed.total(), self.num_redelivered],
            "malformed": dict(self.malformed),
        }
        covered = StreamState(self._source.num_delivered, self.deduplicator.sequences)
        step, descriptor = self.trainer.num_batches, self._log.rotate()
        saved = self._writer.submit(self._save, step, state, descriptor)
        self._group = _Group(covered, saved, time.perf_counter())
        self._num_snapshotted, self._snapshotted_s = covered.num_delivered, time.monotonic()
        return self._group

    def _save(self, step: int, state: dict[str, Any], descriptor: int | None) -> None:
        """Make the log durable, then the checkpoint; then drop the log that none needs. In the writer's thread."""
        self._log.sync(descriptor)
        files.save(self._checkpoints, step, state, self._spec.keep_checkpoints)
        if not self._spec.keep_log:
            oldest = list_newest_first(self._checkpoints)[-1]
            self._log.remove_before(parse_step(oldest.name))
        self._on_saved(state["trainer"])

    def _acknowledge(self) -> None:
        assert self._group is not None
        group, self._group = self._group, None
        try:
            group.saved.result()
        except (CheckpointError, OSError) as error:
            # The next group covers this one too; until it is written, the broker holds its messages.
            self._num_snapshotted, self._failed_s = self._num_committed, time.monotonic()
            self._report("checkpoint_failed", error=str(error))
            return
        self._source.commit(group.state)
        self._num_committed = group.state.num_delivered
        self.statistics.commit_ms.append(1e3 * (time.perf_counter() - group.began_s))
