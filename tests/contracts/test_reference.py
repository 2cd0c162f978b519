"""The pages of docs/reference are what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "docs" / "make_reference.py"


def test_the_pages_are_up_to_date() -> None:
    checked = subprocess.run([sys.executable, PROGRAM, "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
