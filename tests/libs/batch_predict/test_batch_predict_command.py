"""`shoal batch-predict`: the job that it submits, and what it prints of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.cli import cli
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobStatus
from shoal.errors import ConfigError
from shoal.libs.batch_predict import command

URL = "http://head.example:8265"


class FakeJob:
    """A job with a line more at each poll, which ends well at the third."""

    submission_id, num_polls = "one", 0

    def poll_outcome(self) -> JobStatus | None:
        self.num_polls += 1
        return JobStatus.SUCCEEDED if self.num_polls == 3 else None

    def read_logs_from(self, start: int, *, is_complete: bool) -> tuple[str, int]:
        written = "".join(f"line {number}\n" for number in range(self.num_polls))
        return written[start:], len(written)

    def stop_quietly(self) -> None:
        """It is over."""


def test_the_job_is_for_files_and_models_of_the_cluster_and_its_lines_are_printed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, submitted = FakeJob(), SimpleNamespace(words=[], options={})

    def submit(cluster: ClusterHandle, words: Sequence[str], **options: Any) -> None:
        submitted.words, submitted.options = [*words], options

    monkeypatch.chdir(tmp_path)
    for name, stand_in in {
        "find_cluster": lambda address: ClusterHandle(URL, URL, "token", {}),
        "submit": submit,
        "JobHandle": lambda cluster, submission_id: job,
        "interrupt_on_termination": lambda: None,
        "POLL_S": 0.0,
    }.items():
        monkeypatch.setattr(command, name, stand_in)
    typed = ["batch-predict", "tumours", "/data/in", "/data/out", "--address", URL]
    result = CliRunner().invoke(cli, typed, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.splitlines() == ["line 0", "line 1", "line 2"]
    assert submitted.words[:3] == ["python", "-m", "shoal.libs.batch_predict.flow"]
    assert {"model=tumours", "input=/data/in", "output=/data/out"} <= {*submitted.words}
    assert submitted.options["working_dir"] == tmp_path
    assert "SHOAL_HOME" not in submitted.options["env"]


def test_a_path_that_is_no_text_is_refused_by_its_name() -> None:
    result = CliRunner().invoke(cli, ["batch-predict", "m", "rows\udcff.csv", "out"])
    assert isinstance(result.exception, ConfigError)
    assert r"rows\udcff.csv': is no text" in str(result.exception)
