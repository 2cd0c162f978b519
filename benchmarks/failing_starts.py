"""What workers that fail at their start leave on a cluster, and how often they are tried again.

    python -m benchmarks.failing_starts [--runs N] [--minutes N] [--quick]

A cluster with two GPUs in which only Ray believes. Each run has two workers, which fail before their first step: they
import a module that is not there, form a group by NCCL without a GPU, allocate more than there is, bind a port that is
taken, or read a bucket that is away. Then one run of each kind of `sync` that starts its workers without Ray Train. A
run that ends otherwise than by its own error fails the benchmark. The peer is Ray Train's own TorchTrainer, once, with
the error of NCCL: its second start would wait for the GPUs of the first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

import psutil

from benchmarks.children import ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.cluster.embedded_cluster import EmbeddedCluster, start_cluster
from shoal.cluster.job_main import join_cluster
from shoal.errors import ShoalError
from shoal.train.launch.validate import validate_task
from shoal.train.spec import TrainSpec

KINDS = {
    "import error": "ModuleNotFoundError",
    "NCCL": "NCCL",
    "out of memory": "memory",
    "port taken": "Address already in use",
    "bucket away": "no-such-bucket",
}
OTHERS: tuple[dict[str, object], ...] = (
    {"sync": {"kind": "parameter_server"}},
    {"sync": {"kind": "local_sgd"}},
    {"min_workers": 1},
)
SETTLE_S = 30.0  # for processes that have been told to end
AWAY = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
TASK = str(ROOT / "benchmarks/ours/failing_start_task.py") + ":FailingStart"


def make_spec(kind: str, port: int, **fields: object) -> TrainSpec:
    device = "cuda" if kind == "NCCL" else "cpu"
    args = {"kind": kind, "driver": os.getpid(), "port": port}
    base = {"task": TASK, "args": args, "workers": 2, "device": device, "batch_size": 16, "stop": {"steps": 2}}
    return TrainSpec.parse({**base, **fields})


def start(spec: TrainSpec, expected: str) -> None:
    """One run, which must end by its own error."""
    from shoal.flows.training import run_training

    checked = validate_task(spec.update({"device": "cpu"}))
    try:
        run_training(spec, "train", checked)
    except ShoalError as error:
        if expected not in str(error):
            sys.exit(f"{spec.args['kind']} ended by another error: {error}")
        return
    sys.exit(f"{spec.args['kind']}: the run has ended without an error")


def count_groups() -> tuple[int, int]:
    """Placement groups that were made, and those that are left."""
    from ray.util.placement_group import placement_group_table

    states = [each["state"] for each in placement_group_table().values()]
    return len(states), len(states) - states.count("REMOVED")


def count_left(cluster: EmbeddedCluster) -> tuple[int, int]:
    """Processes of the cluster, and sockets on which they listen."""
    pids = set(cluster.pids())
    ports = [each for each in psutil.net_connections("tcp") if each.pid in pids and each.status == psutil.CONN_LISTEN]
    return len(pids), len(ports)


def settle(cluster: EmbeddedCluster, before: tuple[int, int]) -> tuple[int, int]:
    """What is there beyond `before` once it changes no more."""
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s and any(
        now > was for now, was in zip(count_left(cluster), before, strict=True)
    ):
        time.sleep(0.5)
    processes, ports = count_left(cluster)
    return max(0, processes - before[0]), max(0, ports - before[1])


def start_peer() -> int:
    """The placement groups that one failing start of Ray Train leaves."""
    import ray.train
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    before = count_groups()[1]
    scaling = ScalingConfig(num_workers=2, use_gpu=True)
    trainer = TorchTrainer(lambda: None, scaling_config=scaling, torch_config=TorchConfig(backend="nccl"))
    with contextlib.suppress(ray.train.TrainingFailedError):
        trainer.fit()
    return count_groups()[1] - before


def main() -> None:
    chosen = options(__doc__, runs=10, minutes=15.0)
    with scratch() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        os.chdir(folder)
        environment = {**AWAY, "SHOAL_STORE_TIMEOUT_S": "0"}
        with start_cluster(num_cpus=4, num_gpus=2, environment=environment) as cluster, join_cluster(cluster):
            port = taken.getsockname()[1]
            start(make_spec("import error", port), KINDS["import error"])  # what the first run starts stays for others
            time.sleep(SETTLE_S / 3)
            before, (made_before, _) = count_left(cluster), count_groups()
            began_s, num_starts = time.monotonic(), 0
            while num_starts < chosen.runs * len(KINDS) and time.monotonic() - began_s < 60 * chosen.minutes:
                for kind, expected in KINDS.items():
                    start(make_spec(kind, port), expected)
                num_starts += len(KINDS)
            seconds = (time.monotonic() - began_s) / num_starts
            made, left = count_groups()
            for fields in OTHERS:
                start(make_spec("import error", port, **fields), KINDS["import error"])
            processes, ports = settle(cluster, before)
            theirs = start_peer()
    which = f"{num_starts} failing starts of Ray Train's workers"
    every = f"{num_starts + len(OTHERS)} failing starts, {len(OTHERS)} of them without Ray Train"
    peer = "Ray Train's TorchTrainer, after one"
    write(
        "failing_starts",
        [
            compare(f"{which}: placement groups left", "", "lower", [left], [theirs], peer, 0, "value"),
            compare(f"{which}: tried again", "", "lower", [made - made_before - num_starts], bar=0, bar_kind="value"),
            compare(f"{every}: processes left", "", "lower", [processes], bar=0, bar_kind="value"),
            compare(f"{every}: listening sockets left", "", "lower", [ports], bar=0, bar_kind="value"),
            compare("a failing start, until the run has ended", "s", "lower", [seconds]),
        ],
        chosen.results,
    )


if __name__ == "__main__":
    main()
