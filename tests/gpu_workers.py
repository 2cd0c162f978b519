"""A driver that starts workers of every kind, which asked for other numbers of GPUs, and prints what each of them sees.

    python tests/gpu_workers.py      on the cluster of $RAY_ADDRESS, with four GPUs, real ones or not

Each line is JSON: the kind, the number of GPUs that it reserves, its CUDA_VISIBLE_DEVICES, its process.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

from rl_setting import EXPERIENCE, TOKEN
from shoal.cluster.job_main import connect, disconnect
from shoal.libs.asynchronous.ray_processes import RayProcesses
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.ray_workers import ActorLearnerWorkers
from shoal.rl.spec import RLSpec
from shoal.runs.ray_event_channel import start_mailbox
from shoal.train.spec import TrainSpec
from waiting import wait_for

STATE_S = 400.0
ASKED = (0, 0.5, 1, 2)
Seen = tuple[str | None, int]


def see(worker: object = None) -> Seen:
    """What the process sees that runs this."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()


def see_below(worker: object) -> Seen:
    """What a task sees that a worker starts."""
    found: Seen = ray.get(ray.remote(num_cpus=0)(see).remote())
    return found


def report(kind: str, asked: float, seen: Seen) -> None:
    sys.stdout.write(f"\n{json.dumps([kind, asked, *seen])}\n")


def report_actor(kind: str, asked: float, actor: Any, look: Any = see) -> None:
    report(kind, asked, ray.get(actor.__ray_call__.remote(look)))


def report_tasks() -> None:
    """The processes are used again: for those without GPUs and for those with, Ray has processes of their own."""
    task: Any = ray.remote(num_cpus=0, max_calls=0)(see)
    for asked in (*ASKED, *ASKED):
        report("task", asked, ray.get(task.options(num_gpus=asked).remote()))


def report_actors() -> None:
    for asked in ASKED:
        actor: Any = ray.remote(num_cpus=0, num_gpus=asked)(type("Plain", (), {})).remote()
        report_actor("actor", asked, actor)
        report_actor("task of an actor", 0, actor, see_below)
        ray.kill(actor)


def write(file: str, go: str) -> None:
    """What the process sees, which it retains until `go` is there."""
    Path(file).write_text(json.dumps(see()))
    wait_for(lambda: Path(go).exists(), STATE_S, go)


def report_processes(folder: Path) -> None:
    """Workers and servers of asynchronous and elastic training, all at once."""
    started = {}
    for device, workers in (("cuda", 4), ("cpu", 1)):
        processes = RayProcesses(TrainSpec.parse({"device": device, "workers": workers, "sync": "diloco"}))
        for name in ["server 0", *(f"worker {index}" for index in range(workers))]:
            file = folder / f"{name} {device}"
            started[file] = processes.start(name, write, (str(file), str(folder / "go")))
    wait_for(lambda: all(file.exists() and file.read_text() for file in started), STATE_S, "all of them")
    (folder / "go").touch()
    for file, process in started.items():
        wait_for(lambda process=process: process.poll() == "", STATE_S, file.name)  # type: ignore[misc]
        kind, _, device = file.name.split()
        report(f"{kind} of replicas", int((kind, device) == ("worker", "cuda")), tuple(json.loads(file.read_text())))


def report_loop(folder: Path, *numbers: float) -> None:
    for asked in numbers:
        words = ["learner.replicas=2", f"learner.device={'auto' if asked else 'cpu'}", f"learner.num_gpus={asked or 1}"]
        spec = RLSpec(hidden=(8,)).override(words)
        setting = GatewaySetting.of_run(spec, EXPERIENCE, folder / str(asked), TOKEN, run_id=f"gpus-{asked}")
        workers = ActorLearnerWorkers(spec, setting)
        report_actor("learner", asked, workers._learner)
        report_actor("replica of a learner", asked, workers._replicas[0])
        report_actor("gateway", 0, workers._gateway)
        report_actor("weight store", 0, workers._store)
        workers.close()


def report_trainers(folder: Path) -> None:
    """Ray Train lets the workers of a host see each other's GPUs, and numbers them by the local rank."""
    from shoal.train.launch import ray_train

    ray_train._run_worker = lambda config: see()  # type: ignore[assignment,misc,return-value]
    for device, workers in (("cpu", 1), ("cuda", 1), ("cuda", 2)):
        spec = TrainSpec.parse({"device": device, "workers": workers, "parallel": {"backend": "gloo"}})
        attempt = ray_train.RayTrainAttempt(ray_train.WorkerSetup(spec, "r", folder, folder))
        wait_for(lambda attempt=attempt: attempt.poll(0.1)[1], STATE_S, "trainers")  # type: ignore[misc]
        report("trainer", workers if device == "cuda" else 0, attempt.get_outcome())  # type: ignore[arg-type]
        attempt.close()


def report_trials(folder: Path) -> None:
    from ray import tune

    from shoal.libs.sweep.ray_sweep import _get_resources
    from shoal.libs.sweep.spec import SweepSpec

    class Trial(tune.Trainable):
        def step(self) -> dict[str, Any]:
            return {"seen": see(), "done": True}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            pass

    for asked in ASKED:
        resources = _get_resources(SweepSpec(gpus_per_trial=asked))
        config = tune.RunConfig(name=f"tune-{asked}", storage_path=str(folder), verbose=0)
        found = tune.Tuner(tune.with_resources(Trial, resources), run_config=config).fit()
        report("sweep trial", asked, found[0].metrics["seen"])  # type: ignore[index]


def report_members() -> None:
    from shoal.libs.population.flow import ray_members
    from shoal.libs.population.spec import PopulationSpec

    ray_members.MemberShare = type("Share", (), {"__init__": lambda self, *words: None})  # type: ignore[misc]
    for device, asked in (("cpu", 0), ("cuda", 1)):
        members = ray_members.RayMembers(PopulationSpec.parse({"members": 2, "workers": 2, "device": device}), [{}, {}])
        for worker in members._workers:
            report_actor("population members", asked, worker)
        members.close()


def report_predictions() -> None:
    import pyarrow as pa

    from shoal.libs.batch_predict import ray_batch

    class Worker:
        def __init__(self, job: object, num_gpus: float) -> None:
            pass

        def __call__(self, rows: pa.Table) -> pa.Table:
            return pa.table({"seen": [json.dumps(see())]})

    ray_batch.PredictWorker = Worker  # type: ignore[assignment,misc]
    for asked in ASKED:
        rows = ray_batch._map(ray.data.range(1), None, 1, {"num_cpus": 0.1, "num_gpus": asked}, 1)  # type: ignore[arg-type]
        report("batch-predict", asked, tuple(json.loads(rows.take_all()[0]["seen"])))


def report_replicas() -> None:
    from ray import serve

    from shoal.serve.on_ray.deployment import prepare_ingress_on_head
    from shoal.serve.on_ray.options import deployment_options
    from shoal.serve.spec.endpoint import EndpointSpec

    prepare_ingress_on_head()
    for asked in ASKED:
        options = deployment_options(EndpointSpec(name="m", num_gpus=asked, num_cpus=0.1))
        replica: Any = serve.deployment(type("Replica", (), {"see": lambda self: see()})).options(**options)
        report("serve replica", asked, serve.run(replica.bind(), name="m").see.remote().result())
        serve.delete("m")
    serve.shutdown()


def main() -> None:
    connect()
    with tempfile.TemporaryDirectory() as folder:
        report_tasks()
        report_actors()
        report_actor("mailbox", 0, start_mailbox())
        report_processes(Path(folder))
        report_loop(Path(folder), 0, 0.5, 1)
        report_trainers(Path(folder))
        report_trials(Path(folder))
        report_members()
        report_predictions()
        report_replicas()
    disconnect()


if __name__ == "__main__":
    main()
