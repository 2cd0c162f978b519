"""What is under version control works wherever it is cloned."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_no_link_leads_out_of_the_repository() -> None:
    """A link to a folder of one machine came along once, and stood in the way of `make bench` everywhere else."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: there is no record of what belongs to it")
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    links = [line.partition("\t")[2] for line in listed.splitlines() if line.startswith("120000")]
    broken = [link for link in links if not (ROOT / link).is_file() or not (ROOT / link).resolve().is_relative_to(ROOT)]
    assert broken == []
