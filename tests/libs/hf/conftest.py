"""No report is drawn at the end of a run: it takes longer than the run."""

from __future__ import annotations

import pytest

import shoal.runs


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
