"""The processes of a run of replicas, as the process that starts them sees them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from shoal.errors import RankLost, TrainError
from shoal.libs.asynchronous.messages import WorkerCount
from shoal.libs.asynchronous.process_group import CHIEF_WAIT_S, MAX_DEATHS, SHORTAGE_TIMEOUT_S, ProcessGroup
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


class Run:
    """A group of a server and three workers that are fakes, and what it has recorded."""

    def __init__(self, min_workers: int | None) -> None:
        self.started: dict[str, list[FakeProcess]] = {}
        self.events: list[tuple[str, dict[str, object]]] = []
        self.controller, journal = Mock(), NullLog()
        journal.record_event = lambda kind, /, **details: self.events.append((kind, details))  # type: ignore[method-assign]
        targets = dict.fromkeys(("server 0", "worker 0", "worker 1", "worker 2"), (print, ()))
        self.group = ProcessGroup(targets, min_workers, self.controller, journal, self._start)
        self.group.start()

    def _start(self, name: str, *arguments: Any) -> FakeProcess:
        self.started.setdefault(name, []).append(FakeProcess())
        return self.started[name][-1]

    def look(self, now_s: float, *present: int, is_short: bool = False) -> None:
        self.controller.call.return_value = WorkerCount(list(present), is_short)
        self.group.maintain(now_s)

    def kill(self, name: str, times: int) -> None:
        for _ in range(times):
            self.started[name][-1].end_cause = "SIGKILL"
            self.look(0.0, 0, 1)


@pytest.mark.parametrize(
    ("name", "min_workers"), [("worker 2", 2), ("worker 2", None), ("worker 2", 3), ("worker 0", 1), ("server 0", 1)]
)
def test_only_a_worker_that_is_not_needed_may_die_again_and_again(name: str, min_workers: int | None) -> None:
    run = Run(min_workers)
    run.look(0.0, 0, 1)
    run.kill(name, MAX_DEATHS - 1)
    if (name, min_workers) == ("worker 2", 2):
        run.kill(name, 1)
        run.look(1.0, 0, 1)
        assert run.events[-1] == ("worker_gone", {"index": 2, "deaths": MAX_DEATHS, "cause": "SIGKILL"})
        assert run.group.is_running(has_outcome=False)
    else:
        with pytest.raises(RankLost, match=rf"{name} died {MAX_DEATHS} times: SIGKILL"):
            run.kill(name, 1)
    assert len(run.started[name]) == MAX_DEATHS


def test_workers_join_when_they_have_a_place_and_below_the_minimum_the_run_says_so_once() -> None:
    run = Run(2)
    run.look(0.0, is_short=True)
    run.look(1.0, 0, 1)
    run.look(2.0, 0, 1, 2)
    assert run.events == [("worker_joined", {"index": each, "workers": max(2, each + 1)}) for each in range(3)]
    run.events.clear()
    for now_s in (3.0, 4.0):
        run.look(now_s, 1, is_short=True)
    assert run.events == [("workers_missing", {"workers": 1, "min_workers": 2})]
    with pytest.raises(TrainError, match="1 workers take part, and the run needs 2"):
        run.look(4.0 + SHORTAGE_TIMEOUT_S, 1, is_short=True)
