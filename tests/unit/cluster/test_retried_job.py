"""A job that is tried again under the same run id goes on with its run, as Kubernetes tries a failed one again."""

import os
from pathlib import Path

import pytest

import shoal.runs
from shoal.cluster.job_main import RETRIED, RUN_ID, job_main
from shoal.config import Spec

RUN = "20261201-120000-aaaa"


class JobSpec(Spec):
    """Of a job that can be resumed."""

    steps: int = 3
    resume: str = ""


class OtherSpec(Spec):
    """Of a job that cannot."""

    steps: int = 3


def try_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, kind: type[Spec] = JobSpec) -> Spec:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setenv(RUN_ID, RUN)
    monkeypatch.setattr("sys.argv", ["job.py", *words])
    chosen: list[Spec] = []
    job_main(kind(), lambda spec, job: chosen.append(spec), "job", needs_cluster=False)
    return chosen[0]


def test_a_job_that_is_tried_again_resumes_the_run_that_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RETRIED, "1")
    assert try_once(tmp_path, monkeypatch, "steps=5") == JobSpec(steps=5)
    with shoal.runs.create("job", JobSpec(steps=5).to_record(), RUN):
        pass
    assert try_once(tmp_path, monkeypatch) == JobSpec(steps=5, resume=RUN)
    assert try_once(tmp_path, monkeypatch, "steps=4") == JobSpec(steps=4, resume=RUN)
    assert try_once(tmp_path, monkeypatch, kind=OtherSpec) == OtherSpec()
    assert RUN_ID not in os.environ  # it is another run
    monkeypatch.delenv(RETRIED)
    assert try_once(tmp_path, monkeypatch) == JobSpec()
