"""The processes of a run of replicas: on which hosts they begin, and how the one that starts them sees them."""

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

from shoal.errors import RankLost, TrainError
from shoal.libs.asynchronous.messages import WorkerCount
from shoal.libs.asynchronous.process_group import (
    CHIEF_WAIT_S,
    MAX_DEATHS,
    SHORTAGE_TIMEOUT_S,
    Host,
    ProcessGroup,
    ReplicaPlacement,
)
from shoal.runs.record.event_log import NullLog

WORKERS = ("worker 0", "worker 1", "worker 2")


class FakeProcess:
    def __init__(self, *_: object) -> None:
        self.end_cause: str | None = None

    def poll(self) -> str | None:
        return self.end_cause

    def end(self) -> None:
        self.end_cause = ""


class Run:
    """A group of a server and three workers that are fakes, and what it has recorded."""

    def __init__(self, min_workers: int | None) -> None:
        self.started: dict[str, list[FakeProcess]] = {}
        self.events: list[tuple[str, dict[str, object]]] = []
        self.controller, journal = Mock(), NullLog()
        journal.record_event = lambda kind, /, **details: self.events.append((kind, details))  # type: ignore[method-assign]
        targets = dict.fromkeys(("server 0", *WORKERS), (print, ()))
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


def test_a_run_whose_workers_die_at_once_goes_on_with_others() -> None:
    run = Run(None)
    for name in WORKERS:
        run.started[name][0].end_cause = "SIGKILL"
    assert run.group.is_running(has_outcome=False)
    run.look(0.0)
    assert {name: len(each) for name, each in run.started.items()} == {"server 0": 1, **dict.fromkeys(WORKERS, 2)}
    for name in WORKERS:
        assert run.group.is_running(has_outcome=False)
        run.started[name][1].end_cause = ""
    assert not run.group.is_running(has_outcome=False)


def test_a_chief_without_a_place_gets_that_of_another_worker() -> None:
    """Where its host is lost and no other has room: without it nothing is saved, and the run does not end."""
    run = Run(None)

    def look(now_s: float, *present: int) -> list[str]:
        """What is started then, with these workers present."""
        before = {name: len(each) for name, each in run.started.items()}
        run.look(now_s, *present)
        return [name for name, each in run.started.items() if len(each) > before[name]]

    chief, other, last = (run.started[name][0] for name in WORKERS)
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
    assert other.end_cause is None


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


HERE, THERE, BEYOND = (Host(name, 2) for name in ("here", "there", "beyond"))


def place(placement: ReplicaPlacement, names: list[str], *hosts: Host) -> list[str]:
    return [placement.choose(name, hosts) for name in names]


def workers(number: int) -> list[str]:
    return [f"worker {index}" for index in range(number)]


def test_workers_are_spread_and_the_chief_is_at_home() -> None:
    assert place(ReplicaPlacement("here"), workers(2), THERE, HERE) == ["here", "there"]
    assert place(ReplicaPlacement("here"), workers(3), THERE, HERE, BEYOND) == ["here", "there", "beyond"]
    assert Counter(place(ReplicaPlacement("here"), workers(6), THERE, HERE, BEYOND)) == dict.fromkeys(
        ("here", "there", "beyond"), 2
    )


def test_a_large_host_has_more_workers_and_what_has_no_place_goes_anywhere() -> None:
    chosen = place(ReplicaPlacement("here"), workers(7), Host("here", 1), Host("large", 4))
    assert chosen == ["here", "large", "large", "large", "large", "", ""]


def test_the_first_server_is_at_home_and_others_are_spread() -> None:
    names = [f"server {index}" for index in range(3)]
    assert place(ReplicaPlacement("here"), names, THERE, HERE) == ["here", "there", "here"]


def test_a_home_without_a_place_has_neither_chief_nor_server() -> None:
    """As the head of many clusters, which has no CPUs."""
    chosen = place(ReplicaPlacement("here"), ["server 0", *workers(3)], Host("here", 0), THERE, BEYOND)
    assert chosen == ["there", "there", "beyond", "there"]


@pytest.mark.parametrize("lost", ["worker 1", "worker 2"])
def test_a_replacement_begins_where_there_is_room(lost: str) -> None:
    placement = ReplicaPlacement("here")
    place(placement, workers(3), HERE, THERE, BEYOND)
    left = [each for each in (HERE, THERE, BEYOND) if each.id != {"worker 1": "there", "worker 2": "beyond"}[lost]]
    other = "beyond" if lost == "worker 1" else "there"
    assert placement.choose(lost, left) == "here"
    assert placement.choose("worker 3", left) == other


def test_workers_that_share_memory_are_on_one_host_with_places_for_all() -> None:
    large = Host("large", 4)
    assert place(ReplicaPlacement("here", 2), workers(2), HERE, large) == ["here"] * 2
    placement = ReplicaPlacement("here", 4)
    assert place(placement, ["server 0", *workers(4)], HERE, large) == ["large"] * 5
    assert placement.choose("worker 1", [HERE, large, Host("larger", 8)]) == "large"
    assert place(placement, workers(4), HERE, Host("larger", 8)) == ["larger"] * 4
