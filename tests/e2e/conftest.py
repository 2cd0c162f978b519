"""What tests of programs share: a home that nothing else uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a folder for temporary files of this test alone, and no word of the cluster that other tests share."""
    for name in [name for name in os.environ if name.startswith(("RAY_", "SHOAL_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
