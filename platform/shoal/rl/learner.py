"""The learner: takes experience, updates the model, publishes weights, saves checkpoints.

One loop in one thread. It waits only for experience: publishing hands over a snapshot and returns. Called by the Ray
workers and by `local_loop.py`; knows neither Ray nor sockets nor the environment.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shoal import atomic_file, checkpoint
from shoal.errors import CheckpointError, Closed, LedgerUnwritable, SpecMismatch, summarize_error
from shoal.rl.algorithms.algorithm import NonFiniteLoss, make_algorithm
from shoal.rl.experience.quarantine import compute_evidence
from shoal.rl.experience.queue import UNWRITABLE_PAUSE_S, BatchRequest, ExperienceBatch, ExperienceSource
from shoal.rl.learner_group import LearnerHub
from shoal.rl.spec import RLSpec
from shoal.weights import PublishedVersion, WeightSnapshot
from shoal.wire import DropReason, ExperienceSpec

POLL_S = 1.0  # how long the learner waits for experience before it checks whether to stop
CHECK_INTERVAL_S = 0.1  # between two checks, at least: one takes a millisecond
CHECKED_STEPS = 256  # of a batch, to within one segment, whose log-probabilities the learner checks
VERSIONS_RESERVED = 50  # at a time, on disk
# The run fails after so many batches in a row without a usable segment, and so many seconds: in a slow game, the
# batches between two segments of good actors may all be of one actor that sends bad data.
MAX_BAD_BATCHES, MAX_BAD_S = 3, 30.0


class WeightSink(Protocol):
    """Where a learner publishes. Implemented by WeightStore and by WeightPublisher; never waits for a consumer."""

    def publish(self, snapshot: WeightSnapshot) -> object: ...


class Learner:
    """One learner of one run. `consumer` names this incarnation: the queue revokes the leases of earlier ones."""

    def __init__(
        self,
        spec: RLSpec,
        experience: ExperienceSpec,
        source: ExperienceSource,
        sink: WeightSink,
        folder: Path,
        used_version: int = 0,
        hub: LearnerHub | None = None,
    ) -> None:
        """Restore from the newest checkpoint in `folder`, if there is one, and publish at once.

        `used_version`: the newest version that this run has used so far, if known; new ones are above it. If unknown,
        they are above every version reserved in `folder`. `hub`: other learners take shares of each batch.
        """
        torch.set_num_threads(spec.learner.torch_threads)
        torch.manual_seed(spec.learner.seed)
        self.spec, self._source, self._sink, self._folder = spec, source, sink, folder
        self._pauses_actors = spec.algorithm.pauses_actors
        # Actors that do not pause fill one half of the queue while the learner has the other.
        max_segments = max(1, spec.gateway.queue_capacity // (1 if self._pauses_actors else 2))
        self._request = BatchRequest(*spec.batch_limits, max_segments, spec.take_timeout_s)
        self._max_version_lag = spec.applied_gateway.max_version_lag
        self._waiting_since: float | None = None  # for the next batch, by time.monotonic()
        self.consumer = f"learner-{os.getpid()}-{time.time_ns()}"
        self.algorithm = make_algorithm(spec, experience, folder)
        self._random, self._checked_at = np.random.default_rng(spec.learner.seed % 2**64), -math.inf
        self._hub = hub
        self._divides_batches = not spec.algorithm.is_off_policy  # otherwise the samples of its replay
        if hub is not None:
            self.algorithm.group = hub
        self.updates = self.steps = self.version = 0  # steps: of the environment, that entered an update
        self.counts = {"consumed": 0, "dropped": 0}  # segments, over all incarnations of the learner
        self.damaged_checkpoints: list[str] = []
        self.failure = ""  # why the last checkpoint or version could not be written; "" when it was
        self._restore()
        self.restored_updates = self.updates
        self._reserved_path = folder / "versions-reserved"
        self._num_reserved = int(self._reserved_path.read_text()) if self._reserved_path.exists() else 0
        lowest = len(spec.self_play.opponents)  # which are the versions up to this in the pool
        self.version = max(self.version, used_version or self._num_reserved, lowest)
        self._num_bad_batches, self._bad_since = 0, 0.0  # in a row; by time.monotonic(), if there are any
        self._unacknowledged: tuple[int, Sequence[DropReason | None], Sequence[float]] | None = None  # the last batch's
        self._is_superseded = False  # by another incarnation of this learner
        self._metrics: dict[str, float] = {}
        self._published: deque[PublishedVersion] = deque(maxlen=10_000)
        self._lock = threading.Lock()  # guards the fields that stats() reads together
        self._stop = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self._step_lock = threading.Lock()  # held during a step of `run`
        self._saved_at = time.monotonic()
        self._saved_progress: tuple[object, ...] = ()
        self._published_updates = self.updates
        self._publish()

    def run(self) -> None:
        """Learn until `stop()`; publish and save the last good state, even when an update raises.

        Raises Closed, without saving, when another incarnation has taken over: it owns versions and checkpoints now.
        """
        try:
            while not self._stop.is_set():
                if self._running.wait(timeout=0.1):
                    with self._step_lock:
                        if self._running.is_set():  # `pause` may have come in between
                            self.step()
        finally:
            if self._hub is not None:
                self._hub.close()
            if not self._is_superseded:
                if self.updates != self._published_updates:
                    self.try_publish()
                self.save()

    def run_as_thread(self) -> None:
        """`run`, in a thread of its own, with thread settings suited to learning."""
        # A nearly certain policy has denormal gradients, which cost a hundred times as much as zero.
        torch.set_flush_denormal(True)
        self.run()

    def stop(self) -> None:
        """End `run` after the current update. Idempotent, callable from any thread."""
        self._stop.set()

    def pause(self) -> WeightSnapshot:
        """Stop learning until `resume`; returns the weights, published, which stay until then.

        Waits for the present update, and for disk space to reserve a version. Experience waits in the queue meanwhile,
        and then the actors do. Raises Closed when the learner is stopped before.
        """
        self._running.clear()
        while not self._stop.is_set():
            with self._step_lock:
                if self.updates != self._published_updates:
                    self.try_publish()
                if self.updates == self._published_updates:
                    return self.snapshot()
            self._stop.wait(UNWRITABLE_PAUSE_S)
        raise Closed("the learner was stopped")

    def resume(self) -> None:
        """Continue learning after `pause`."""
        self._running.set()

    def step(self) -> bool:
        """Take one batch and learn from it; False when none came in time, or its outcomes cannot be recorded yet."""
        if self._unacknowledged is None and not self._take_and_learn():
            return False
        if not self._acknowledge():
            return False
        if self._num_bad_batches >= MAX_BAD_BATCHES and time.monotonic() - self._bad_since >= MAX_BAD_S:
            raise NonFiniteLoss(
                f"the loss of {self._num_bad_batches} batches in a row was not finite, each segment of them by itself;"
                " lower algorithm.learning_rate or check the rewards"
            )
        self._save_if_due()
        return True

    def _take_and_learn(self) -> bool:
        batch = self._take_batch()
        if batch is None:
            if self.updates != self._published_updates:
                self._publish_if_due()
            self._save_if_due()
            return False
        prepared = self.algorithm.prepare(batch)
        evidence = self._weigh(prepared)  # before the weights depend on the batch
        fates = self._learn(prepared)
        learnt = np.array([fate is None for fate in fates])
        self.algorithm.normalizer.learn(batch, learnt)  # after: it was learnt in the units of its actors
        if learnt.any():
            self._publish_if_due()
        self.counts["dropped"] += int((~learnt).sum())
        self.counts["consumed"] += int(learnt.sum())
        self._unacknowledged = (batch.lease_id, fates, evidence)
        return True

    def _take_batch(self) -> ExperienceBatch | None:
        """A batch, or None after POLL_S, so that stopping or pausing does not wait for all of take_timeout_s."""
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        left_s = self._waiting_since + self.spec.take_timeout_s - now
        is_patient = left_s > POLL_S
        number = self._request.number + 1
        timeout_s = POLL_S if is_patient else max(0.0, left_s)
        version = self.version if self._pauses_actors else 0
        self._request = self._request._replace(
            number=number, timeout_s=timeout_s, is_patient=is_patient, version=version
        )
        batch = self._source.take(self.consumer, self._request)
        if batch is not None or not is_patient:
            self._waiting_since = None
        return batch

    def _acknowledge(self) -> bool:
        """Acknowledge the newest batch; False when that cannot be recorded now: the next step retries.

        Raises Closed when another incarnation of this learner has taken over.
        """
        assert self._unacknowledged is not None
        try:
            is_mine = self._source.acknowledge(*self._unacknowledged)
        except LedgerUnwritable:
            self._stop.wait(UNWRITABLE_PAUSE_S)
            return False
        self._unacknowledged = None
        if not is_mine:
            self._is_superseded = True
            raise Closed("another life of this learner has taken over")
        return True

    @property
    def model(self) -> torch.nn.Module:
        return self.algorithm.model

    def stats(self) -> dict[str, Any]:
        """Counters and the newest metrics. Plain values."""
        with self._lock:
            return {
                "updates": self.updates,
                "steps": self.steps,
                "weights_version": self.version,
                "restored_updates": self.restored_updates,
                "damaged_checkpoints": list(self.damaged_checkpoints),
                "checkpoint_failure": self.failure,
                "pid": os.getpid(),
                "replica_pids": self._hub.pids if self._hub is not None else [],
                "metrics": dict(self._metrics),
            }

    def take_published(self) -> list[PublishedVersion]:
        """The versions published since the last call."""
        taken: list[PublishedVersion] = []
        while self._published:
            taken.append(self._published.popleft())
        return taken

    def snapshot(self) -> WeightSnapshot:
        """The current weights under the current version, for observations as they are."""
        return WeightSnapshot.of(self.version, self.algorithm.normalizer.fold(model_arrays(self.model)))

    def save(self) -> None:
        """Write a checkpoint: weights, optimiser, versions, counts and the random state."""
        state = {
            **self.algorithm.state_dict(),
            "rng": torch.get_rng_state(),
            "updates": self.updates,
            "steps": self.steps,
            "version": self.version,
            "counts": dict(self.counts),
        }
        checkpoint.save(self._folder, self.updates, state, self.spec.learner.keep_checkpoints)
        self._saved_at, self.failure = time.monotonic(), ""
        self._saved_progress = self._get_progress()

    def _get_progress(self) -> tuple[object, ...]:
        """The progress by which to tell whether the last checkpoint is up to date."""
        return self.updates, self.version, *self.counts.values()

    def _weigh(self, batch: ExperienceBatch) -> list[float]:
        """The evidence against the actor of each segment; 0 for those outside the sample that is checked. [S]

        Empty for an algorithm that needs no log-probabilities, and where the last check was just now.
        """
        now = time.monotonic()
        if self.spec.algorithm.is_off_policy or now < self._checked_at + CHECK_INTERVAL_S:
            return []
        self._checked_at = now
        evidence = np.zeros(len(batch.lengths))
        order = self._random.permutation(len(evidence))
        chosen = np.zeros(len(evidence), np.bool_)
        chosen[order[: 1 + np.searchsorted(np.cumsum(batch.lengths[order]), CHECKED_STEPS)]] = True
        sample = batch.select(chosen)
        log_ratios = self.algorithm.compute_log_ratios(sample)
        if np.isfinite(log_ratios).all():
            evidence[chosen] = compute_evidence(log_ratios, sample.log_probabilities, sample.lengths)
        found: list[float] = evidence.tolist()
        return found

    def _learn(self, batch: ExperienceBatch) -> list[DropReason | None]:
        """The outcome of each segment: learnt from (None), or the drop reason. [S]

        When the batch's loss is not finite, segments whose own loss is not finite are dropped: one actor's bad data.
        """
        stale = self.version - batch.oldest_versions() > self._max_version_lag
        left = ~stale
        if left.any() and not self._update(batch.select(left) if stale.any() else batch):
            left &= [self.algorithm.is_usable(batch.select(one)) for one in np.eye(len(left), dtype=bool)]
            if not left.any() or not self._update(batch.select(left)):
                left[:] = False
                if not self._num_bad_batches:
                    self._bad_since = time.monotonic()
                self._num_bad_batches += 1
        outcomes = [
            None if learnt else DropReason.STALE_CONSUMPTION if old else DropReason.NON_FINITE
            for learnt, old in zip(left, stale, strict=True)
        ]
        if self._hub is not None and self._divides_batches and left.any():
            for index in np.flatnonzero(left)[self._hub.lost]:
                outcomes[index] = DropReason.LEARNER_CRASH
        return outcomes

    def _update(self, batch: ExperienceBatch) -> bool:
        """Learn from a batch; False when not one step was taken, since its loss was not finite."""
        started = time.perf_counter()
        num_updates, metrics = 0, self._metrics  # a batch without a step leaves them
        share = self._hub.distribute(batch, self.algorithm.serialize) if self._hub and self._divides_batches else batch
        try:
            for found in self.algorithm.update(share):
                metrics, num_updates = {**found}, num_updates + 1
        except NonFiniteLoss:
            if not num_updates:  # otherwise the earlier steps stay
                return False
        self._num_bad_batches = 0
        lag = float(np.mean(self.version - batch.versions))
        with self._lock:
            self.updates += num_updates
            self.steps += batch.num_steps
            self._metrics = {
                **metrics,
                "learner/policy_lag": lag,
                "learner/update_ms": 1e3 * (time.perf_counter() - started),
                "learner/batch_steps": float(batch.num_steps),
            }
            if self._hub is not None:
                self._metrics["learner/replicas"] = float(1 + len(self._hub.pids))
        return True

    def _publish_if_due(self) -> None:
        """After each batch that actors wait for; otherwise at most once in `publish_interval_s`."""
        if self._pauses_actors or time.monotonic() - self._published_at >= self.spec.learner.publish_interval_s:
            self.try_publish()

    def try_publish(self) -> None:
        """Publish the weights; later, where no version can be reserved now. For other threads only while it pauses."""
        try:
            self._publish()
        except OSError as error:  # the version could not be reserved: retried later
            self.failure = f"no version could be reserved: {error}"

    def _publish(self) -> None:
        """Raises OSError, without publishing, when the version cannot be reserved."""
        if self.version + 1 > self._num_reserved:
            num_reserved = self.version + 1 + VERSIONS_RESERVED
            atomic_file.replace_synced(self._reserved_path, str(num_reserved).encode())
            self._num_reserved = num_reserved
        self.version += 1
        self._published_updates, self._published_at = self.updates, time.monotonic()
        snapshot = self.snapshot()
        self._sink.publish(snapshot)
        self._published.append(PublishedVersion(self.version, self.steps, snapshot.sha256, snapshot.published_at))

    def _save_if_due(self) -> None:
        """A temporarily full disk costs a checkpoint, not the run. An unchanged state is not saved again."""
        is_due = time.monotonic() - self._saved_at >= self.spec.learner.checkpoint_every_s
        if is_due and self._saved_progress != self._get_progress():
            try:
                self.save()
            except CheckpointError as error:
                self.failure, self._saved_at = str(error), time.monotonic()

    def _restore(self) -> None:
        loaded = checkpoint.load_latest(self._folder)
        if loaded is None:
            return
        self.damaged_checkpoints = loaded.damaged
        state = loaded.state
        try:
            self.algorithm.load_state_dict(state)
        except RuntimeError as error:
            problem = "does not fit the checkpoint of this run"
            field, value = "hidden", str(list(self.spec.hidden))
            if self.spec.model is not None:
                field, value = "model", self.spec.model.word
            raise SpecMismatch(field, value, problem, summarize_error(error, line=-1, max_chars=None)) from None
        torch.set_rng_state(state["rng"])
        self.updates, self.steps, self.version = state["updates"], state["steps"], state["version"]
        self.counts = dict(state["counts"])


def model_arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The state dict as NumPy arrays."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}
