"""`shoal up`, `down` and `status` around a cluster that is a stand-in: what is shown, and in which order things end."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli import cluster as verbs
from shoal.cluster.dashboard import Resources
from shoal.cluster.handle import ClusterHandle
from shoal.cluster.jobs import JobInfo, JobStatus


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_status_shows_no_secret_of_a_job(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ClusterHandle("127.0.0.1:6379", "http://127.0.0.1:8265", "token", {}, temp_dir=Path("/tmp/none"))
    command = "cd /tmp && exec python -m job 'endpoint.keys=[{name: ada, key: S3CRET}]' endpoint.port=80"
    monkeypatch.setattr(verbs, "find_cluster", lambda address: handle)
    monkeypatch.setattr(verbs, "resources", lambda cluster: Resources(1, 2.0, 0.0, 0, 0, 0.0))
    monkeypatch.setattr(verbs, "list_jobs", lambda cluster: [JobInfo("one", JobStatus.RUNNING, command, "", 0.0)])
    shown = CliRunner().invoke(verbs.status, words, catch_exceptions=False).output
    assert "S3CRET" not in shown
    assert "endpoint.keys=***" in shown
    assert "endpoint.port=80" in shown
