"""How `shoal down` asks the jobs of a cluster to end, before it ends the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from shoal.cli.commands import cluster as verbs
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobInfo, JobStatus
from shoal.errors import ClusterError, RunError


class Saving:
    """Jobs of a cluster that is a stand-in: seconds that each takes to save what it has, once it is asked to stop."""

    def __init__(self, **take_s: float | None) -> None:
        self.take_s, self.now = take_s, 0.0
        self.saved_at: dict[str, float] = {}
        self.saved: list[str] = []

    def list(self, cluster: ClusterHandle) -> list[JobInfo]:
        return [JobInfo(name, JobStatus.RUNNING, "python job.py", "", 0.0) for name in self.take_s]

    def job(self, cluster: ClusterHandle, name: str) -> _Job:
        return _Job(self, name)

    def end(self, *_: object) -> None:
        self.saved = [name for name, at in self.saved_at.items() if at <= self.now]


class _Job:
    def __init__(self, jobs: Saving, name: str) -> None:
        self._jobs, self.submission_id = jobs, name

    def request_stop(self) -> None:
        took = self._jobs.take_s[self.submission_id]
        if took is None:
            raise RunError(f"http://h knows no jobs/{self.submission_id}")
        self._jobs.saved_at.setdefault(self.submission_id, self._jobs.now + took)

    def follow(self, timeout_s: float) -> Iterator[str]:
        yield "saving ..."
        saved_at = self._jobs.saved_at.get(self.submission_id)
        if saved_at is None:
            raise RunError(f"http://h knows no jobs/{self.submission_id}")
        given_up_at = self._jobs.now + timeout_s
        self._jobs.now = max(self._jobs.now, min(saved_at, given_up_at))
        if saved_at > given_up_at:
            raise ClusterError(f"job {self.submission_id} is still RUNNING after {timeout_s:g} s")

    def stop(self, timeout_s: float) -> None:
        self.request_stop()
        for _ in self.follow(timeout_s):
            pass


@pytest.mark.parametrize(
    ("jobs", "saved"),
    [
        (Saving(one=12.0, two=12.0, three=12.0), ["one", "two", "three"]),
        (Saving(stuck=1e9, other=5.0), ["other"]),
        (Saving(forgotten=None, other=5.0), ["other"]),
        (Saving(), []),
    ],
)
def test_every_job_has_the_whole_time_to_save_what_it_has(
    jobs: Saving, saved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    token = {"RAY_AUTH_TOKEN_PATH": "none"}
    handle = ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "", token, tmp_path / "one", "id", os.getpid(), 0.0)
    handle.save(tmp_path / "cluster.json")
    monkeypatch.setattr(ClusterHandle, "is_head_alive", lambda _: True)
    monkeypatch.setattr(verbs, "list_jobs", jobs.list)
    monkeypatch.setattr(verbs, "JobHandle", jobs.job)
    monkeypatch.setattr(verbs, "end_cluster", jobs.end)
    monkeypatch.setattr(verbs, "time", SimpleNamespace(monotonic=lambda: jobs.now))
    said = CliRunner().invoke(verbs.down, [], catch_exceptions=False).output
    assert said.endswith("The cluster is down.\n")
    assert jobs.take_s or said == "The cluster is down.\n"
    assert jobs.saved == saved
    assert jobs.now <= 31.0
