"""The console as a job of a cluster: reached while it runs, and gone when it is stopped."""

from __future__ import annotations

import sys
import urllib.request
from typing import TYPE_CHECKING

from leftovers import pids_of
from shoal.cluster import jobs
from shoal.cluster.job_main import find_dashboard_url
from shoal.runs import load
from shoal_program import STATE_S
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster


def test_a_console_that_is_a_job_shows_its_cluster_and_ends_with_it(cluster: EmbeddedCluster) -> None:
    job = jobs.submit(
        cluster, [sys.executable, "-m", "shoal.recipes", "console", "port=0"], env={"SHOAL_RUN_ID": "seen"}
    )
    wait_for(lambda: "From another machine: ssh" in job.read_logs(), STATE_S, "its address in its log")
    record = load("seen")
    (point,) = record.endpoints()
    assert (point.kind, point.state) == ("console", "ready")
    assert point.address in job.read_logs()
    with urllib.request.urlopen(f"{point.address}api/cluster") as answer:
        assert f'"dashboard_url":"{cluster.dashboard_url}"' in answer.read().decode()
    assert find_dashboard_url() == cluster.dashboard_url
    assert job.stop() is jobs.JobStatus.STOPPED
    record = load("seen")
    assert (record.status.value, record.endpoints()[0].state) == ("stopped", "closed")
    assert pids_of(cluster, "shoal.recipes") == []
