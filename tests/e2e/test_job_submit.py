"""The job through plain `ray job submit`, as the README shows it, on a cluster that is up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import shoal.runs
from shoal.home import access_token

if TYPE_CHECKING:
    from shoal.cluster.embedded import EmbeddedCluster

ROOT = Path(__file__).parents[2]


def test_ray_job_submit_runs_the_same_job(cluster: EmbeddedCluster, shared_home: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_API_SERVER_ADDRESS": cluster.dashboard_url,
        "PYTHONUNBUFFERED": "1",
    }
    words = ["python", str(ROOT / "jobs" / "actor_learner.py"), "target_return=40", "endpoint.name=submitted"]
    submitted = subprocess.Popen(
        ["ray", "job", "submit", "--", *words],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    actor: subprocess.Popen[bytes] | None = None
    output = ""
    try:
        assert submitted.stdout is not None
        for line in submitted.stdout:
            output += line
            found = re.search(r"python (-m shoal.actor --connect \S+ --env \S+)", line)
            if found and actor is None:
                command = [sys.executable, *found[1].split()]
                actor = subprocess.Popen(command, env={**os.environ, "SHOAL_TOKEN": access_token()})
        assert submitted.wait(90) == 0, output
        assert actor is not None, output
        assert actor.wait(60) == 0
        submitted.stdout.close()
    finally:
        for process in (submitted, actor):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    run = shoal.runs.load("latest")
    assert run.status is shoal.runs.Status.FINISHED
    assert run.models()["name"].tolist() == ["submitted"]
    assert (run.folder / "report.html").exists()
