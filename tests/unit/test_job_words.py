"""What a job says, line by line, as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from shoal.cli.job_words import lines_of
from shoal.cluster.jobs import Job


class SaysInPieces:
    """Of a job, its words as they come from a cluster elsewhere: cut anywhere."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def follow(self, timeout_s: float) -> Iterator[str]:
        yield from self.pieces


def test_lines_are_whole_and_rays_own_are_left_out() -> None:
    pieces = ["2026 INFO job_manager.py:5", "81 -- Runtime env is set up.\nst", "ep 1\n\nstep", " 2\nand no new line"]
    job = cast(Any, SaysInPieces(*pieces))
    assert list(lines_of(cast(Job, job), 1.0)) == ["step 1", "", "step 2", "and no new line"]
