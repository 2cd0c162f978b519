"""Workers see the GPUs that they reserve: with four that are not real, on clusters of ours and of others."""

import itertools
import json
import os
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from fake_cluster import FakeRequest, replace_cluster
from shoal.cluster.admission import RunAdmission
from shoal.cluster.cluster_handle import HIDE_GPUS
from shoal.cluster.embedded_cluster import EmbeddedCluster, start_cluster
from shoal.cluster.growth import Growth
from shoal.cluster.job_main import connect
from shoal.errors import ConfigError, PlanError
from shoal.flows.training import RayBackend
from shoal.libs.population.flow.run import _choose_workers
from shoal.libs.population.loop.spec import RLPopulationSpec
from shoal.libs.population.spec import PopulationSpec
from shoal.libs.sweep.loop_spec import LoopTrialSpec
from shoal.libs.sweep.ray_sweep import count_concurrent_trials
from shoal.libs.sweep.spec import SweepSpec, check_sweep
from shoal.runs.record.event_log import NullLog
from shoal.train.launch.ray_capacity import require_capacity, resolve_device
from shoal.train.launch.validate import validate_run
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal_program import Program

pytestmark = pytest.mark.timeout(1500)
REPLICAS = ("parameter_server", "local_sgd", "diloco")
CPU = torch.device("cpu")
GPUS = ["0", "1", "2", "3"]
PAIRS = {",".join(pair) for pair in itertools.permutations(GPUS, 2)}
DEVICES: dict[float, set[str]] = {0: {""}, 0.5: set(GPUS), 1: set(GPUS), 2: PAIRS}
ALL_KINDS: dict[str, set[float]] = {
    **{"task": {0, 0.5, 1, 2}, "actor": {0, 0.5, 1, 2}, "task of an actor": {0}, "mailbox": {0}},
    **{"worker of replicas": {0, 1}, "server of replicas": {0}},
    **{"gateway": {0}, "weight store": {0}},
    **{"learner": {0, 0.5, 1}, "replica of a learner": {0, 0.5, 1}, "trainer": {0, 1, 2}, "population members": {0, 1}},
    **{kind: {0, 0.5, 1, 2} for kind in ("sweep trial", "batch-predict", "serve replica")},
}


def ignore(*_: object, **__: object) -> None:
    """Records no event."""


@pytest.mark.usefixtures("cluster")
def test_a_cluster_of_ours_hides_gpus_from_workers_that_reserve_none() -> None:
    look = ray.remote(num_cpus=0)(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert ray.get(look.remote()) == ""


def spec_of(**changes: Any) -> TrainSpec:
    return TrainSpec.parse({"task": "tests/train_task.py:Toy", "stop": {"steps": 9}, "workers": 2, **changes})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of the driver's host, and of another; no cluster."""
    numbers = {"here": 0.0, "there": 0.0}

    def list_nodes() -> list[dict[str, Any]]:
        found = {name: {"GPU": number, "CPU": 2.0} for name, number in numbers.items()}
        return [{"NodeID": name, "Alive": True, "Resources": each} for name, each in found.items()]

    monkeypatch.setattr(ray, "nodes", list_nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": sum(numbers.values())})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    return numbers


def test_workers_that_share_memory_count_the_gpus_of_one_host(gpus: dict[str, float]) -> None:
    gpus.update(here=1.0, there=1.0)
    assert resolve_device(spec_of(sync={"kind": "local_sgd"})).device == "cuda"
    shared = spec_of(sync={"kind": "local_sgd", "transport": "shared_memory"})
    assert resolve_device(shared).device == "cpu"
    gpus["there"] = 2.0
    assert resolve_device(shared).device == "cuda"


def test_a_range_of_workers_begins_on_gpus_that_the_fewest_have(gpus: dict[str, float]) -> None:
    gpus["here"] = 1.0
    assert resolve_device(spec_of(workers=[1, 2])).device == "cuda"
    assert resolve_device(spec_of(workers=[2, 2])).device == "cpu"


def test_lanes_train_on_the_cpus_of_one_host(gpus: dict[str, float]) -> None:
    gpus["here"] = 1.0
    assert resolve_device(spec_of(workers=1, sync={"hogwild": 2})).device == "cpu"
    with pytest.raises(ConfigError, match=r"device=cuda does not go with sync\.hogwild=2: use device=cpu"):
        spec_of(workers=1, sync={"hogwild": 2}, device="cuda")


def test_what_shares_memory_is_refused_where_no_host_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": name, "Alive": True, "Resources": {"CPU": 2.0}} for name in ("here", "there")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr("shoal.train.launch.ray_capacity.find_growth", lambda: Growth({}))
    lanes = spec_of(workers=1, batch_size=64, sync={"hogwild": 4}, device="cpu")
    with pytest.raises(PlanError, match=r"sync\.hogwild = 4: .*largest has 2 CPUs\. use sync\.hogwild=2"):
        require_capacity(lanes, ignore, RunAdmission("run"))
    shared = spec_of(workers=4, sync={"kind": "diloco", "transport": "shared_memory"}, device="cpu")
    with pytest.raises(PlanError, match=r"workers = 4: .*largest has 2 CPUs\. use sync\.transport=auto"):
        require_capacity(shared, ignore, RunAdmission("run"))


def test_a_precision_is_judged_by_the_device_of_the_workers(gpus: dict[str, float]) -> None:
    fp16 = spec_of(parallel={"precision": "fp16"})
    validate_run(fp16)  # this process has no GPU, and the cluster is not known yet
    with pytest.raises(PlanError, match=r"parallel\.precision = 'fp16': is for CUDA, not for cpu"):
        resolve_device(fp16)
    gpus["here"] = 2.0
    assert resolve_device(fp16).device == "cuda"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("changes", [{"workers": [1, 2]}, *({"sync": {"kind": kind}} for kind in REPLICAS)])
def test_replicas_reserve_a_gpu_each_where_they_train_on_one(
    changes: dict[str, Any], device: str, gpus: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    def fit_replicas(*words: Any) -> TrainResult:
        words[5]("worker 0", ignore, ())
        return TrainResult("r", "steps", "", 1, 1, 0.0)

    monkeypatch.setattr("shoal.libs.asynchronous.replicas.fit_replicas", fit_replicas)
    monkeypatch.setattr("shoal.libs.asynchronous.ray_processes.RayProcess", lambda *_, **words: started.append(words))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    gpus["there"] = 2.0
    spec = spec_of(device=device, **changes)
    RayBackend(spec, SimpleNamespace(id="r", folder=None), NullLog()).attempt(None)  # type: ignore[arg-type]
    is_there = device == "cuda"  # no other has a GPU
    assert started == [{"host": "there" if is_there else "here", "is_fixed": False, "has_gpu": is_there}]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_members_of_a_population_on_a_gpu_are_in_a_worker(
    device: str, gpus: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reserves none."""
    spec = PopulationSpec(device=device)
    replace_cluster(monkeypatch)
    assert _choose_workers(PopulationSpec(device="cpu"), None, ignore)[1:] == (CPU, None)
    assert _choose_workers(PopulationSpec(), RunAdmission("run"), ignore)[1:] == (CPU, None)
    gpus["here"] = 1.0
    monkeypatch.setattr(ray, "available_resources", ray.cluster_resources)
    chosen, here, make = _choose_workers(spec, RunAdmission("run"), ignore)
    assert (chosen.device, here) == ("cuda", CPU)
    assert make is not None


def test_learners_of_a_population_are_in_the_driver() -> None:
    assert RLPopulationSpec().make_member_spec(0, {}).learner.device == "cpu"
    asked = RLPopulationSpec().override(["learner.device=cuda"])
    assert asked.make_member_spec(0, {}).learner.device == "cuda"


def test_a_sweep_on_gpus_says_how_many_a_trial_has() -> None:
    space = {"optimizer.learning_rate": "log(1e-4,1e-1)"}
    spec = SweepSpec(train=spec_of(workers=1, device="cuda"), space=space)
    with pytest.raises(ConfigError, match=r"gpus_per_trial = 0\.0: .* use --gpus-per-trial 1"):
        check_sweep(spec)
    check_sweep(spec.model_copy(update={"gpus_per_trial": 0.5}))
    check_sweep(SweepSpec(train=spec_of(device="cuda"), space=space))  # its workers reserve theirs
    loop = SweepSpec(
        loop=LoopTrialSpec().override(["learner.device=cuda"]), space={"algorithm.clip": "uniform(0.1,0.3)"}
    )
    with pytest.raises(ConfigError, match="gpus_per_trial"):
        check_sweep(loop)


def test_as_many_trials_run_as_have_gpus_for_their_workers(
    gpus: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_cluster(monkeypatch)
    monkeypatch.setattr(FakeRequest, "answers", [True, True])
    spec, admission = SweepSpec(train=spec_of()), RunAdmission("sweep")  # workers=2
    assert count_concurrent_trials(spec, ignore, admission) == 2  # of four CPUs
    gpus["there"] = 2.0
    assert count_concurrent_trials(spec, ignore, admission) == 1


def test_a_job_brings_the_switch_along_unless_its_cluster_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda **words: asked.append(words["runtime_env"]))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for name in HIDE_GPUS:
        monkeypatch.delenv(name, raising=False)
    connect()
    for value in ("1", "0"):  # the user's word counts, too
        monkeypatch.setenv(*HIDE_GPUS, value)
        connect()
    assert asked == [{"env_vars": HIDE_GPUS}, None, None]


def read_rows(cluster: EmbeddedCluster, **variables: str) -> list[list[Any]]:
    """What `gpu_workers.py` prints. variables: "" removes one"""
    path = os.pathsep.join(filter(None, ["tests", os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **cluster.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    env = {name: value for name, value in env.items() if value}
    with Program([sys.executable, "tests/gpu_workers.py"], env=env) as program:
        assert program.wait() == 0
        return [json.loads(line) for line in program.said.splitlines() if line.startswith('["')]


def require_own_devices(rows: list[list[Any]]) -> None:
    asked_by_kind, processes = defaultdict(set), defaultdict(set)
    for kind, asked, seen, process in rows:
        assert seen in DEVICES[asked], (kind, asked, seen)
        asked_by_kind[kind].add(asked)
        processes[kind].add(process)
    assert asked_by_kind == ALL_KINDS
    held = [seen for kind, asked, seen, _ in rows if kind == "worker of replicas" and asked]
    assert sorted(held) == GPUS, "four workers at once, each on a GPU of its own"
    assert len(processes["task"]) == 2  # of eight tasks: used again, by those with a GPU and by those without


@pytest.mark.soak
@pytest.mark.parametrize("is_ours", [True, False])
def test_every_kind_of_worker_sees_what_it_reserves(is_ours: bool) -> None:
    off = {} if is_ours else dict.fromkeys(HIDE_GPUS, "0")
    with start_cluster(num_cpus=8, num_gpus=4, environment=off) as cluster:
        require_own_devices(read_rows(cluster, **dict.fromkeys(off, "")))
