"""The queue of a cluster's runs: a run asks for the places of its workers, waits for its turn, and starts.

Each run has an entry in the cluster's own store (the key-value store of Ray's GCS), which its driver alone writes.
Every driver reads all entries and finds the same order (`run_queue`), so no process is needed for the queue. A reader
removes the entries of drivers that have ended. Ray itself decides whether the places fit, by a placement group, which
also asks an autoscaler for nodes. Called by the flows of training, sweeps, populations and the loop.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Self

import ray
from ray._private import state
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from shoal.cluster.capacity import NODES_WAIT_S, WaitLog
from shoal.cluster.growth import Bundle, Growth, describe_launches, find_growth
from shoal.cluster.run_queue import (
    AdmissionState,
    QueuedRun,
    describe_shortage,
    has_capacity,
    list_ahead,
    order_waiting,
)
from shoal.errors import NoCapacity
from shoal.runs.record.provenance import find_owner

POLL_S = 0.5
QUIET_S = 2.0  # before a wait is reported: a run that has just ended releases its places
REPORT_S = 10.0  # between two reports, unless the position or what the autoscaler starts changes
BUSY_WAIT_S = 600.0  # the default wait where other runs wait or run
CAPACITY_WAIT_S = 10.0  # the default wait where nothing is known to end: for what has just ended
_NAMESPACE, _PREFIX = b"shoal", "run/"


class Entries:
    """The entries of the connected cluster's runs."""

    def put(self, run: QueuedRun) -> None:
        """Write the entry of a run of this driver."""
        internal_kv._internal_kv_put(_PREFIX + run.run_id, json.dumps(asdict(run)), namespace=_NAMESPACE)

    def remove(self, run_id: str) -> None:
        """Remove an entry. Idempotent."""
        internal_kv._internal_kv_del(_PREFIX + run_id, namespace=_NAMESPACE)

    def read(self) -> list[QueuedRun]:
        """All entries of drivers that live."""
        keys = internal_kv._internal_kv_list(_PREFIX, namespace=_NAMESPACE)
        texts = [internal_kv._internal_kv_get(key, namespace=_NAMESPACE) for key in keys]
        runs = [
            QueuedRun(**fields | {"state": AdmissionState(fields["state"])})
            for fields in map(json.loads, filter(None, texts))
        ]
        own = get_driver_id()
        living = living_drivers() if any(each.driver != own for each in runs) else {own}
        for each in runs:
            if each.driver not in living:
                self.remove(each.run_id)
        return [each for each in runs if each.driver in living]


def get_driver_id() -> str:
    """Ray's id of the job of this driver."""
    return str(ray.get_runtime_context().get_job_id())


def living_drivers() -> set[str]:
    """Ray's ids of the jobs with a living driver."""
    return {job["JobID"] for job in state.jobs() if not job["IsDead"]}


class PlacementRequest:
    """A request to Ray for a place for each bundle, in one placement group; made when it is first asked for."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self._bundles = bundles
        self._group: PlacementGroup | None = None

    def is_granted(self, timeout_s: float) -> bool:
        """Whether Ray has reserved all places within this time."""
        self._group = self._group or placement_group([dict(bundle) for bundle in self._bundles])
        return bool(self._group.wait(timeout_s))

    def close(self) -> None:
        """Withdraw the request, or free its places. Idempotent."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


class RunAdmission:
    """A run's entry among the runs of the connected cluster, until `close`.

    priority: of the runs that wait, those with a higher one start first
    """

    def __init__(self, run_id: str, priority: int = 0) -> None:
        self._entries = Entries()
        self._run = QueuedRun(run_id, get_driver_id(), find_owner(), priority, time.time(), {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the run's entry. Idempotent; does nothing on a cluster that has ended."""
        with suppress(RayError):
            self._entries.remove(self._run.run_id)

    def wait(self, bundles: Sequence[Bundle], lack: str, wait_s: float | None, record: Callable[..., None]) -> None:
        """Wait until it is the run's turn and Ray has a place for each bundle. The places are free when this returns;
        no other run of the queue takes them before `mark_running`.

        Raises NoCapacity after `wait_s` seconds (None: as many as make sense on this cluster).

        lack:   what the run needs, for messages: `4 workers need a GPU each`
        record: records an event
        """
        bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
        needs: Counter[str] = Counter()
        for bundle in bundles:
            needs.update(bundle)
        self._write(AdmissionState.WAITING, needs)
        if self._claim_free_capacity():
            return
        growth = find_growth()
        if wait_s is None:
            others = len(self._entries.read()) > 1
            wait_s = NODES_WAIT_S if growth else BUSY_WAIT_S if others else CAPACITY_WAIT_S
        with closing(PlacementRequest([bundle for bundle in bundles if bundle])) as request:
            self._wait_for(request, growth, lack, wait_s, record)

    def mark_running(self, times: int = 1) -> None:
        """Note that the run's workers have their places.

        times: how many such groups of workers it may have from now on
        """
        if self._run.state is AdmissionState.STARTING:
            self._write(AdmissionState.RUNNING, {name: times * each for name, each in self._run.needs.items()})

    def _write(self, to: AdmissionState, needs: Mapping[str, float] | None = None) -> None:
        self._run = replace(self._run, state=to, needs=self._run.needs if needs is None else dict(needs))
        self._entries.put(self._run)

    def _claim_free_capacity(self) -> bool:
        """Take the places if all are free now. Two runs that do so at the same moment see each other when they look
        again, and both go on to wait, in their order."""
        if not self._has_capacity():
            return False
        self._write(AdmissionState.STARTING)
        if not self._has_capacity():
            self._write(AdmissionState.WAITING)
        return self._run.state is AdmissionState.STARTING

    def _has_capacity(self) -> bool:
        return has_capacity(self._run, self._entries.read(), ray.available_resources())

    def _wait_for(
        self, request: PlacementRequest, growth: Growth, lack: str, wait_s: float, record: Callable[..., None]
    ) -> None:
        begun, log = time.monotonic(), WaitLog(record, wait_s)
        while True:
            runs = [self._run, *(each for each in self._entries.read() if each.run_id != self._run.run_id)]
            free, total = ray.available_resources(), ray.cluster_resources()
            possible = {
                name: sum(growth.list_hosts(name)) if growth else total.get(name, 0.0) for name in self._run.needs
            }
            left = {name: possible[name] - total.get(name, 0.0) + free.get(name, 0.0) for name in possible}
            may_ask = not list_ahead(self._run, runs) or has_capacity(self._run, runs, left)
            waited_s = time.monotonic() - begun
            timeout_s = max(0.0, min(POLL_S, wait_s - waited_s))
            if may_ask and request.is_granted(timeout_s):
                self._write(AdmissionState.STARTING)
                log.report("")
                return
            if not may_ask:
                request.close()
                time.sleep(timeout_s)
            shortage = describe_shortage(self._run, runs, free, total)
            launches = describe_launches() if growth else ""
            if waited_s >= wait_s:
                missing = f"no nodes came{_after_colon(launches)}; " if growth else ""
                raise NoCapacity(lack, f"{missing}{shortage}", wait_s)
            if waited_s >= QUIET_S:
                nodes = f"; waiting for nodes{_after_colon(launches)}" if growth else ""
                position = [each.run_id for each in order_waiting(runs)].index(self._run.run_id) + 1
                entry = {name: getattr(self._run, name) for name in ("owner", "priority", "since_s", "needs")}
                reason = f"{lack}: {shortage}{nodes}"
                log.report(reason, REPORT_S, (position, launches), position=position, **entry)


def _after_colon(text: str) -> str:
    return f": {text}" if text else ""
