"""The processes of a run of replicas, as the process that starts them sees them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from shoal.train.launch.process_group import ProcessGroup
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
    group.replace_dead()
    assert {name: len(each) for name, each in started.items()} == {"server 0": 1, "worker 0": 2, "worker 1": 2}
    for name in ("worker 0", "worker 1"):
        assert group.is_running(has_outcome=False)
        started[name][1].end_cause = ""
    assert not group.is_running(has_outcome=False)
