"""The pages of docs/reference are what the code says, and the notebooks what the tutorials say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("program", ["make_reference", "make_notebooks"])
def test_what_is_made_from_other_files_is_up_to_date(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(program, DOCS / f"{program}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [program, "--check"])
    assert module.main() == 0
