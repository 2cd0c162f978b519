"""`shoal serve deploy` and `delete` around their job: what is submitted, waited for, stopped and said. No Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

import shoal.runs
from shoal.cli import cli
from shoal.cli.commands import serve_deploy
from shoal.cli.support import jobs as job_output
from shoal.client import Client
from shoal.client.discovery import CARD_SUFFIX, EndpointCard, FoundEndpoint, list_endpoints
from shoal.client.endpoint_status import EndpointStatus
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobInfo, JobStatus
from shoal.errors import ClusterError, ConfigError, ConnectionLost, RunError
from shoal.flows.serving_spec import ServingSpec, require_importable, spec_from_overrides
from shoal.home import home
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.runs.record.provenance import find_owner, restore_secrets, split_secrets
from shoal.weights import WeightSnapshot

CLUSTER = ClusterHandle("127.0.0.1:6379", "http://127.0.0.1:8265", "token", {}, temp_dir=Path("/tmp/none"))


class FakeJob:
    """A job that is as it was told to be."""

    def __init__(self, submission_id: str) -> None:
        self.submission_id = submission_id
        self.state = JobStatus.RUNNING
        self.said = ""
        self.on_look: Callable[[], None] = lambda: None
        self.stopped = 0
        self.is_known = True

    def status(self) -> JobStatus:
        self.on_look()
        return self.state

    def poll_outcome(self) -> JobStatus | None:
        """Of a real job, this is patient: what it raises, it raises when nobody has answered for long."""
        status = self.status()
        return status if status.is_over else None

    def read_logs(self) -> str:
        return self.said

    def wait(self, timeout_s: float) -> JobStatus:
        self.state = JobStatus.SUCCEEDED
        return self.state

    def stop_quietly(self, timeout_s: float = 30.0) -> None:
        if self.is_known:
            self.stop(timeout_s)

    def stop(self, timeout_s: float = 30.0) -> JobStatus:
        if not self.is_known:
            raise RunError(f"no job {self.submission_id}")
        self.stopped += 1
        self.state = JobStatus.STOPPED
        return self.state


@dataclasses.dataclass
class FakeCluster:
    """Takes what is submitted; `begin` is called with each job."""

    jobs: dict[str, FakeJob] = dataclasses.field(default_factory=dict)
    entrypoints: list[Sequence[str]] = dataclasses.field(default_factory=list)
    environments: list[dict[str, str]] = dataclasses.field(default_factory=list)
    begin: Callable[[FakeJob], None] = lambda job: None

    def submit(
        self, cluster: ClusterHandle, entrypoint: Sequence[str], *, env: dict[str, str], submission_id: str, **_: object
    ) -> FakeJob:
        job = self.jobs[submission_id] = FakeJob(submission_id)
        self.entrypoints.append(entrypoint)
        self.environments.append(env)
        self.begin(job)
        return job

    def job(self, cluster: ClusterHandle, submission_id: str) -> FakeJob:
        if submission_id in self.jobs:
            return self.jobs[submission_id]
        unknown = FakeJob(submission_id)
        unknown.is_known = False
        return unknown

    def infos(self, cluster: ClusterHandle) -> list[JobInfo]:
        return [JobInfo(job.submission_id, job.state, "", "", 0.0) for job in self.jobs.values()]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(serve_deploy, "find_cluster", lambda address: CLUSTER)
    monkeypatch.setattr(serve_deploy, "submit", fake.submit)
    monkeypatch.setattr(serve_deploy, "JobHandle", fake.job)
    monkeypatch.setattr(serve_deploy, "list_jobs", fake.infos)
    monkeypatch.setattr(serve_deploy, "interrupt_on_termination", lambda: None)
    monkeypatch.setattr(job_output, "ignore_further_interrupts", lambda: None)
    tensors = {"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)}
    tensor = [TensorSignature(name="x", datatype="FP32", shape=[-1, 1])]
    for name in ("fashion", "tabular"):
        Registry().register(
            name,
            WeightSnapshot.of(1, tensors),
            model=ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 1, "out_features": 1}),
            signature=Signature(inputs=tensor, outputs=tensor),
        )
    return fake


@pytest.fixture
def recorders() -> Iterator[list[Any]]:
    opened: list[Any] = []
    yield opened
    for recorder in opened:
        recorder.close()


def shoal_program(*words: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *words])


def becomes_ready(recorders: list[Any], name: str = "fashion") -> Callable[[FakeJob], None]:
    def begin(job: FakeJob) -> None:
        recorder = shoal.runs.create("serve", "", job.submission_id)
        recorders.append(recorder)
        recorder.record_endpoint(name, "inference", "http://127.0.0.1:8000", "starting")
        recorder.record_endpoint(f"{name}/grpc", "grpc", "127.0.0.1:9000", "ready")
        job.on_look = lambda: recorder.record_endpoint(name, "inference", "http://127.0.0.1:8000", "ready")

    return begin


def test_deploy_shows_what_it_waits_for_and_that_time_does_not_count(
    cluster: FakeCluster, recorders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(job: FakeJob) -> None:
        becomes_ready(recorders)(job)
        recorders[0].record_event("waiting", reason="1 more replica wanted, waiting for nodes", wait_s=600.0)
        ready, looks = job.on_look, iter(range(3))
        job.on_look = lambda: None if next(looks, None) is not None else ready()

    cluster.begin = begin
    result = shoal_program("deploy", "fashion", "--timeout-s", "0.001")
    assert result.exit_code == 0, result.exception
    assert result.output.startswith(
        "1 more replica wanted, waiting for nodes (up to 10 min)\nendpoint fashion is ready"
    )


def test_deploy_submits_what_was_typed_and_returns_when_it_is_ready(
    cluster: FakeCluster, recorders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.begin = becomes_ready(recorders)
    monkeypatch.setattr(sys, "argv", ["shoal", "serve", "deploy", "fashion", "endpoint.keys=[{key: hush}]"])
    keys = "endpoint.keys=[{name: a, key: hush-hush-hush-hush}]"
    words = ["fashion@champion", "tabular@1", "--replicas", "2", "endpoint.models.fashion.deadline_s=0.1", keys]
    result = shoal_program("deploy", *words)
    assert result.exit_code == 0, result.exception
    assert "endpoint fashion is ready at http://127.0.0.1:8000, gRPC at 127.0.0.1:9000\n" in result.output
    assert "\n  shoal predict fashion --input 0\n" in result.output
    (entrypoint,), ((run_id, job),) = cluster.entrypoints, cluster.jobs.items()
    assert entrypoint[1:3] == ["-m", "shoal.flows.serving"]
    assert "hush" not in " ".join(entrypoint)  # which `shoal status` and the dashboard show
    monkeypatch.setenv("SHOAL_SECRET_WORDS", cluster.environments[0]["SHOAL_SECRET_WORDS"])
    fields = restore_secrets(entrypoint[3:])
    spec = spec_from_overrides(fields).override(fields)
    assert [key.key.get_secret_value() for key in spec.endpoint.keys] == ["hush-hush-hush-hush"]
    assert spec.models == ["fashion@champion", "tabular@1"]
    assert (spec.endpoint.num_replicas, spec.endpoint.options("fashion").deadline_s) == (2, 0.1)
    assert cluster.environments[0]["SHOAL_RUN_ID"] == run_id
    assert "hush" not in cluster.environments[0]["SHOAL_COMMAND"]
    assert job.stopped == 0


def test_a_deployment_that_is_given_up_leaves_no_job_behind(cluster: FakeCluster) -> None:
    def silent() -> None:
        raise ConnectionLost("no answer from http://127.0.0.1:8265: ReadTimeout")

    def begin(job: FakeJob) -> None:
        job.on_look = silent

    cluster.begin = begin
    result = shoal_program("deploy", "fashion")
    assert isinstance(result.exception, ConnectionLost)
    assert [job.stopped for job in cluster.jobs.values()] == [1]


def test_the_job_reads_the_words_that_its_command_line_does_not_show(cluster: FakeCluster) -> None:
    shown, variables = split_secrets(["models=fashion", "endpoint.keys=[{name: ada, key: a blank is refused}]"])
    checked = subprocess.run(
        [sys.executable, "-m", serve_deploy.MODULE, *shown, "--check"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 1
    assert "it is printable ASCII without blanks" in checked.stderr


def test_a_file_goes_along_by_its_place(cluster: FakeCluster, recorders: list[Any], tmp_path: Path) -> None:
    cluster.begin = becomes_ready(recorders, "shop")
    (tmp_path / "shop.yaml").write_text("models: [fashion]\nendpoint: {name: shop, max_body_bytes: 5}\n")
    assert shoal_program("deploy", str(tmp_path / "shop.yaml"), "endpoint.port=80").exit_code == 0
    words = cluster.entrypoints[0][3:]
    spec = spec_from_overrides(words).override(words)
    assert (spec.endpoint.name, spec.endpoint.max_body_bytes, spec.endpoint.port) == ("shop", 5, 80)
    assert spec.file == str(tmp_path / "shop.yaml")


FOR_SERVE = """
http_options: {host: 127.0.0.1, port: 8123}
applications: [{name: shop, args: {models: [fashion], endpoint: {name: shop}}}]
"""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("applications:", "applications = None: is not a list of one application"),
        ("applications: {shop: {}}", "is not a list of one application"),
        ("applications: [{}, {}]", "is not a list of one application"),
        ("applications: [shop]", "is not a list of one application"),
        ("applications: [{name: shop}]", "there is nothing to serve"),
        ("applications: [{name: shop, args: }]", "there is nothing to serve"),
        ("applications: [{args: [fashion]}]", "args = ['fashion']: is not a mapping"),
    ],
)
def test_a_file_that_is_not_as_serve_has_them_is_told_in_a_line(
    cluster: FakeCluster, tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "shop.yaml").write_text(content)
    error = shoal_program("deploy", str(tmp_path / "shop.yaml")).exception
    assert isinstance(error, ConfigError), error
    assert words in str(error)


@pytest.mark.parametrize("word", ["--port", "endpoint.port=8123", ""])
def test_the_port_that_a_file_gives_to_ray_is_told_where_it_is_not_taken(
    cluster: FakeCluster, recorders: list[Any], tmp_path: Path, word: str
) -> None:
    cluster.begin = becomes_ready(recorders, "shop")
    (tmp_path / "shop.yaml").write_text(FOR_SERVE)
    words = [word, "8123"] if word == "--port" else [word] if word else []
    result = shoal_program("deploy", str(tmp_path / "shop.yaml"), *words)
    assert result.exit_code == 0, result.exception
    assert ("are for Ray's own `serve deploy`; --port 8123 is the same here" in result.output) == (not words)


def test_names_and_places_are_taken_as_they_were_typed(
    cluster: FakeCluster, recorders: list[Any], tmp_path: Path
) -> None:
    cluster.begin = becomes_ready(recorders, "007")
    file = tmp_path / "a: b #1.yaml"
    file.write_text("models: [fashion]\n")
    assert shoal_program("deploy", str(file), "--name", "007").exit_code == 0
    words = cluster.entrypoints[0][3:]
    spec = spec_from_overrides(words).override(words)
    assert (spec.endpoint.name, spec.models, spec.file) == ("007", ["fashion"], str(file))


def test_a_job_that_fails_says_why(cluster: FakeCluster) -> None:
    def begin(job: FakeJob) -> None:
        job.state, job.said = JobStatus.FAILED, "something\nerror: fashion cannot be served: weights are damaged\n"

    cluster.begin = begin
    error = shoal_program("deploy", "fashion").exception
    assert isinstance(error, RunError)
    assert str(error) == "fashion cannot be served: weights are damaged"


def test_one_that_takes_too_long_is_stopped(cluster: FakeCluster) -> None:
    error = shoal_program("deploy", "fashion", "--timeout-s", "0.01").exception
    assert isinstance(error, ClusterError)
    assert "was not ready within 0.01 s" in str(error)
    assert [job.stopped for job in cluster.jobs.values()] == [1]


def test_ctrl_c_stops_the_job(cluster: FakeCluster) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def begin(job: FakeJob) -> None:
        job.on_look = interrupted

    cluster.begin = begin
    result = shoal_program("deploy", "fashion")
    assert result.exit_code == 130
    assert "stopped: nothing is served" in result.output
    assert [job.stopped for job in cluster.jobs.values()] == [1]


def test_ctrl_c_while_it_is_submitted_stops_the_job_that_may_have_begun(cluster: FakeCluster) -> None:
    def begin(job: FakeJob) -> None:
        raise KeyboardInterrupt

    cluster.begin = begin
    result = shoal_program("deploy", "fashion")
    assert result.exit_code == 130
    assert "stopped: nothing is served" in result.output
    assert [job.stopped for job in cluster.jobs.values()] == [1]


def test_a_second_endpoint_of_a_name_is_refused_before_a_job_is_started(
    cluster: FakeCluster, recorders: list[Any]
) -> None:
    cluster.begin = becomes_ready(recorders)
    assert shoal_program("deploy", "fashion").exit_code == 0
    error = shoal_program("deploy", "tabular", "--name", "fashion").exception
    assert isinstance(error, ConfigError)
    assert "endpoint.name = 'fashion': is the name of an endpoint on this cluster" in str(error)
    assert len(cluster.jobs) == 1
    cluster.begin = becomes_ready(recorders, "tabular")
    assert shoal_program("deploy", "tabular").exit_code == 0
    assert len(cluster.jobs) == 2


def test_delete_stops_the_job_of_the_endpoint(cluster: FakeCluster, recorders: list[Any]) -> None:
    cluster.begin = becomes_ready(recorders)
    assert shoal_program("deploy", "fashion").exit_code == 0
    result = shoal_program("delete", "fashion")
    assert "endpoint fashion is gone" in result.output
    assert [job.stopped for job in cluster.jobs.values()] == [1]


def test_another_persons_endpoint_is_deleted_by_its_name_alone(
    cluster: FakeCluster, recorders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.begin = becomes_ready(recorders)
    assert shoal_program("deploy", "fashion").exit_code == 0
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("fashion", owner="bob@elsewhere"))
    error = shoal_program("delete").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "endpoint = 'fashion': is of bob@elsewhere. to end it, name it: `shoal serve delete fashion`"
    assert "endpoint fashion is gone" in shoal_program("delete", "fashion").output
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("fashion", owner=find_owner()))
    assert "endpoint fashion is gone" in shoal_program("delete").output


def test_a_detached_endpoint_is_found_while_its_controller_lives_and_ended_by_a_job(
    cluster: FakeCluster, recorders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = socket.gethostname()
    with subprocess.Popen(["true"]) as gone:
        pass
    (home() / "endpoints").mkdir(parents=True)
    for card in (
        EndpointCard("shop", "http://127.0.0.1:8000/shop", os.getpid(), here),
        EndpointCard("old", "http://127.0.0.1:8000", gone.pid, here),  # of a cluster that was killed
    ):
        path = home() / "endpoints" / f"{card.name}-1{CARD_SUFFIX}"
        path.write_bytes(msgspec.json.encode(card))
    assert list_endpoints() == [FoundEndpoint("shop", "http://127.0.0.1:8000/shop", is_detached=True)]
    cluster.begin = becomes_ready(recorders)
    deployed = shoal_program("deploy", "fashion").output
    assert "  shoal predict fashion --input 0 --endpoint fashion\n" in deployed  # there are two
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("x", owner="ada@head", lifetime="detached"))
    found = shoal_program("status").output.splitlines()
    assert [line.partition(":")[0] for line in found] == ["x", "x"]
    assert (
        found[1] == "x: ready at http://127.0.0.1:8000/shop, models none, replicas 0 of 0 ready, of ada@head, detached"
    )
    assert [each["url"] for each in json.loads(shoal_program("status", "--json").output)] == [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/shop",
    ]
    assert "endpoint shop is gone" in shoal_program("delete", "shop").output
    assert cluster.entrypoints[-1][1:] == ["-m", "shoal.flows.serving_end", "name=shop"]


def test_an_endpoint_of_another_run_is_not_deleted(cluster: FakeCluster, recorders: list[Any]) -> None:
    becomes_ready(recorders, "cartpole")(job := FakeJob("somebody-elses"))
    job.on_look()
    error = shoal_program("delete").exception
    assert isinstance(error, RunError)
    assert "endpoint cartpole was not deployed by `shoal serve deploy` but by 'serve'" in str(error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fashion", "endpoint.prot=1"], "did you mean 'port'?"),
        (["fashion", "endpoint.models.tabular.precision=bf16"], "endpoint.models = 'tabular': is not served"),
        (["fashion", "endpoint.models.fashion.precision=fp7"], "endpoint.models.fashion.precision = 'fp7'"),
        (["fashion", "endpoint.host=0.0.0.0"], "beyond loopback"),
        (["fashion", "nonsense=1"], "no such field"),
    ],
)
def test_words_are_looked_at_before_a_job_is_started(cluster: FakeCluster, words: list[str], message: str) -> None:
    error = shoal_program("deploy", *words).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert not cluster.jobs


def test_models_are_a_list_or_one_word() -> None:
    assert ServingSpec.parse({"models": "a@1, b@champion"}).models == ["a@1", "b@champion"]


@pytest.mark.parametrize("endpoint", [{"port": 8000}, {"port": 8000, "num_cpus": 2}, {}])
def test_what_a_file_does_not_say_of_the_endpoint_is_as_the_words_have_it(endpoint: dict[str, Any]) -> None:
    spec = ServingSpec.parse({"models": "a@1", "endpoint": endpoint}).endpoint
    assert (spec.name, spec.num_cpus) == (ServingSpec().endpoint.name, endpoint.get("num_cpus", 0.5))
    with pytest.raises(ConfigError, match="a is there twice"):
        ServingSpec.parse({"models": ["a@1", "a@2"]})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["endpoint.model.preprocess=mine:nosuch"],
            "endpoint.model.preprocess = 'mine:nosuch': 'mine' has no 'nosuch'",
        ),
        (["endpoint.models.fashion.postprocess=none:f"], "endpoint.models.fashion.postprocess = 'none:f': cannot be"),
        (
            ["endpoint.models.fashion.finite=false", "endpoint.model.preprocess=mine"],
            "endpoint.model.preprocess = 'mine'",
        ),
    ],
)
def test_a_hook_that_is_not_there_is_told_by_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    (tmp_path / "mine.py").write_text("def clean(arrays): return arrays\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ServingSpec(models=["fashion@1"]).override(["endpoint.model.postprocess=mine:clean"])
    Registry().register(
        "fashion",
        WeightSnapshot.of(1, {"weight": np.zeros(1, np.float32)}),
        model=ModelFactory(factory="mine:clean"),
        signature=signature(("x", "FP32", [-1, 1])),
    )
    require_importable(spec)
    with pytest.raises(ConfigError) as caught:
        require_importable(spec.override(words))
    assert message in str(caught.value)


def signature(*inputs: tuple[str, str, list[int]]) -> Signature:
    tensors = [TensorSignature(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs]
    return Signature(inputs=tensors, outputs=tensors)


def test_a_class_that_is_not_there_is_told_before_a_replica_starts() -> None:
    Registry().register(
        "gone",
        WeightSnapshot.of(1, {"weight": np.zeros(1, np.float32)}),
        model=ModelFactory(factory="nowhere.to.be:Found"),
        signature=signature(("x", "FP32", [-1, 1])),
    )
    with pytest.raises(ConfigError, match=r"gone@1: model.factory = 'nowhere.to.be:Found': cannot be imported"):
        require_importable(ServingSpec(models=["gone"]))
