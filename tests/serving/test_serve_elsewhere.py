"""`shoal serve deploy` and `delete` on a cluster of which nothing is seen but its jobs and what they say. No Ray."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from click.testing import CliRunner, Result

from shoal.cli import cli
from shoal.cli.commands import serve_deploy
from shoal.cli.support import jobs as job_output
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobInfo, JobStatus
from shoal.errors import ClusterError, ConfigError, RunError
from shoal.flows.serving_spec import READY

URL = "http://head.example:8265"


def say_ready(url: str = "http://127.0.0.1:8000", grpc: str | None = None) -> str:
    """What a serving job prints once its models answer."""
    lines = ["Runtime env is set up", f"serving tumours (now tumours@2) at {url}/v2/models/tumours"]
    return "\n".join([*lines, READY + json.dumps({"url": url, "grpc": grpc}), ""])


@dataclasses.dataclass
class FakeJob:
    """A job that is as it was told to be."""

    submission_id: str
    entrypoint: str = ""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    state: JobStatus = JobStatus.RUNNING
    said: str = ""

    def read_logs(self) -> str:
        return self.said

    def try_read_logs(self) -> str | None:
        return self.said

    def poll_outcome(self) -> JobStatus | None:
        return self.state if self.state.is_over else None

    def stop(self, timeout_s: float = 30.0) -> JobStatus:
        self.state = JobStatus.STOPPED
        return self.state

    stop_quietly = stop


class FakeCluster:
    """Takes what is submitted; `begin` is called with each job."""

    def __init__(self) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.begin: Callable[[FakeJob], None] = lambda job: None
        self.folders: list[Path] = []

    def submit(
        self,
        cluster: ClusterHandle,
        entrypoint: Sequence[str],
        *,
        env: dict[str, str],
        working_dir: Path,
        submission_id: str,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> FakeJob:
        job = self.job(cluster, submission_id)
        job.entrypoint, job.env, job.metadata = shlex.join(entrypoint), env, metadata
        self.folders.append(working_dir)
        self.begin(job)
        return job

    def job(self, cluster: ClusterHandle, submission_id: str) -> FakeJob:
        return self.jobs.setdefault(submission_id, FakeJob(submission_id))

    def infos(self, cluster: ClusterHandle) -> list[JobInfo]:
        return [
            JobInfo(job.submission_id, job.state, job.entrypoint, "", 0.0, job.metadata) for job in self.jobs.values()
        ]

    def ready(self, job: FakeJob) -> None:
        job.said = say_ready()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCluster:
    fake = FakeCluster()
    fake.begin = fake.ready
    monkeypatch.setattr(serve_deploy, "find_cluster", lambda address: ClusterHandle(URL, URL, "token", {}))
    for name, stand_in in {"submit": fake.submit, "JobHandle": fake.job, "list_jobs": fake.infos}.items():
        monkeypatch.setattr(serve_deploy, name, stand_in)
    monkeypatch.setattr(serve_deploy, "interrupt_on_termination", lambda: None)
    monkeypatch.setattr(job_output, "ignore_further_interrupts", lambda: None)
    monkeypatch.chdir(tmp_path)
    return fake


def shoal_program(*words: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *words, "--address", URL])


def test_deploy_asks_no_registry_of_this_machine_and_says_how_to_reach_the_endpoint(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    result = shoal_program("deploy", "tumours@champion", "--port", "8000", "endpoint.keys=[{name: a, key: hush-hush}]")
    assert result.exit_code == 0, result.exception
    (job,) = cluster.jobs.values()
    words = shlex.split(job.entrypoint)
    assert words[:3] == ["python", "-m", "shoal.flows.serving"]
    assert {"models=tumours@champion", "endpoint.port=8000", "endpoint.name=tumours"} <= set(words)
    assert "hush" not in job.entrypoint
    assert job.env["SHOAL_RUN_ID"] == job.submission_id
    assert "SHOAL_HOME" not in job.env  # it is the cluster's
    assert cluster.folders == [tmp_path]
    assert f"endpoint tumours is ready at http://127.0.0.1:8000, on the loopback of the head of {URL}" in result.output
    assert "ssh -N -L 8000:127.0.0.1:8000 HEAD &" in result.output


def test_one_that_is_reached_over_tls_needs_no_tunnel(cluster: FakeCluster) -> None:
    url = "https://models.example:8443"
    cluster.begin = lambda job: setattr(job, "said", say_ready(url))
    tls = ["endpoint.host=0.0.0.0", "endpoint.tls.certificate=/c.pem", "endpoint.tls.key=/k.pem"]
    said = shoal_program("deploy", "tumours", *tls).output
    assert f"is ready at {url}, on the head of" in said
    assert f"--endpoint {url} --ca FILE --key TOKEN" in said
    assert "ssh" not in said


def test_both_addresses_are_reached_through_the_tunnel(cluster: FakeCluster) -> None:
    cluster.begin = lambda job: setattr(job, "said", say_ready(grpc="127.0.0.1:8001"))
    assert "ssh -N -L 8000:127.0.0.1:8000 -L 8001:127.0.0.1:8001 HEAD &" in shoal_program("deploy", "tumours").output


def test_a_job_that_fails_says_why(cluster: FakeCluster) -> None:
    def fails(job: FakeJob) -> None:
        job.said = "Traceback ...\nerror: there is no model 'tumours'\n"
        job.state = JobStatus.FAILED

    cluster.begin = fails
    error = shoal_program("deploy", "tumours").exception
    assert isinstance(error, RunError)
    assert str(error).strip() == "there is no model 'tumours'"


def test_what_is_not_ready_in_time_is_ended(cluster: FakeCluster) -> None:
    cluster.begin = lambda job: None
    error = shoal_program("deploy", "tumours", "--timeout-s", "0.001").exception
    assert isinstance(error, ClusterError)
    assert "was not ready within 0.001 s" in str(error)
    assert [job.state for job in cluster.jobs.values()] == [JobStatus.STOPPED]


def test_ctrl_c_before_it_is_ready_leaves_no_job(cluster: FakeCluster) -> None:
    def interrupted(job: FakeJob) -> None:
        raise KeyboardInterrupt

    cluster.begin = interrupted
    result = shoal_program("deploy", "tumours")
    assert (result.exit_code, [job.state for job in cluster.jobs.values()]) == (130, [JobStatus.STOPPED])
    assert "stopped: nothing is served" in result.output


def test_a_second_endpoint_of_a_name_is_refused_before_anything_is_uploaded(cluster: FakeCluster) -> None:
    assert shoal_program("deploy", "tumours").exit_code == 0
    error = shoal_program("deploy", "fashion", "--name", "tumours").exception
    assert isinstance(error, ConfigError)
    assert "endpoint.name = 'tumours': is the name of an endpoint on this cluster" in str(error)
    assert len(cluster.jobs) == 1
    cluster.begin = lambda job: setattr(job, "said", say_ready("http://127.0.0.1:8000/fashion"))
    assert "endpoint fashion is ready at http://127.0.0.1:8000/fashion," in shoal_program("deploy", "fashion").output


def test_the_name_of_a_detached_endpoint_that_is_gone_may_be_taken_again(cluster: FakeCluster) -> None:
    detached = {"shoal.endpoint": "tumours", "shoal.lifetime": "detached"}
    cluster.jobs["before"] = FakeJob("before", metadata=detached, state=JobStatus.SUCCEEDED)  # Ray lists it still
    assert shoal_program("deploy", "tumours").exit_code == 0
    assert "endpoint tumours is gone" in shoal_program("delete").output
    assert [job.state for job in cluster.jobs.values()] == [JobStatus.SUCCEEDED, JobStatus.STOPPED]


def test_a_file_goes_with_the_folder_that_it_lies_in(cluster: FakeCluster, tmp_path: Path) -> None:
    inside, outside = tmp_path / "shop.yaml", tmp_path.parent / "shop-elsewhere.yaml"
    for file in (inside, outside):
        file.write_text("models: [tumours]\nendpoint: {name: shop}\n")
    assert shoal_program("deploy", str(inside)).exit_code == 0
    (job,) = cluster.jobs.values()
    assert {"file=shop.yaml", "endpoint.name=shop"} <= set(shlex.split(job.entrypoint))
    job.stop()
    assert shoal_program("deploy", "file=shop.yaml").exit_code == 0
    (_, job) = cluster.jobs.values()
    assert "file=shop.yaml" in shlex.split(job.entrypoint)
    job.stop()
    error = shoal_program("deploy", str(outside)).exception
    assert isinstance(error, ConfigError)
    assert "lies outside" in str(error)


@pytest.mark.parametrize("name", [[], ["tumours"]])
def test_delete_stops_the_job_of_the_endpoint(cluster: FakeCluster, name: list[str]) -> None:
    assert shoal_program("deploy", "tumours").exit_code == 0
    cluster.jobs["training"] = FakeJob("training", "python jobs/lenet.py")
    assert "endpoint tumours is gone" in shoal_program("delete", *name).output
    assert {job.state for job in cluster.jobs.values()} == {JobStatus.STOPPED, JobStatus.RUNNING}
    error = shoal_program("delete", *name).exception
    assert isinstance(error, RunError)
    assert "`shoal serve deploy` has none there" in str(error)


def test_jobs_of_others_are_passed_over_and_one_of_the_head_itself_is_found(cluster: FakeCluster) -> None:
    cluster.jobs["other"] = FakeJob("other", "python -m shoal.flows.serving models=tumours")  # of no `deploy`
    cluster.jobs["local"] = FakeJob("local", metadata={"shoal.endpoint": "fashion", "shoal.lifetime": "job"})
    assert "endpoint fashion is gone" in shoal_program("delete", "fashion").output
    assert cluster.jobs["local"].state is JobStatus.STOPPED
    assert cluster.jobs["other"].state is JobStatus.RUNNING


def test_a_word_of_the_models_own_hides_nothing(cluster: FakeCluster) -> None:
    cluster.begin = lambda job: setattr(
        job, "said", f"error: no such thing, says a library\nready: to go\n{say_ready()}"
    )
    assert shoal_program("deploy", "tumours").exit_code == 0


def test_a_model_is_taken_from_an_endpoint_and_not_from_a_cluster(cluster: FakeCluster) -> None:
    error = shoal_program("delete", "shop", "--model", "tabular").exception
    assert isinstance(error, ConfigError)
    assert "is a cluster's, and a model is taken from an endpoint" in str(error)


def test_delete_names_what_there_is(cluster: FakeCluster) -> None:
    assert shoal_program("deploy", "tumours").exit_code == 0
    error = shoal_program("delete", "fashion").exception
    assert isinstance(error, RunError)
    assert f"there is no endpoint fashion on {URL}: there is tumours" in str(error)


def test_nothing_to_serve_is_said_here(cluster: FakeCluster) -> None:
    error = shoal_program("deploy", "--name", "shop").exception
    assert isinstance(error, ConfigError)
    assert "there is nothing to serve" in str(error)
    assert not cluster.jobs
