"""What the tests of training share: no report at the end of a run, and what those of checkpoints are given."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.runs
from shoal.checkpoint import Checkpointer
from training.checkpoint_states import Copying, Gate


@pytest.fixture(autouse=True)
def _without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes five times as long as the runs of these tests; tests/unit/runs and tests/e2e have it."""
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "checkpoints", keep=2) as opened:
        yield opened


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Copying:
    return Copying(monkeypatch)
