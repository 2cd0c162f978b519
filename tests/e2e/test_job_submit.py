"""The job through plain `ray job submit`, as the README shows it, on a cluster that is up."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shoal.runs
from shoal.cluster.jobs import JobHandle
from shoal.home import load_access_token
from shoal_program import ROOT, STATE_S, Program, ended

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

SUBMISSION = f"submitted-loop-{os.getpid()}"
pytestmark = pytest.mark.timeout(1800)


def test_ray_job_submit_runs_the_same_job(cluster: EmbeddedCluster, shared_home: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_API_SERVER_ADDRESS": cluster.dashboard_url,
        "PYTHONUNBUFFERED": "1",
    }
    submit = ["ray", "job", "submit", "--submission-id", SUBMISSION, "--"]
    words = ["python", str(ROOT / "jobs" / "actor_learner.py"), "target_return=40", "endpoint.name=submitted"]
    with ended(JobHandle(cluster, SUBMISSION)), ExitStack() as stack:
        submitted = stack.enter_context(Program([*submit, *words], environment, tmp_path))
        command = submitted.wait_for_line(r"python (-m shoal.actor --connect \S+ --env \S+)")[1]
        actor_environment = {**os.environ, "SHOAL_TOKEN": load_access_token()}
        actor = stack.enter_context(Program([sys.executable, *command.split()], actor_environment))
        assert submitted.wait(STATE_S) == 0
        assert actor.wait() == 0
    run = shoal.runs.load("latest")
    assert run.status is shoal.runs.Status.FINISHED
    assert run.models()["name"].tolist() == ["submitted"]
    assert (run.folder / "report.html").exists()
