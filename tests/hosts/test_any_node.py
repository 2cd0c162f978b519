"""A head without CPUs, by the commands of cluster.yaml: drivers there compute nothing, and drivers on another node do
all that they do on the head."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from network import Host, network, start_ray, why_none

from shoal.registry import Registry
from shoal_program import ROOT

pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(3600), pytest.mark.soak]
DASHBOARD = "http://127.0.0.1:8265"
LEARNING_S = 1500.0


@dataclass
class Cluster:
    shared: Path
    head: Host
    worker: Host
    client: Host

    def submit(self, *words: str, options: str = "") -> list[str]:
        """The command that submits a job from the head."""
        typed = f"ray job submit --address {DASHBOARD} --working-dir . {options} -- {shlex.join(words)}"
        return ["bash", "-c", f". ~/shoal-host.env && {typed}"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("any-node")
    with network(folder) as made:
        head, worker, client = map(made.add, ("head", "worker", "client"))
        shutil.copytree(ROOT / "jobs", head.project / "jobs")
        shutil.copy(ROOT / "tests/hosts/line.py", head.project)
        start_ray(head, head, num_cpus=0)
        start_ray(worker, head)
        yield Cluster(folder / "shared", head, worker, client)


@pytest.mark.parametrize(
    "words", [pytest.param(("parallel=ddp", "workers=2"), id="ranks"), pytest.param(("workers=[1,2]",), id="elastic")]
)
def test_a_driver_on_a_head_without_cpus_builds_no_model_and_reads_no_data(
    cluster: Cluster, words: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    notes = cluster.shared / f"notes-{request.node.callspec.id}"
    fields = ["task=line.py:Line", f"args.notes={notes}", "batch_size=16", "stop.epochs=2", "name=line", *words]
    said = cluster.head.run(*cluster.submit("python", "jobs/train.py", *fields))
    assert "2 epochs" in said
    lines = notes.read_text().splitlines()
    assert set(lines) == {"model worker", "data worker", "model head"}
    assert lines.count("model head") == 1, "by the process that tries what was registered"


def test_an_error_of_the_check_is_the_drivers(cluster: Cluster) -> None:
    words = ["task=line.py:Line", "args.notes=/dev/null", "stop.target.metric=accuracy", "stop.target.value=1"]
    with cluster.head.start(cluster.submit("python", "jobs/train.py", *words)) as failing:
        assert failing.wait() != 0
        assert "error: stop.target.metric = 'accuracy': is not evaluated. there is loss" in failing.said


def test_a_driver_beside_the_workers_predicts_a_batch(cluster: Cluster) -> None:
    (cluster.head.project / "rows.csv").write_text("x\n" + "\n".join(map(str, range(100))))
    output = cluster.shared / "predicted"
    words = ["model=line", "input=rows.csv", f"output={output}", "columns=[x]", "workers=1"]
    job = cluster.submit("python", "-m", "shoal.libs.batch_predict.flow", *words, options="--entrypoint-num-cpus 0.5")
    assert "100 rows" in cluster.head.run(*job)
    assert list(output.glob("*.parquet"))


def test_a_driver_beside_the_workers_teaches_a_policy(cluster: Cluster) -> None:
    """The gateway is on the driver's node, and the evaluation plays through the ingress on the head's loopback."""
    words = ["target_return=40", "gateway.host=0.0.0.0", "gateway.curve=true", "endpoint.num_cpus=0.3"]
    job = cluster.submit("python", "jobs/actor_learner.py", *words, options="--entrypoint-num-cpus 0.5")
    with cluster.head.start(job, limit_s=LEARNING_S) as learning, ExitStack() as stack:
        told = learning.wait_for_line(".*--connect.*")[0]
        assert f"tcp://{cluster.worker.address}:" in told
        acting = [sys.executable, *shlex.split(told)[1:]]
        token = (cluster.shared / "token").read_text().strip()
        variables = {"SHOAL_HOME": str(cluster.client.home), "SHOAL_TOKEN": token}
        actor = stack.enter_context(cluster.client.start(acting, variables, LEARNING_S))
        assert learning.wait(LEARNING_S) == 0
        assert re.search(r"cartpole@1 \(champion\): mean return", learning.said)
        assert actor.wait() == 0
    assert Registry(cluster.shared / "registry").get("cartpole").version == 1
