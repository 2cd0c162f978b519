"""The learner: takes experience, updates the model, publishes weights, saves checkpoints.

One loop in one thread. It waits only for experience: publishing hands over a snapshot and returns. Called by the Ray
workers and by `local_loop.py`; knows neither Ray nor sockets nor the environment.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from shoal import checkpoint
from shoal.checkpoint.directory import list_newest_first
from shoal.checkpoint.files import CheckpointMirror
from shoal.checkpoint.stored import StoredCheckpoints, open_run_store
from shoal.errors import CheckpointError, LedgerUnwritable, SpecMismatch, summarize_error
from shoal.rl.algorithms.algorithm import NonFiniteLoss, make_algorithm
from shoal.rl.batch_checks import BadBatchPolicy, EvidenceCheck
from shoal.rl.batch_lease import BatchLease
from shoal.rl.experience.demonstrations import DemonstrationSite, ShownExperience
from shoal.rl.experience.queue import UNWRITABLE_PAUSE_S, BatchRequest, ExperienceBatch, ExperienceSource
from shoal.rl.learner_group import LearnerHub
from shoal.rl.part_specs import LearnerSpec
from shoal.rl.pausable_loop import PausableLoop
from shoal.rl.published_versions import PublishedVersions, WeightSink
from shoal.rl.spec import RLSpec
from shoal.store import Store
from shoal.weights import PublishedVersion, Skipped, WeightSnapshot, decode_tensors
from shoal.wire import DropReason, ExperienceSpec

VERSIONS_FILE = "versions-reserved"  # in the folder of checkpoints
PAUSE = 9.0  # between checkpoints, times what the last one took: saving has a tenth of the time at most
VERSIONS_AHEAD = 1_000_000  # of a checkpoint: that many are published without another in the store, at most
LARGE_LAG = 4.0  # versions, of the newest batch, beyond which the next one may be larger
UPLOAD_TIMEOUT_S = 30.0  # of the last checkpoint, at the end


class Learner:
    """One learner of one run: it updates the weights, and holds what publishes, saves, takes and checks."""

    def __init__(
        self,
        spec: RLSpec,
        experience: ExperienceSpec,
        source: ExperienceSource,
        sink: WeightSink,
        folder: Path,
        used_version: int = 0,
        hub: LearnerHub | None = None,
        *,
        store: Store | None = None,
        must_restore: bool = False,
        demonstrations: ShownExperience | None = None,
    ) -> None:
        """Restore from the newest checkpoint in `folder`, if there is one, and publish at once.

        `used_version`: the newest version that this run has used so far, if known; new ones are above it. If unknown,
        they are above every version reserved in `folder`. `hub`: other learners take shares of each batch.
        `store`: where checkpoints outlive this host. `must_restore`: the run has learnt before; raises CheckpointError
        on a host that has nothing of it. `demonstrations`: what others have shown.
        """
        torch.set_num_threads(spec.learner.torch_threads)
        torch.manual_seed(spec.learner.seed)
        self.spec, self._hub = spec, hub
        self._divided_by = None if spec.algorithm.is_off_policy else hub  # of a replay, the samples are divided
        self.algorithm = make_algorithm(spec, experience, folder)
        self.algorithm.demonstrations = demonstrations
        self.algorithm.group = hub or self.algorithm.group
        self.updates = self.steps = 0  # steps: of the environment, that entered an update
        self.counts = {"consumed": 0, "dropped": 0}  # segments, over all incarnations of the learner
        # Called in the learner's thread with how long it has taken for a batch, publication included.
        self.on_batch: Callable[[float], object] = lambda seconds: None
        self.failure = ""  # why the last checkpoint or version could not be written; "" when it was
        self._metrics: dict[str, float] = {}
        self._lock = threading.Lock()  # guards the fields that stats() reads together
        self._checkpoints = LearnerCheckpoints(folder, spec.learner, store)
        # Versions up to the number of registered opponents are theirs, in the pool.
        if must_restore:
            self._checkpoints.require_files()
        self._log_position = self._restored_version = 0
        self._published: tuple[int, Skipped] = 0, ()  # at the checkpoint: the newest version, the skipped ones
        has_moved = self._restore(folder / VERSIONS_FILE) and not used_version
        after = max(self._restored_version, used_version, len(spec.self_play.opponents))
        numbering = folder / VERSIONS_FILE, after, bool(used_version), self.updates
        self._versions = PublishedVersions(sink, *numbering, *self._published)
        # Actors that do not pause fill one half of the queue while the learner has the other.
        has_all = spec.algorithm.pauses_actors or spec.algorithm.takes_all
        max_segments = max(1, spec.queue_capacity // (1 if has_all else 2))
        request = BatchRequest(*spec.batch_limits, max_segments, spec.take_timeout_s, position=self._log_position)
        self._lease = BatchLease(source, request)
        check = EvidenceCheck(self.algorithm.compute_log_ratios, spec.learner.seed)
        is_checked = not (spec.algorithm.is_off_policy or spec.algorithm.takes_all)
        self._evidence = check if is_checked else None
        self._bad_batches = BadBatchPolicy(spec.applied_gateway.max_version_lag, self._update, self.algorithm.is_usable)
        self._loop = PausableLoop(self.step)
        self.thread = threading.Thread(target=self.run_as_thread, name="learner", daemon=True)
        self.error: BaseException | None = None  # what has ended `run` there
        if has_moved:  # before it publishes: the host before must not continue below these numbers
            self.save()
            self.failure = self._checkpoints.finish_upload()
        self._publish()

    @classmethod
    def of_run(
        cls,
        spec: RLSpec,
        site: DemonstrationSite,
        source: ExperienceSource,
        sink: WeightSink,
        used_version: int = 0,
        hub: LearnerHub | None = None,
        has_learnt: bool = False,
    ) -> Self:
        """The learner of a run with files at `site`. has_learnt: it is resumed, and has published weights before"""
        return cls(
            spec,
            site.experience,
            source,
            sink,
            site.folder / "checkpoints",
            used_version,
            hub,
            store=open_run_store(site.name),
            demonstrations=site.open_shown(),
            must_restore=has_learnt or bool(used_version),
        )

    def finish(self, timeout_s: float) -> bool:
        """Stop learning, publish and save; returns whether that is done. Idempotent."""
        self.stop()
        if self.thread.is_alive():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def run(self) -> None:
        """Learn until `stop()`; publish and save the last good state, even when an update raises.

        Raises Closed, without saving, when another incarnation has taken over: it owns versions and checkpoints now.
        """
        try:
            self._loop.run()
        finally:
            if self._hub is not None:
                self._hub.close()
            if self.algorithm.demonstrations is not None:
                self.algorithm.demonstrations.close()
            if not self._lease.is_superseded:
                self._publish_updates()
                self.save()
                self.failure = self._checkpoints.finish_upload()
            self._checkpoints.close()

    def run_as_thread(self) -> None:
        """`run`, in a thread of its own, with thread settings suited to learning."""
        # A nearly certain policy has denormal gradients, which cost a hundred times as much as zero.
        torch.set_flush_denormal(True)
        try:
            self.run()
        except BaseException as error:
            self.error = error
            raise

    def stop(self) -> None:
        """End `run` after the current update. Idempotent, callable from any thread."""
        self._loop.stop()

    def pause(self) -> WeightSnapshot:
        """Stop learning until `resume`; returns the weights, published, which stay until then.

        Waits for the present update, and for disk space to reserve a version. Experience waits in the queue meanwhile,
        and then the actors do. Raises Closed when the learner is stopped before.
        """
        return self._loop.pause(lambda: self.snapshot() if self._publish_updates() else None, UNWRITABLE_PAUSE_S)

    def republish(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """Publish earlier weights as the newest version, while it pauses. Raises OSError, as when the disk is full."""
        weights = decode_tensors(snapshot.payload)
        self._versions.publish(weights, self.updates, self.steps)
        return WeightSnapshot.of(self.version, weights)

    def resume(self) -> None:
        """Continue learning after `pause`."""
        self._loop.resume()

    def step(self) -> bool:
        """Take one batch and learn from it; False when none came in time, or its outcomes cannot be recorded yet."""
        if self._lease.outcomes is None and not self._take_and_learn():
            return False
        try:
            self._lease.acknowledge()
        except LedgerUnwritable:  # the next step retries
            self._loop.wait(UNWRITABLE_PAUSE_S)
            return False
        self._bad_batches.require_progress(time.monotonic())
        self._save_if_due()
        return True

    def _take_and_learn(self) -> bool:
        least, most = self.spec.batch_limits
        config, lag = self.spec.algorithm, self._metrics.get("learner/policy_lag", 0.0)
        takes_most = config.is_off_policy or config.takes_all or lag > LARGE_LAG
        batch = self._lease.take(self.version if config.pauses_actors else 0, most if takes_most else least)
        if batch is None:
            if self._learn_shown():
                self.updates += 1
            if self.updates != self._versions.updates:
                self._publish_if_due()
            self._save_if_due()
            return False
        started = time.perf_counter()
        versions = self.version - self._versions.measure_lag(batch.versions)  # as if no number had been skipped
        self.algorithm.version = self.version
        prepared = self.algorithm.prepare(replace(batch, versions=versions))
        # Before the weights depend on the batch.
        evidence = [] if self._evidence is None else self._evidence.score(prepared, time.monotonic())
        lags = self.version - prepared.oldest_versions()
        outcomes = self._bad_batches.learn(prepared, lags, time.monotonic())
        learnt = np.array([outcome is None for outcome in outcomes])
        if self._divided_by is not None and learnt.any():
            for index in np.flatnonzero(learnt)[self._divided_by.lost]:
                outcomes[index], learnt[index] = DropReason.LEARNER_CRASH, False
        self.algorithm.normalizer.learn(batch, learnt)  # after: it was learnt in the units of its actors
        if learnt.any():
            self._publish_if_due()
        self.on_batch(time.perf_counter() - started)
        self.counts["dropped"] += int((~learnt).sum())
        self.counts["consumed"] += int(learnt.sum())
        self._lease.set_outcomes(batch, outcomes, evidence)
        return True

    @property
    def model(self) -> torch.nn.Module:
        return self.algorithm.model

    @property
    def version(self) -> int:
        """The newest published one."""
        return self._versions.version

    @property
    def restored_updates(self) -> int:
        return self._checkpoints.restored_updates

    def stats(self) -> dict[str, Any]:
        """Counters and the newest metrics. Plain values."""
        with self._lock:
            return {
                "updates": self.updates,
                "steps": self.steps,
                "consumed": self.counts["consumed"],
                "weights_version": self.version,
                "restored_updates": self.restored_updates,
                "damaged_checkpoints": list(self._checkpoints.damaged),
                "checkpoint_failure": self.failure,
                "failure": f"{type(self.error).__name__}: {self.error}" if self.error else "",
                "pid": os.getpid(),
                "replica_pids": self._hub.pids if self._hub is not None else [],
                "metrics": dict(self._metrics),
            }

    def take_published(self, after: int) -> list[PublishedVersion]:
        """The versions above the number `after`, also of an earlier process; those up to it are recorded."""
        return self._versions.take(after)

    def snapshot(self) -> WeightSnapshot:
        """The current weights under the current version, for observations as they are."""
        return WeightSnapshot.of(self.version, self._fold_weights(), self._versions.skipped)

    def _fold_weights(self) -> dict[str, np.ndarray]:
        return self.algorithm.normalizer.fold(model_arrays(self.model))

    def _update(self, batch: ExperienceBatch) -> bool:
        """Learn from a batch; False when not one step was taken, since its loss was not finite."""
        started = time.perf_counter()
        num_updates, metrics = 0, self._metrics  # a batch without a step leaves them
        self._learn_shown()
        share = batch if self._divided_by is None else self._divided_by.distribute(batch, self.algorithm.serialize)
        try:
            for step_metrics in self.algorithm.update(share):
                metrics, num_updates = {**step_metrics}, num_updates + 1
        except NonFiniteLoss:
            if not num_updates:  # otherwise the earlier steps stay
                return False
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

    def _learn_shown(self) -> bool:
        """Take in what others have shown, also while no game plays; whether the weights have changed."""
        if self.algorithm.demonstrations is None:
            return False
        self.algorithm.demonstrations.advance(self.steps)
        has_changed = self.algorithm.clone_demonstrations()
        if has_changed and self._hub is not None:
            self._hub.renew_weights()
        return has_changed

    def _publish_if_due(self) -> None:
        if self._versions.is_due(self.spec.publish_interval_s):
            self.try_publish()

    def _publish_updates(self) -> bool:
        """Publish what is not yet; whether the newest version has every update."""
        if self.updates != self._versions.updates:
            self.try_publish()
        return self.updates == self._versions.updates

    def try_publish(self) -> None:
        """Publish the weights; later, where no version can be reserved now. For other threads only while it pauses."""
        try:
            self._publish()
        except OSError as error:  # the version could not be reserved: retried later
            self.failure = f"no version could be reserved: {error}"

    def _publish(self) -> None:
        self._versions.publish(self._fold_weights(), self.updates, self.steps)

    def save(self) -> None:
        """Write a checkpoint: weights, optimiser, versions, counts and the random state."""
        self._checkpoints.save(self._get_progress(), self._make_state())
        self.failure = self._checkpoints.upload_failure

    def _save_if_due(self) -> None:
        """A temporarily full disk costs a checkpoint, not the run."""
        if self._checkpoints.is_due(self._get_progress()):
            try:
                self.save()
            except CheckpointError as error:
                self.failure = str(error)
                self._checkpoints.postpone()

    def _get_progress(self) -> tuple[int, ...]:
        return self.updates, self.version, *self.counts.values()

    def _make_state(self) -> dict[str, Any]:
        return {
            **self.algorithm.state_dict(),
            "rng": torch.get_rng_state(),
            **({"cuda_rng": torch.cuda.get_rng_state()} if self.algorithm.device.type == "cuda" else {}),
            "updates": self.updates,
            "steps": self.steps,
            "version": self.version,
            "reserved": self.version + VERSIONS_AHEAD,
            "skipped": self._versions.skipped,
            "position": self._lease.request.position,
            "counts": dict(self.counts),
        }

    def _restore(self, reserved: Path) -> bool:
        """Load the newest checkpoint, if there is one. Whether it is of another host: `reserved` does not tell which
        versions were published there. Raises SpecMismatch for one of another network."""
        state = self._checkpoints.load()
        if state is None:
            return False
        try:
            self.algorithm.load_state_dict(state)
        except (RuntimeError, KeyError) as error:
            problem = "does not fit the checkpoint of this run"
            field, value = "hidden", str(list(self.spec.hidden))
            if self.spec.model is not None:
                field, value = "model", self.spec.model.word
            raise SpecMismatch(field, value, problem, summarize_error(error, line=-1, max_chars=None)) from None
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state and self.algorithm.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"])
        self.updates = state["updates"]
        self.steps = state["steps"]
        self.counts = dict(state["counts"])
        self._log_position = int(state["position"])
        skipped = tuple((retained, last) for retained, last in state["skipped"])
        self._published = int(state["version"]), skipped
        has_moved = not reserved.exists() or int(reserved.read_text()) < state["version"]
        self._restored_version = int(state["reserved"] if has_moved else state["version"])
        return has_moved


class LearnerCheckpoints:
    """The checkpoints in `folder`, and when the next one is due: an unchanged state is not saved again.

    store: the newest are uploaded there, in the background
    """

    def __init__(self, folder: Path, spec: LearnerSpec, store: Store | None = None) -> None:
        self._folder = folder
        self._interval_s = spec.checkpoint_every_s
        self._num_retained = spec.keep_checkpoints
        self._saved_at, self._progress = time.monotonic(), tuple[int, ...]()
        self._cost_s = 0.0  # of the last one
        self.damaged: list[str] = []
        self.restored_updates = 0
        self._mirror: CheckpointMirror | None = None
        if store is not None:
            self._mirror = CheckpointMirror(StoredCheckpoints(store), folder, self._num_retained)

    def require_files(self) -> None:
        """Raises CheckpointError when this host and the store have nothing of a run that has learnt before."""
        if (self._folder / VERSIONS_FILE).exists():  # a learner was here; it may have died before its first checkpoint
            return
        if self._mirror is not None:
            self._mirror.fetch_newest()
        if not list_newest_first(self._folder):
            problem = f"{self._folder} on {socket.gethostname()} has no checkpoint of this run, which has learnt before"
            remedy = "set SHOAL_STORE to a bucket, or SHOAL_HOME to a folder that all hosts mount"
            raise CheckpointError(f"{problem}: resume it where it ran; for the next run, {remedy}")

    @property
    def upload_failure(self) -> str:
        return "" if self._mirror is None else self._mirror.failure

    def finish_upload(self) -> str:
        """Wait until the last checkpoint is in the store; why it is not, or ""."""
        return "" if self._mirror is None else self._mirror.finish(UPLOAD_TIMEOUT_S)

    def close(self) -> None:
        """Upload nothing more. Idempotent."""
        if self._mirror is not None:
            self._mirror.close()

    def load(self) -> dict[str, Any] | None:
        """The state in the newest good checkpoint, if there is one."""
        if self._mirror is not None:
            self._mirror.fetch_newest()
        loaded = checkpoint.load_latest(self._folder)
        if loaded is None:
            return None
        self.damaged, self.restored_updates = loaded.damaged, loaded.state["updates"]
        return loaded.state

    def is_due(self, progress: tuple[int, ...]) -> bool:
        """progress: numbers that change with the state"""
        pause_s = max(self._interval_s, PAUSE * self._cost_s)
        return time.monotonic() - self._saved_at >= pause_s and progress != self._progress

    def save(self, progress: tuple[int, ...], state: dict[str, Any]) -> None:
        """Write one, named by the number of updates, the first of `progress`. Raises CheckpointError."""
        began_s = time.monotonic()
        path = checkpoint.save(self._folder, progress[0], state, self._num_retained)
        if self._mirror is not None:
            self._mirror.add(path)
        self._saved_at, self._progress = time.monotonic(), progress
        self._cost_s = self._saved_at - began_s

    def postpone(self) -> None:
        """The disk is full: the next one is due after the full interval."""
        self._saved_at = time.monotonic()


def model_arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The state dict as NumPy arrays."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}
