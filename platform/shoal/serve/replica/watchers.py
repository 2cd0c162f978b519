"""Keeps a replica up to date with the weights of the runs that it follows, and with the controller's plan.

A replica follows plans, and each live model the weights of its run. Neither touches a request: a change takes effect
with the next batch. While the run's store or the controller is away, serving continues and the call is retried.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from shoal.errors import Closed, ConnectionLost, WeightsError
from shoal.serve.messages.desired_state import EndpointPlan
from shoal.serve.messages.inference import ControllerApi
from shoal.serve.messages.replica_report import PeerReport, ReplicaReport
from shoal.weights import WeightSnapshot, WeightSource

POLL_S = 1.5
REPORT_S = 1.0
RETRY_S = 0.2
logger = logging.getLogger(__name__)


class WeightFollower:
    """Passes every newer snapshot of `source` to `take`, in its own thread, until close().

    take:       returns whether the snapshot is served now; raises WeightsError for one that does not fit, which is
                logged and skipped
    has_polled: whether the source was reached once, and what it had then was taken or rejected
    """

    def __init__(self, source: WeightSource, take: Callable[[WeightSnapshot], bool], poll_s: float = 1.0) -> None:
        self._source = source
        self._take = take
        self._poll_s = poll_s
        self.has_polled = False
        self._last_version = 0  # the source's last version
        self._stop = threading.Event()
        self._resumed = threading.Event()
        self._resumed.set()
        self._thread = threading.Thread(target=self._run, name="shoal-weights", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    def set_paused(self, paused: bool) -> None:
        """Pause or resume polling the source; after a resume, the present snapshot counts as new."""
        if paused:
            self._resumed.clear()
        else:
            self._last_version = 0
            self._resumed.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop following; waits up to `timeout_s` for the thread. Idempotent."""
        self._stop.set()
        self._resumed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._resumed.wait() and not self._stop.is_set():
            try:
                snapshot = self._source.wait_newer(self._last_version, self._poll_s)
            except Closed:
                return
            except WeightsError as error:
                logger.error("no new weights, serving continues: %s", error)
                self.has_polled = True
                self._stop.wait(self._poll_s)
                continue
            if snapshot is None:
                self.has_polled |= self._source.is_reachable
                continue
            self._last_version = snapshot.version
            try:
                is_served = self._take(snapshot)
            except WeightsError as error:
                logger.error("weights rejected, serving continues: %s", error)
            else:
                logger.info("%s weights version %d", "serving" if is_served else "passing over", snapshot.version)
            finally:
                self.has_polled = True


class ControllerClient(ControllerApi, Protocol):
    """A replica's view of the controller. Raises ConnectionLost while it is away."""

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None: ...
    async def report(self, report: ReplicaReport) -> list[PeerReport]:
        """Send a report; returns the newest reports of the other replicas."""
        ...

    async def leave(self, replica: str) -> None: ...

    async def request_load(
        self, name: str, replica: str, idle_s: Mapping[str, float], lost: Sequence[str], timeout_s: float
    ) -> int | None:
        """See `Assignments`. Raises InferenceError."""
        ...

    async def store_weights(self, model: str, snapshot: WeightSnapshot) -> None:
        """Store weights of a live model, for replicas that will need them."""
        ...

    async def fetch_weights(self, model: str, version: int) -> WeightSnapshot | None: ...


class PlanFollower:
    """Applies every plan and reports, on the running event loop, until close().

    apply:  takes a plan; returns at once
    report: builds the report, each second and after `notify_changed()`
    rest_s: of the reports, after each
    peers:  the last reports of the other replicas
    """

    def __init__(
        self,
        replica: str,
        source: ControllerClient,
        apply: Callable[[EndpointPlan], None],
        report: Callable[[], ReplicaReport],
        rest_s: float = 0.0,
    ) -> None:
        self._rest_s = rest_s
        self._replica = replica
        self._source = source
        self._apply = apply
        self._report = report
        self._changed = asyncio.Event()
        self.peers: list[PeerReport] = []
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._retry(step)) for step in (self._follow, self._send_report)]
        self._known_generation = -1

    @property
    def is_alive(self) -> bool:
        return not any(task.done() for task in self._tasks)

    def notify_changed(self) -> None:
        self._changed.set()

    async def close(self) -> None:
        """Stop following, and notify the controller if it is reachable. Idempotent."""
        for task in self._tasks:
            task.cancel()
        with suppress(ConnectionLost):
            await self._source.leave(self._replica)

    async def _retry(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except ConnectionLost as error:
                logger.debug("the controller is away, serving continues: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        plan = await self._source.follow(self._replica, self._known_generation, POLL_S)
        if plan is not None:
            self._apply(plan)
            self._known_generation = plan.generation
            self.notify_changed()

    async def _send_report(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self._changed.wait()
        self._changed.clear()
        try:
            self.peers = await self._source.report(self._report())
        except ConnectionLost:
            self._changed.set()
            raise
        if self._rest_s:
            await asyncio.sleep(self._rest_s)
