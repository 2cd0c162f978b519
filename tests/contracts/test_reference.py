"""The pages of docs/reference are what the code says, and the notebooks what the tutorials say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("program", ["make_reference.py", "make_notebooks.py"])
def test_what_is_made_from_other_files_is_up_to_date(program: str) -> None:
    checked = subprocess.run([sys.executable, DOCS / program, "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
