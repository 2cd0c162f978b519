"""What the tests of checkpoints are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.checkpoint import Checkpointer
from training.checkpoint_states import Copying, Gate


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
