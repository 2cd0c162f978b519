"""The processes of a run of replicas, as the process that starts them sees them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from shoal.libs.asynchronous.messages import WorkerCount
from shoal.libs.asynchronous.process_group import CHIEF_WAIT_S, ProcessGroup
from shoal.train.reporting.event_log import NullLog


class FakeProcess:
    def __init__(self, *_: object) -> None:
        self.end_cause: str | None = None

    def poll(self) -> str | None:
        return self.end_cause

    def end(self) -> None:
        self.end_cause = ""


def test_a_run_whose_workers_die_at_once_goes_on_with_others() -> None:
    started: dict[str, list[FakeProcess]] = {}

    def start(name: str, *arguments: Any) -> FakeProcess:
        started.setdefault(name, []).append(FakeProcess())
        return started[name][-1]

    targets = dict.fromkeys(("server 0", "worker 0", "worker 1"), (print, ()))
    group = ProcessGroup(targets, None, Mock(), NullLog(), start)
    group.start()
    for name in ("worker 0", "worker 1"):
        started[name][0].end_cause = "SIGKILL"
    assert group.is_running(has_outcome=False)
    group.replace_dead(0.0)
    assert {name: len(each) for name, each in started.items()} == {"server 0": 1, "worker 0": 2, "worker 1": 2}
    for name in ("worker 0", "worker 1"):
        assert group.is_running(has_outcome=False)
        started[name][1].end_cause = ""
    assert not group.is_running(has_outcome=False)


def test_a_chief_without_a_place_gets_that_of_another_worker() -> None:
    """Where its host is lost and no other has room: without it nothing is saved, and the run does not end."""
    started: list[tuple[str, FakeProcess]] = []

    def start(name: str, *arguments: Any) -> FakeProcess:
        started.append((name, FakeProcess()))
        return started[-1][1]

    def look(now_s: float, *present: int) -> list[str]:
        """What is started then, with these workers present."""
        number, controller.call.return_value = len(started), WorkerCount(list(present), False)
        group.replace_dead(now_s)
        group.yield_to_chief(now_s)
        return [name for name, _ in started[number:]]

    controller = Mock()
    group = ProcessGroup(
        dict.fromkeys(("worker 0", "worker 1", "worker 2"), (print, ())), None, controller, NullLog(), start
    )
    group.start()
    chief, _, last = [process for _, process in started]
    chief.end_cause = "its host is lost"
    assert look(0.0, 1, 2) == ["worker 0"]
    assert look(CHIEF_WAIT_S - 1, 1, 2) == []
    assert last.end_cause is None
    look(CHIEF_WAIT_S + 1, 1, 2)
    assert last.end_cause is not None
    last.end_cause = "it was ended"
    assert look(CHIEF_WAIT_S + 2, 1) == ["worker 2"]
    assert look(3 * CHIEF_WAIT_S, 0, 1) == [], "the chief has begun"
    assert look(9 * CHIEF_WAIT_S, 1) == []
    assert started[1][1].end_cause is None
