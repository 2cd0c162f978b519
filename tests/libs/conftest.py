"""No report is drawn at the end of a run, which takes longer than the run, but where a test asks for `drawn_report`."""

import pytest

import shoal.runs


@pytest.fixture
def drawn_report() -> None:
    """Draw the report, as every run does."""


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn_report" not in request.fixturenames:
        monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
