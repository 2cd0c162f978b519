"""A cluster of which only the counts matter: its entries of runs, autoscaler and placement groups are fakes."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from shoal.cluster.growth import Growth
from shoal.cluster.run_queue import QueuedRun


class FakeEntries:
    """Entries in this process.

    seen: every one that was written
    """

    present: ClassVar[dict[str, QueuedRun]] = {}
    seen: ClassVar[list[QueuedRun]] = []

    def put(self, run: QueuedRun) -> None:
        self.present[run.run_id] = run
        self.seen.append(run)

    def remove(self, run_id: str) -> None:
        self.present.pop(run_id, None)

    def read(self) -> list[QueuedRun]:
        return list(self.present.values())


class FakeRequest:
    """A request that is granted as `answers` say, or once there are as many CPUs free.

    asked: the bundles of every request that was made
    """

    answers: ClassVar[list[bool]] = []
    asked: ClassVar[list[Any]] = []

    def __init__(self, bundles: Sequence[Any]) -> None:
        self._bundles, self._is_made = bundles, False

    def is_granted(self, timeout_s: float) -> bool:
        import ray

        if not self._is_made:
            self._is_made = True
            self.asked.append(self._bundles)
        if self.answers:
            return self.answers.pop(0)
        return sum(each.get("CPU", 0.0) for each in self._bundles) <= ray.available_resources().get("CPU", 0.0)

    def close(self) -> None:
        self._is_made = False


def replace_cluster(monkeypatch: pytest.MonkeyPatch, growth: Growth = Growth({})) -> None:  # noqa: B008 - immutable
    """Put the fakes in the place of what a connected cluster has."""
    from shoal.cluster import admission

    for name in ("answers", "asked"):
        monkeypatch.setattr(FakeRequest, name, [])
    monkeypatch.setattr(FakeEntries, "present", {})
    monkeypatch.setattr(FakeEntries, "seen", [])
    monkeypatch.setattr(admission, "Entries", FakeEntries)
    monkeypatch.setattr(admission, "PlacementRequest", FakeRequest)
    monkeypatch.setattr(admission, "get_driver_id", lambda: "01000000")
    monkeypatch.setattr(admission, "describe_launches", lambda: "")
    for module in ("cluster.admission", "train.launch.ray_capacity", "libs.sweep.ray_sweep"):
        monkeypatch.setattr(f"shoal.{module}.find_growth", lambda: growth)
