"""What a job says, line by line, as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.cli.job_words import failure, lines_of
from shoal.cluster.jobs import Job, JobStatus


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


@pytest.mark.parametrize(
    ("log", "outcome", "said"),
    [
        ("step 1\n", JobStatus.FAILED, "the job failed; its last words:\nstep 1"),
        ("step 1\nstopped\n", JobStatus.STOPPED, "the job was stopped by another; its last words:\nstep 1\nstopped"),
        ("step 1\nerror: no room\n", JobStatus.FAILED, "no room"),
    ],
)
def test_a_job_that_another_has_stopped_did_not_fail(log: str, outcome: JobStatus, said: str) -> None:
    assert failure(cast(Job, SimpleNamespace(logs=lambda: log)), "the job", outcome) == said
