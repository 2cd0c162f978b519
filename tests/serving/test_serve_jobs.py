"""`shoal serve deploy` and `delete` around their job: what is submitted, waited for, stopped and said. No Ray."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import Result

import shoal.runs
from registered import register, tensors
from shoal.cli.commands import serve_deploy
from shoal.cli.support import jobs as job_output
from shoal.client import Client
from shoal.client.discovery import CARD_SUFFIX, EndpointCard, FoundEndpoint, list_endpoints
from shoal.client.endpoint_status import EndpointStatus
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.job_main import job_main
from shoal.cluster.jobs import JobInfo, JobStatus
from shoal.errors import ClusterError, ConfigError, ConnectionLost, RunError, ShoalError, WeightsError
from shoal.flows.serving_spec import READY, ServingSpec, require_importable, spec_from_overrides
from shoal.home import home
from shoal.registry import ModelFactory, Registry, Signature, verification
from shoal.runs.record.provenance import find_owner, restore_secrets, split_secrets
from shoal.weights import WeightSnapshot
from typed import said, typed

CLUSTER = ClusterHandle("127.0.0.1:6379", "http://127.0.0.1:8265", "token", {}, temp_dir=Path("/tmp/none"))


@dataclasses.dataclass
class FakeJob:
    """A job that is as it was told to be; `stopped` counts how often it was."""

    submission_id: str
    entrypoint: Sequence[str] = ()
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    state: JobStatus = JobStatus.RUNNING
    said: str = ""
    on_look: Callable[[], None] = lambda: None
    stopped: int = 0
    is_known: bool = True

    def poll_outcome(self) -> JobStatus | None:
        """Of a real job, this is patient: what it raises, it raises when nobody has answered for long."""
        self.on_look()
        return self.state if self.state.is_over else None

    def read_logs(self) -> str:
        return self.said

    try_read_logs = read_logs

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
    folders: list[Path | None] = dataclasses.field(default_factory=list)
    begin: Callable[[FakeJob], None] = lambda job: None

    def submit(
        self, cluster: ClusterHandle, entrypoint: Sequence[str], *, env: dict[str, str], submission_id: str,
        working_dir: Path | None = None, metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> FakeJob:  # fmt: skip
        job = self.jobs[submission_id] = FakeJob(submission_id, entrypoint, env, metadata)
        self.folders.append(working_dir)
        self.begin(job)
        return job

    def job(self, cluster: ClusterHandle, submission_id: str) -> FakeJob:
        return self.jobs.get(submission_id) or FakeJob(submission_id, is_known=False)

    def infos(self, cluster: ClusterHandle) -> list[JobInfo]:
        return [JobInfo(job.submission_id, job.state, "", "", 0.0, job.metadata) for job in self.jobs.values()]

    @property
    def only_job(self) -> FakeJob:
        (job,) = self.jobs.values()
        return job


def fake_cluster(handle: ClusterHandle, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(serve_deploy, "find_cluster", lambda address: handle)
    for name, stand_in in {"submit": fake.submit, "JobHandle": fake.job, "list_jobs": fake.infos}.items():
        monkeypatch.setattr(serve_deploy, name, stand_in)
    monkeypatch.setattr("shoal.cli.support.verbs.interrupt_on_termination", lambda: None)
    monkeypatch.setattr(job_output, "ignore_further_interrupts", lambda: None)
    return fake


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Of this machine, with two models in the registry."""
    fake = fake_cluster(CLUSTER, monkeypatch)
    for name in ("fashion", "tabular"):
        register(name, aliases=("champion",))
    return fake


@pytest.fixture
def recorders() -> Iterator[list[Any]]:
    opened: list[Any] = []
    yield opened
    for recorder in opened:
        recorder.close()


def shoal_program(line: str, *words: str) -> Result:
    return typed(f"serve {line}", *words)


def fails(kind: type[ShoalError], text: str, line: str) -> None:
    """Check that `shoal serve LINE` ends with an error of this kind, which says so."""
    result = shoal_program(line)
    assert isinstance(result.exception, kind), result.exception
    assert text in str(result.exception)


def becomes_ready(recorders: list[Any], name: str = "fashion") -> Callable[[FakeJob], None]:
    def begin(job: FakeJob) -> None:
        recorder = shoal.runs.create("serve", "", job.submission_id)
        recorders.append(recorder)
        recorder.record_endpoint(name, "inference", "http://127.0.0.1:8000", "starting")
        recorder.record_endpoint(f"{name}/grpc", "grpc", "127.0.0.1:9000", "ready")
        job.on_look = lambda: recorder.record_endpoint(name, "inference", "http://127.0.0.1:8000", "ready")

    return begin


def test_deploy_shows_what_it_waits_for_and_that_time_does_not_count(
    cluster: FakeCluster, recorders: list[Any]
) -> None:
    def begin(job: FakeJob) -> None:
        becomes_ready(recorders)(job)
        recorders[0].record_event("waiting", reason="1 more replica wanted, waiting for nodes", wait_s=600.0)
        ready, looks = job.on_look, iter(range(3))
        job.on_look = lambda: None if next(looks, None) is not None else ready()

    cluster.begin = begin
    result = shoal_program("deploy fashion --timeout-s 0.001")
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
    words += ["--allow-origin", "https://app.example", "--allow-origin", "http://localhost:5173"]
    result = shoal_program("deploy", *words)
    assert result.exit_code == 0, result.exception
    assert "endpoint fashion is ready at http://127.0.0.1:8000, gRPC at 127.0.0.1:9000\n" in result.output
    assert "\n  shoal predict fashion --input 0,0,0\n" in result.output
    job = cluster.only_job
    entrypoint = job.entrypoint
    assert entrypoint[1:3] == ["-m", "shoal.flows.serving"]
    assert "hush" not in " ".join(entrypoint)  # which `shoal status` and the dashboard show
    monkeypatch.setenv("SHOAL_SECRET_WORDS", job.env["SHOAL_SECRET_WORDS"])
    fields = restore_secrets(entrypoint[3:])
    spec = spec_from_overrides(fields)
    assert [key.key.get_secret_value() for key in spec.endpoint.keys] == ["hush-hush-hush-hush"]
    assert spec.models == ["fashion@champion", "tabular@1"]
    assert spec.endpoint.allow_origins == ["https://app.example", "http://localhost:5173"]
    assert (spec.endpoint.num_replicas, spec.endpoint.options("fashion").deadline_s) == (2, 0.1)
    assert job.env["SHOAL_RUN_ID"] == job.submission_id
    assert "hush" not in job.env["SHOAL_COMMAND"]
    assert job.stopped == 0


def test_weights_that_a_replica_would_refuse_are_refused_before_a_job_starts(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Registry().get("fashion").manifest.model
    broken = WeightSnapshot.of(1, {"weight": np.full((2, 3), np.nan, np.float32), "bias": np.zeros(2, np.float32)})
    Registry().register("fashion", broken, model=model, signature=Registry().get("fashion").manifest.signature)
    monkeypatch.setenv("SHOAL_VERIFY", "1")
    monkeypatch.setattr(verification, "MAX_BYTES", 0)  # what finds out needs no second process
    fails(WeightsError, "fashion@2 cannot be served: 'weight' is not finite", "deploy fashion")
    assert cluster.jobs == {}


def test_a_deployment_that_is_given_up_leaves_no_job_behind(cluster: FakeCluster) -> None:
    def silent() -> None:
        raise ConnectionLost("no answer from http://127.0.0.1:8265: ReadTimeout")

    def begin(job: FakeJob) -> None:
        job.on_look = silent

    cluster.begin = begin
    result = shoal_program("deploy fashion")
    assert isinstance(result.exception, ConnectionLost)
    assert [job.stopped for job in cluster.jobs.values()] == [1]


def test_the_job_reads_the_words_that_its_command_line_does_not_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, variables = split_secrets(["models=fashion", "endpoint.keys=[{name: ada, key: a blank is refused}]"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["serving", *shown, "--check"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit):
        job_main(spec_from_overrides, lambda spec, job: None, "serve")
    assert "it is printable ASCII without blanks" in capsys.readouterr().err


def test_a_file_goes_along_by_its_place_and_names_are_taken_as_they_were_typed(
    cluster: FakeCluster, recorders: list[Any], tmp_path: Path
) -> None:
    cluster.begin = becomes_ready(recorders, "007")
    file = tmp_path / "a: b #1.yaml"
    file.write_text("models: [fashion]\nendpoint: {name: shop, max_body_bytes: 5}\n")
    said("serve deploy --name 007 endpoint.port=80", str(file))
    words = cluster.only_job.entrypoint[3:]
    spec = spec_from_overrides(words)
    assert (spec.endpoint.name, spec.endpoint.max_body_bytes, spec.endpoint.port) == ("007", 5, 80)
    assert (spec.models, spec.file) == (["fashion"], str(file))


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
    fails(ConfigError, words, f"deploy {tmp_path / 'shop.yaml'}")


@pytest.mark.parametrize("word", ["--port 8123", "endpoint.port=8123", ""])
def test_the_port_that_a_file_gives_to_ray_is_told_where_it_is_not_taken(
    cluster: FakeCluster, recorders: list[Any], tmp_path: Path, word: str
) -> None:
    cluster.begin = becomes_ready(recorders, "shop")
    (tmp_path / "shop.yaml").write_text(FOR_SERVE)
    told = said(f"serve deploy {tmp_path / 'shop.yaml'} {word}")
    assert ("are for Ray's own `serve deploy`; --port 8123 is the same here" in told) == (not word)


def test_a_job_that_fails_says_why(cluster: FakeCluster) -> None:
    def begin(job: FakeJob) -> None:
        job.state, job.said = JobStatus.FAILED, "something\nerror: fashion cannot be served: weights are damaged\n"

    cluster.begin = begin
    fails(RunError, "fashion cannot be served: weights are damaged", "deploy fashion")


def test_one_that_takes_too_long_is_stopped(cluster: FakeCluster) -> None:
    fails(ClusterError, "was not ready within 0.01 s", "deploy fashion --timeout-s 0.01")
    assert [job.stopped for job in cluster.jobs.values()] == [1]


@pytest.mark.parametrize("is_submitted", [True, False])
def test_ctrl_c_stops_the_job_also_one_that_may_have_begun(cluster: FakeCluster, is_submitted: bool) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def begin(job: FakeJob) -> None:
        if is_submitted:
            job.on_look = interrupt
        else:
            interrupt()

    cluster.begin = begin
    result = shoal_program("deploy fashion")
    assert result.exit_code == 130
    assert "stopped: nothing is served" in result.output
    assert cluster.only_job.stopped == 1


def test_a_second_endpoint_of_a_name_is_refused_before_a_job_is_started(
    cluster: FakeCluster, recorders: list[Any]
) -> None:
    cluster.begin = becomes_ready(recorders)
    said("serve deploy fashion")
    fails(
        ConfigError,
        "endpoint.name = 'fashion': is the name of an endpoint on this cluster",
        "deploy tabular --name fashion",
    )
    assert len(cluster.jobs) == 1
    cluster.begin = becomes_ready(recorders, "tabular")
    said("serve deploy tabular")
    assert len(cluster.jobs) == 2


def test_delete_stops_the_job_of_the_endpoint(cluster: FakeCluster, recorders: list[Any]) -> None:
    cluster.begin = becomes_ready(recorders)
    said("serve deploy fashion")
    result = shoal_program("delete fashion")
    assert "endpoint fashion is gone" in result.output
    assert [job.stopped for job in cluster.jobs.values()] == [1]


def test_another_persons_endpoint_is_deleted_by_its_name_alone(
    cluster: FakeCluster, recorders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.begin = becomes_ready(recorders)
    said("serve deploy fashion")
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("fashion", owner="bob@elsewhere"))
    fails(
        ConfigError,
        "endpoint = 'fashion': is of bob@elsewhere. to end it, name it: `shoal serve delete fashion`",
        "delete",
    )
    assert "endpoint fashion is gone" in said("serve delete fashion")
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("fashion", owner=find_owner()))
    assert "endpoint fashion is gone" in said("serve delete")


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
    deployed = said("serve deploy fashion")
    assert "  shoal predict fashion --input 0,0,0 --endpoint fashion\n" in deployed  # there are two
    monkeypatch.setattr(Client, "status", lambda client: EndpointStatus("x", owner="ada@head", lifetime="detached"))
    found = said("serve status").splitlines()
    assert [line.partition(":")[0] for line in found] == ["x", "x"]
    assert (
        found[1] == "x: ready at http://127.0.0.1:8000/shop, models none, replicas 0 of 0 ready, of ada@head, detached"
    )
    assert [each["url"] for each in json.loads(said("serve status --json"))] == [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/shop",
    ]
    assert "endpoint shop is gone" in said("serve delete shop")
    *_, job = cluster.jobs.values()
    assert job.entrypoint[1:] == ["-m", "shoal.flows.serving_end", "name=shop"]


def test_an_endpoint_of_another_run_is_not_deleted(cluster: FakeCluster, recorders: list[Any]) -> None:
    becomes_ready(recorders, "cartpole")(job := FakeJob("somebody-elses"))
    job.on_look()
    fails(RunError, "endpoint cartpole was not deployed by `shoal serve deploy` but by 'serve'", "delete")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("endpoint.prot=1", "did you mean 'endpoint.port'?"),
        ("endpoint.models.tabular.precision=bf16", "endpoint.models = 'tabular': is not served"),
        ("endpoint.models.fashion.precision=fp7", "endpoint.models.fashion.precision = 'fp7'"),
        ("endpoint.host=0.0.0.0", "beyond loopback"),
        ("nonsense=1", "no such field"),
    ],
)
def test_words_are_looked_at_before_a_job_is_started(cluster: FakeCluster, word: str, message: str) -> None:
    fails(ConfigError, message, f"deploy fashion {word}")
    assert not cluster.jobs


def test_models_are_a_list_or_one_word() -> None:
    assert ServingSpec.parse({"models": "a@1, b@champion"}).models == ["a@1", "b@champion"]


@pytest.mark.parametrize("endpoint", [{"port": 8000}, {"port": 8000, "num_cpus": 2}, {}])
def test_what_a_file_does_not_say_of_the_endpoint_is_as_the_words_have_it(endpoint: dict[str, Any]) -> None:
    spec = ServingSpec.parse({"models": "a@1", "endpoint": endpoint}).endpoint
    assert (spec.name, spec.num_cpus) == (ServingSpec().endpoint.name, endpoint.get("num_cpus", 0.5))


def test_a_hook_or_class_that_is_not_there_is_told_before_a_replica_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def clean(arrays): return arrays\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tensor = tensors(x=[-1, 1])
    for name, factory in (("fashion", "mine:clean"), ("gone", "nowhere.to.be:Found")):
        Registry().register(
            name,
            WeightSnapshot.of(1, {"weight": np.zeros(1, np.float32)}),
            model=ModelFactory(factory=factory),
            signature=Signature(inputs=tensor, outputs=tensor),
        )
    spec = ServingSpec(models=["fashion@1"]).override(["endpoint.model.postprocess=mine:clean"])
    require_importable(spec)
    for word, message in (
        ("endpoint.model.preprocess=mine:nosuch", "model.preprocess = 'mine:nosuch': 'mine' has no 'nosuch'"),
        ("endpoint.models.fashion.postprocess=none:f", "models.fashion.postprocess = 'none:f': cannot be"),
        ("endpoint.model.preprocess=mine", "model.preprocess = 'mine'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            require_importable(spec.override([word]))
    with pytest.raises(ConfigError, match=r"gone@1: model.factory = 'nowhere.to.be:Found': cannot be imported"):
        require_importable(ServingSpec(models=["gone"]))


# -- on a cluster elsewhere

URL = "http://head.example:8265"


def say_ready(url: str = "http://127.0.0.1:8000", grpc: str | None = None) -> str:
    """What a serving job prints once its models answer."""
    lines = ["Runtime env is set up", f"serving tumours (now tumours@2) at {url}/v2/models/tumours"]
    return "\n".join([*lines, READY + json.dumps({"url": url, "grpc": grpc}), ""])


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCluster:
    """Of which nothing is seen but its jobs and what they say."""
    fake = fake_cluster(ClusterHandle(URL, URL, "token", {}), monkeypatch)
    fake.begin = lambda job: setattr(job, "said", say_ready())
    monkeypatch.chdir(tmp_path)
    return fake


def test_deploy_asks_no_registry_of_this_machine_and_says_how_to_reach_the_endpoint(
    remote: FakeCluster, tmp_path: Path
) -> None:
    result = shoal_program(
        "deploy tumours@champion --port 8000 --address", URL, "endpoint.keys=[{name: a, key: hush-hush}]"
    )
    assert result.exit_code == 0, result.exception
    job, words = remote.only_job, remote.only_job.entrypoint
    assert words[:3] == ["python", "-m", "shoal.flows.serving"]
    assert {"models=tumours@champion", "endpoint.port=8000", "endpoint.name=tumours"} <= set(words)
    assert "hush" not in " ".join(words)
    assert job.env["SHOAL_RUN_ID"] == job.submission_id
    assert "SHOAL_HOME" not in job.env  # it is the cluster's
    assert remote.folders == [tmp_path]
    assert f"endpoint tumours is ready at http://127.0.0.1:8000, on the loopback of the head of {URL}" in result.output
    assert "ssh -N -L 8000:127.0.0.1:8000 HEAD &" in result.output


def test_one_that_is_reached_over_tls_needs_no_tunnel(remote: FakeCluster) -> None:
    url = "https://models.example:8443"
    remote.begin = lambda job: setattr(job, "said", say_ready(url))
    tls = "endpoint.host=0.0.0.0 endpoint.tls.certificate=/c.pem endpoint.tls.key=/k.pem"
    told = said(f"serve deploy tumours {tls}")
    assert f"is ready at {url}, on the head of" in told
    assert f"--endpoint {url} --ca FILE --key TOKEN" in told
    assert "ssh" not in told


def test_both_addresses_are_reached_through_the_tunnel(remote: FakeCluster) -> None:
    remote.begin = lambda job: setattr(job, "said", say_ready(grpc="127.0.0.1:8001"))
    assert "ssh -N -L 8000:127.0.0.1:8000 -L 8001:127.0.0.1:8001 HEAD &" in said("serve deploy tumours")


def test_a_second_endpoint_of_a_name_is_refused_before_anything_is_uploaded(remote: FakeCluster) -> None:
    said("serve deploy tumours")
    fails(
        ConfigError,
        "endpoint.name = 'tumours': is the name of an endpoint on this cluster",
        "deploy fashion --name tumours",
    )
    assert len(remote.jobs) == 1
    remote.begin = lambda job: setattr(job, "said", say_ready("http://127.0.0.1:8000/fashion"))
    assert "endpoint fashion is ready at http://127.0.0.1:8000/fashion," in said("serve deploy fashion")


def test_the_name_of_a_detached_endpoint_that_is_gone_may_be_taken_again(remote: FakeCluster) -> None:
    detached = {"shoal.endpoint": "tumours", "shoal.lifetime": "detached"}
    remote.jobs["before"] = FakeJob("before", metadata=detached, state=JobStatus.SUCCEEDED)  # Ray lists it still
    said("serve deploy tumours")
    assert "endpoint tumours is gone" in said("serve delete")
    assert [job.state for job in remote.jobs.values()] == [JobStatus.SUCCEEDED, JobStatus.STOPPED]


def test_a_file_goes_with_the_folder_that_it_lies_in(remote: FakeCluster, tmp_path: Path) -> None:
    inside, outside = tmp_path / "shop.yaml", tmp_path.parent / "shop-elsewhere.yaml"
    for file in (inside, outside):
        file.write_text("models: [tumours]\nendpoint: {name: shop}\n")
    said(f"serve deploy {inside}")
    (job,) = remote.jobs.values()
    assert {"file=shop.yaml", "endpoint.name=shop"} <= set(job.entrypoint)
    job.stop()
    said("serve deploy file=shop.yaml")
    (_, job) = remote.jobs.values()
    assert "file=shop.yaml" in job.entrypoint
    job.stop()
    fails(ConfigError, "lies outside", f"deploy {outside}")


@pytest.mark.parametrize("name", ["", " tumours"])
def test_elsewhere_delete_stops_the_job_of_the_endpoint(remote: FakeCluster, name: str) -> None:
    said("serve deploy tumours")
    remote.jobs["training"] = FakeJob("training", ["python", "jobs/lenet.py"])
    assert "endpoint tumours is gone" in said(f"serve delete{name}")
    assert {job.state for job in remote.jobs.values()} == {JobStatus.STOPPED, JobStatus.RUNNING}
    fails(RunError, "`shoal serve deploy` has none there", f"delete{name}")


def test_jobs_of_others_are_passed_over_and_one_of_the_head_itself_is_found(remote: FakeCluster) -> None:
    remote.jobs["other"] = FakeJob("other", ["python", "-m", "shoal.flows.serving", "models=tumours"])  # of no `deploy`
    remote.jobs["local"] = FakeJob("local", metadata={"shoal.endpoint": "fashion", "shoal.lifetime": "job"})
    assert "endpoint fashion is gone" in said("serve delete fashion")
    assert remote.jobs["local"].state is JobStatus.STOPPED
    assert remote.jobs["other"].state is JobStatus.RUNNING


def test_a_word_of_the_models_own_hides_nothing(remote: FakeCluster) -> None:
    remote.begin = lambda job: setattr(
        job, "said", f"error: no such thing, says a library\nready: to go\n{say_ready()}"
    )
    said("serve deploy tumours")


def test_a_model_is_taken_from_an_endpoint_and_not_from_a_cluster(remote: FakeCluster) -> None:
    fails(
        ConfigError,
        "is a cluster's, and a model is taken from an endpoint",
        f"delete shop --model tabular --address {URL}",
    )


def test_delete_names_what_there_is(remote: FakeCluster) -> None:
    said("serve deploy tumours")
    fails(RunError, f"there is no endpoint fashion on {URL}: there is tumours", "delete fashion")
