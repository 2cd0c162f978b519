"""What a person reads of a run while it goes on."""

from __future__ import annotations

import pytest

from shoal.runs.event_messages import format_warning
from shoal.runs.record.event_log import NullLog
from shoal.train.reporting import console
from shoal.train.reporting.console import ConsoleLog


def test_progress_now_and_then_and_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now_s)
    said: list[str] = []
    journal = ConsoleLog(NullLog(), said.append)
    for step in range(1, 6):
        now_s += 0.75
        journal.log(step, {"train/loss": 1 / step})
    assert said == ["step      3 | train/loss 0.3333"]
    journal.log(5, {"validation/accuracy": 0.9})
    assert said[1:] == ["step      5 | validation/accuracy 0.9"]


@pytest.mark.parametrize(
    ("kind", "details", "words"),
    [
        ("checkpoint_failed", {"step": 9, "error": "step 9 could not be saved"}, "training goes on: step 9 could"),
        (
            "restored",
            {"step": 5, "damaged": ["step 10: a.bin is gone"]},
            "from step 5; damaged, and passed over: step 10",
        ),
        ("restored", {"step": 5, "damaged": []}, ""),
        ("workers_lost", {"step": 1234, "error": "a worker died"}, "workers were lost after step 1,234"),
        (
            "workers_lost",
            {"step": -1, "error": "a worker died"},
            "before the first step (a worker died): starting them",
        ),
        ("hosts_missing", {"workers": 4, "fit": 2, "wait_s": 600.0}, "which hold 2: waiting up to 10 min for another"),
        ("room_taken", {"workers": 4, "fit": 2, "wait_s": 600.0}, "(2 places are free): waiting up to 10 min for it"),
        ("no_checkpoint", {}, "begins again"),
        ("stopped", {"step": 5}, ""),
    ],
)
def test_what_goes_wrong_is_said_and_nothing_else(kind: str, details: dict[str, object], words: str) -> None:
    said: list[str] = []
    ConsoleLog(NullLog(), said.append).record_event(kind, **details)
    assert said == ([format_warning(kind, details)] if words else [])
    assert words in "".join(said)
