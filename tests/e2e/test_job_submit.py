"""The job through plain `ray job submit`, as the README shows it, on a cluster that is up."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shoal.runs
from shoal.cluster.jobs import JobHandle
from shoal.home import load_access_token
from shoal.registry import Registry
from shoal_program import ROOT, STATE_S, Program, ended

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

pytestmark = pytest.mark.timeout(1800)


def submit_and_play(cluster: EmbeddedCluster, folder: Path, job: str, *overrides: str) -> shoal.runs.Run:
    """Submit a job of the loop, start the actor that it names, and wait for the end; returns the run."""
    submission = f"submitted-{job}-{os.getpid()}"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_API_SERVER_ADDRESS": cluster.dashboard_url,
        "PYTHONUNBUFFERED": "1",
    }
    words = ["ray", "job", "submit", "--submission-id", submission, "--", "python", str(ROOT / "jobs" / f"{job}.py")]
    with ended(JobHandle(cluster, submission)), ExitStack() as stack:
        submitted = stack.enter_context(Program([*words, *overrides], environment, folder))
        command = submitted.wait_for_line(r"python (-m shoal.actor --connect \S+ --env \S+)")[1]
        actor_environment = {**os.environ, "SHOAL_TOKEN": load_access_token()}
        actor = stack.enter_context(Program([sys.executable, *command.split()], actor_environment))
        assert submitted.wait(STATE_S) == 0
        assert actor.wait() == 0
    run = shoal.runs.load("latest")
    assert run.status is shoal.runs.Status.FINISHED
    assert (run.folder / "report.html").exists()
    return run


@pytest.mark.usefixtures("shared_home")
def test_ray_job_submit_runs_the_same_job(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    run = submit_and_play(
        cluster, tmp_path, "actor_learner", "target_return=40", "eval_episodes=3", "endpoint.name=submitted"
    )
    assert run.models()["name"].tolist() == ["submitted"]
    assert Registry().get("submitted@champion").manifest.run_id == run.id
    assert "the first" in run.last_events()["registered"]["decision"]
    assert shoal.load("submitted@champion").act(np.zeros(4)) in (0, 1)
    assert "start each actor with" in (run.folder / "logs" / "driver.log").read_text()
    assert {endpoint.state for endpoint in run.endpoints()} == {"closed"}
    assert [each["balanced"] for _, each in run.list_events("accounting")] == [True]
    versions = run.versions()
    assert versions["version"].tolist() == list(range(1, len(versions) + 1))
    tried = versions.iloc[run.last_events()["tried"]["version"] - 1]
    newest = versions.iloc[-1]
    assert newest["sha256"] == tried["sha256"], "what has passed is published again"
    assert newest["step"] > tried["step"], "the learner has gone on during the trial"
    assert {"return/trial", "return/best_actions"} <= run.latest().keys()


@pytest.mark.soak
@pytest.mark.usefixtures("shared_home")
def test_several_policies_learn_in_one_run(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    words = ["max_wall_s=4", "endpoint.name=yard", "policies.prey.algorithm=dqn", "eval_episodes=3"]
    run = submit_and_play(cluster, tmp_path, "tag", *words)
    assert run.models()["name"].tolist() == ["yard-hunters", "yard-prey"]
    assert all((run.folder / name / "checkpoints").is_dir() for name in ("hunters", "prey"))
    assert {name: len(each) for name, each in run.last_events()["policies_evaluated"]["returns"].items()} == {
        "hunters": 3,
        "prey": 3,
    }
    settled = [details for _, details in run.list_events("accounting")]
    assert {each["policy"] for each in settled} == {"hunters", "prey"}
    assert all(each["balanced"] and each["consumed"] > 0 for each in settled)
    assert {"return/hunters", "return/prey"} <= run.latest().keys()
