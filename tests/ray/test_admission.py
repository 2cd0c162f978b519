"""The queue of runs on a cluster: one waits until another has ended, and the order is kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from shoal.cluster import admission as run_admission
from shoal.cluster.admission import Entries, RunAdmission
from shoal.cluster.capacity import wait_for_resource
from shoal.cluster.run_queue import AdmissionState, QueuedRun, order_waiting
from shoal.errors import NoCapacity
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

STATE_S = 120.0
BUNDLES = [{"CPU": 1.0, "GPU": 0.0}] * 6


class Workers:
    """A run that asks for six of the eight CPUs, and whose workers take them."""

    def __init__(self, name: str, priority: int = 0) -> None:
        self.admission, self.waits = RunAdmission(name, priority), list[dict[str, object]]()

    def start(self, wait_s: float = STATE_S) -> None:
        self.admission.wait(
            BUNDLES, "6 workers need a CPU each", wait_s, lambda kind, **details: self.waits.append(details)
        )
        self._group = placement_group([{"CPU": 1.0}] * 6)
        assert self._group.wait(STATE_S)
        wait_for(lambda: ray.available_resources().get("CPU", 0.0) == 2.0, STATE_S, "Ray's own count")
        self.admission.mark_running()

    def end(self) -> None:
        remove_placement_group(self._group)
        self.admission.close()


def waiting() -> list[str]:
    return [each.run_id for each in order_waiting(Entries().read())]


def test_waiting_runs_start_in_their_order_as_others_end(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_admission, "QUIET_S", 0.0)
    assert wait_for_resource("CPU", 8.0, STATE_S) == 8.0
    first = Workers("first")
    low = Workers("low")
    high = Workers("high", priority=1)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        first.start()
        stack.callback(low.admission.close)
        stack.callback(high.admission.close)
        started = threads.submit(low.start)
        wait_for(lambda: low.waits, STATE_S, "the first one that waits")
        urgent = threads.submit(high.start)
        wait_for(lambda: waiting() == ["high", "low"], STATE_S, "both")
        wait_for(lambda: any(each.get("position") == 2 for each in low.waits), STATE_S, "its position")
        first.end()
        urgent.result(STATE_S)
        assert waiting() == ["low"]
        assert not started.done()
        high.end()
        started.result(STATE_S)
        low.end()
    owner = RunAdmission("any")._run.owner
    assert low.waits[0]["reason"] == (f"6 workers need a CPU each: 2 of 8 CPUs free; first ({owner}) has 6 CPU")
    assert {
        "position": 1,
        "owner": owner,
        "priority": 0,
        "needs": {"CPU": 6.0},
        "wait_s": STATE_S,
    }.items() <= low.waits[0].items()
    assert low.waits[-1] == {"reason": "", "wait_s": STATE_S}
    assert Entries().read() == []


def test_a_run_that_has_waited_in_vain_says_what_it_lacks(cluster: EmbeddedCluster) -> None:
    first, second = Workers("one"), Workers("two")
    wait_for_resource("CPU", 8.0, STATE_S)
    first.start()
    try:
        with second.admission, pytest.raises(NoCapacity) as raised:
            second.start(wait_s=0.0)
    finally:
        first.end()
    assert raised.value.need == "6 workers need a CPU each"
    assert raised.value.found.startswith("2 of 8 CPUs free; one (")
    assert str(raised.value).startswith("6 workers need a CPU each, and has waited 0 s: 2 of 8 CPUs free; one (")
    assert str(raised.value).endswith("give it longer (wait=1h), end what runs (`shoal status`), or ask for less")


def test_the_entry_of_a_driver_that_has_ended_is_gone(cluster: EmbeddedCluster) -> None:
    with RunAdmission("mine") as admission:
        admission.wait([{"CPU": 1.0}], "a worker needs a CPU", 0.0, lambda kind, **details: None)
        Entries().put(QueuedRun("orphan", "ffffffff", "ann", 9, 0.0, {"CPU": 8.0}))
        assert [(each.run_id, each.state) for each in Entries().read()] == [("mine", AdmissionState.STARTING)]
    assert Entries().read() == []
