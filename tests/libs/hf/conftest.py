"""No report is drawn at the end of a run, which takes longer than the run; and no hub is asked."""

from __future__ import annotations

import huggingface_hub.constants
import pytest

import shoal.runs


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # it may have been imported before
