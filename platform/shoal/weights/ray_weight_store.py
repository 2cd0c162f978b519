"""The WeightStore as a Ray actor, the end that reads it (`RayWeightSource`) and the end that feeds it.

The actor restarts when it dies and keeps nothing on disk: the publisher remembers its last snapshot, notices the loss
within a second and publishes again; sources meanwhile return None and ask again. Called by learners and endpoints; the
rules of publishing are in `publisher`, those of storing in `store`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from shoal.errors import ConnectionLost, WeightsError
from shoal.ray_call import AWAY, CALL_TIMEOUT_S, NAMESPACE, RETRY_S, call_until_answered
from shoal.weights.deltas import FULL_EVERY, RecentDeltas, WeightDelta, follow_deltas
from shoal.weights.publisher import WeightPublisher
from shoal.weights.store import WeightSnapshot, WeightStore

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)
class WeightStoreWorker:
    """A WeightStore whose waiters are coroutines, so that any number of consumers costs no thread."""

    def __init__(self) -> None:
        self._store, self._changed = WeightStore(), asyncio.Event()
        self._deltas = RecentDeltas()

    async def publish(self, snapshot: WeightSnapshot) -> bool:
        newer = self._store.publish(snapshot)
        if newer:
            self._deltas.clear()
            self._notify()
        return newer

    async def publish_delta(self, delta: WeightDelta) -> bool:
        """False where it is none to the newest version: then all of the weights are to be published."""
        try:
            snapshot = await asyncio.to_thread(self._apply, delta)
        except WeightsError:
            return False
        if self._store.publish(snapshot):
            self._deltas.add(delta, snapshot)
            self._notify()
        return True

    def _apply(self, delta: WeightDelta) -> WeightSnapshot:
        if (newest := self._store.latest()) is None:
            raise WeightsError("there are no weights that could have changed")
        return delta.apply(newest)

    async def hold(self, snapshot: WeightSnapshot | None) -> None:
        self._store.hold(snapshot)
        self._notify()

    async def version(self) -> int:
        return self._store.version

    async def wait_newer(
        self, than: int, timeout_s: float, follows_hold: bool = False, known: str = ""
    ) -> Sequence[WeightDelta] | WeightSnapshot | None:
        """known: SHA-256 of a payload that the caller has"""
        try:
            async with asyncio.timeout(timeout_s):
                while (snapshot := self._store.wait_newer(than, 0.0, follows_hold)) is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._deltas.find(known, snapshot)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def start_weight_store(run_id: str, placement: Mapping[str, Any] = MappingProxyType({})) -> ActorHandle:
    """The store of a run: named `weights-{run_id}` in the namespace `shoal`. Where it is not there, it is made.

    placement: Ray's options that place it
    """
    options = {"name": f"weights-{run_id}", "namespace": NAMESPACE, "get_if_exists": True}
    return WeightStoreWorker.options(**placement, **options).remote()  # type: ignore[attr-defined]


class RayWeightSource:
    """A WeightSource on a store's handle; can be pickled. None also while the store is away: the caller asks again.

    follows_hold: reads the snapshot that the store holds, while there is one
    """

    is_reachable = True

    def __init__(self, store: ActorHandle, follows_hold: bool = False) -> None:
        self._store, self._follows_hold = store, follows_hold
        self._known: WeightSnapshot | None = None  # the last one, to which changes apply

    def latest(self) -> WeightSnapshot | None:
        return self.wait_newer(0, 0.0)

    def wait_newer(self, than: int, timeout_s: float) -> WeightSnapshot | None:
        limit_s, pause_s = timeout_s + CALL_TIMEOUT_S, min(timeout_s, RETRY_S)
        self.is_reachable = True
        try:
            known = self._known.sha256 if self._known is not None else ""
            found = ray.get(self._store.wait_newer.remote(than, timeout_s, self._follows_hold, known), timeout=limit_s)
        except AWAY:
            self.is_reachable = False
            time.sleep(pause_s)  # a dead store answers at once, and the caller must not spin
            return None
        if found is None:
            return None
        try:
            self._known = follow_deltas(self._known, found)
        except WeightsError as error:
            logger.warning("the weights are fetched as a whole: %s", error)
            self._known = None
            return self.wait_newer(than, timeout_s)
        return self._known


class RayWeightPublisher(WeightPublisher):
    """Feeds the store behind a handle from a thread; `publish` never waits.

    Small weights travel inside the call (a tenth of the cost of an object in Ray's store), large ones beside it: Ray
    decides. Of bf16 weights what has changed since the version before is sent, if the store has that; all of them every
    FULL_EVERY versions.
    """

    def __init__(self, store: ActorHandle) -> None:
        self._store = store
        self._sent: WeightSnapshot | None = None
        self._num_deltas = 0  # since all of the weights were sent
        super().__init__(self._send_newer, stored_version=lambda: _call(store.version))

    def _send_newer(self, snapshot: WeightSnapshot) -> None:
        base = self._sent if self._num_deltas < FULL_EVERY else None
        delta = None if base is None else WeightDelta.between(base, snapshot)
        if delta is None or not _call(self._store.publish_delta, delta):
            _call(self._store.publish, snapshot)
            self._num_deltas = -1
        self._num_deltas += 1
        self._sent = snapshot


def get_stored_version(store: ActorHandle, timeout_s: float = 30.0) -> int:
    """The newest version that the store has had; 0 when it has none, or does not come back within `timeout_s`."""
    try:
        return int(call_until_answered(store.version, patience_s=timeout_s, away=(RayError,)))
    except RayError:
        return 0


def _call(method: Any, *args: object) -> Any:
    try:
        return ray.get(method.remote(*args), timeout=CALL_TIMEOUT_S)
    except RayError as error:  # also a full object store or disk: it is tried again
        raise ConnectionLost(f"the weight store did not answer: {error}") from error
