"""A cluster whose head is killed, with everything on it, and started again a minute later: what it finds again.

    python -m benchmarks.head_killed [--runs N] [--quick]

The hosts are network namespaces of this machine, started by the commands of cluster.yaml: a head that computes nothing,
a worker and a client. There are an endpoint with an ingress on each node, a training run with its driver on the head,
one with its driver on the worker, and a third that waits for places. All processes of the head are killed at once; the
client asks the worker's ingress ten times a second, from before that until the head is back. The run whose driver died
is then resumed by the command that `shoal runs RUN` prints. With --quick the head is away for ten seconds.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.children import ROOT, scratch
from benchmarks.result import Row, compare, options, write
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot

sys.path.extend([str(ROOT / "tests"), str(ROOT / "tests/hosts")])
from network import Host, network, start_ray

from certificates import Authority
from waiting import wait_for

DASHBOARD = "http://127.0.0.1:8265"
AWAY_S, QUICK_AWAY_S = 60.0, 10.0
BACK_S, RATE, LIMIT_S = 45.0, 10, 120.0
CHECKPOINT_STEPS = 100
TRAINING = ["task=line.py:Line", "batch_size=16", "stop.epochs=1000000", "device=cpu", "log_every_steps=1"]
TRAINING += [f"checkpoint.every_steps={CHECKPOINT_STEPS}"]


@dataclass
class Cluster:
    """url: of the endpoint, at the worker"""

    head: Host
    worker: Host
    client: Host
    shared: Path
    ca: Path
    url: str = ""

    def shoal(self, *words: str) -> str:
        return self.head.run("env", f"SHOAL_CA={self.ca}", "shoal", *words)

    def read_run(self, run_id: str) -> dict[str, object]:
        """Its status and incarnation, the newest step that was recorded, and its events."""
        show = "import json, sys, shoal.runs; run = shoal.runs.load(sys.argv[1]); events = run.events();"
        show += "print(json.dumps({'status': run.status, 'incarnation': run.incarnation,"
        show += " 'step': int(max(run.metrics().index, default=-1)),"
        show += " 'events': list(zip(events['kind'], events['details'], strict=True))}, default=str))"
        found: dict[str, object] = json.loads(self.head.run(sys.executable, "-c", show, run_id))
        return found

    def submit(self, *words: str) -> str:
        """Start a job whose driver is on the worker; its run, once it has a record."""
        before = self.list_runs()
        typed = ["ray", "job", "submit", "--address", DASHBOARD, "--no-wait", "--entrypoint-num-cpus", "0.5"]
        typed += ["--working-dir", ".", "--", "python", "jobs/train.py", *words]
        self.head.run("bash", "-c", f". ~/shoal-host.env; {shlex.join(typed)}")
        wait_for(lambda: self.list_runs() - before, LIMIT_S, "a run")
        (run,) = self.list_runs() - before
        return run

    def list_runs(self) -> set[str]:
        return {str(run["id"]) for run in json.loads(self.shoal("runs", "--json"))}

    def is_ready(self) -> bool:
        """Whether the head's ingress answers, and each replica is ready."""
        with suppress(AssertionError):
            status = json.loads(self.shoal("serve", "status", "--json"))
            return sum(each["ready"] for each in status["replicas"]) == 2
        return False


def deploy(cluster: Cluster, authority: Authority) -> None:
    x, y = ([TensorSignature(name=name, datatype="FP32", shape=[-1, size])] for name, size in (("x", 4), ("y", 2)))
    linear = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 4, "out_features": 2})
    tensors = {"weight": np.zeros((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    Registry(cluster.shared / "registry").register(
        "linear", WeightSnapshot.of(1, tensors), model=linear, signature=Signature(inputs=x, outputs=y)
    )
    files = authority.sign(names=(cluster.head.address, cluster.worker.address))
    words = ["--replicas", "2", "endpoint.num_cpus=0.5", "endpoint.lifetime=detached", "endpoint.ingress=every_node"]
    words += ["endpoint.host=0.0.0.0", f"endpoint.tls.certificate={files.certificate}"]
    words += [f"endpoint.tls.key={files.key}", "--address", DASHBOARD, "--timeout-s", f"{LIMIT_S:g}"]
    port = re.search(r"is ready at https://[^:]+:(\d+)", cluster.shoal("serve", "deploy", "linear", *words))
    assert port
    cluster.url = f"https://{cluster.worker.address}:{port[1]}"


def has_steps(cluster: Cluster, run_id: str, number: int) -> Callable[[], bool]:
    return lambda: int(str(cluster.read_run(run_id)["step"])) >= number


def lose_head(folder: Path, away_s: float) -> dict[str, float]:
    """Failed and all requests, recorded steps that were lost, the share of what was found again, and seconds."""
    with network(folder) as made, ExitStack() as stack:
        head, worker, client = map(made.add, ("head", "worker", "client"))
        authority = Authority(folder / "shared")
        cluster = Cluster(head, worker, client, folder / "shared", Path(str(authority.ca)))
        shutil.copytree(ROOT / "jobs", head.project / "jobs")
        shutil.copy(ROOT / "tests/hosts/line.py", head.project)
        start_ray(head, head, num_cpus=0)
        start_ray(worker, head, num_cpus=6)
        deploy(cluster, authority)
        typing = ["shoal", "run", "train", *TRAINING, "name=of-head", "--address", DASHBOARD]
        of_head = stack.enter_context(head.start(typing)).wait_for_line(r"^run ([\w-]+):")[1]
        of_worker = cluster.submit(*TRAINING, "name=of-worker")
        waiting = cluster.submit(*TRAINING, "name=waiting", "workers=4", "wait=1h")
        for run in (of_head, of_worker):
            wait_for(has_steps(cluster, run, 2 * CHECKPOINT_STEPS), LIMIT_S, "two checkpoints")
        asker = [sys.executable, str(ROOT / "tests/hosts/ask_steadily.py"), cluster.url]
        token = (cluster.shared / "token").read_text().strip()
        asker += [token, "linear", str(RATE), f"{away_s + BACK_S:g}"]
        asking = stack.enter_context(client.start(asker, {"SHOAL_CA": str(cluster.ca)}))
        time.sleep(2.0)
        before = {run: cluster.read_run(run) for run in (of_head, of_worker, waiting)}
        killed_s = time.monotonic()
        head.kill()
        time.sleep(away_s)
        start_ray(head, head, num_cpus=0)
        wait_for(cluster.is_ready, LIMIT_S, "the endpoint at the head")
        back_s = time.monotonic() - killed_s - away_s
        assert asking.wait() == 0
        answers = Counter[str](json.loads(asking.said.splitlines()[-1]))
        after = {run: cluster.read_run(run) for run in (of_head, of_worker, waiting)}
        command = re.search(rf"shoal run .*resume={of_head}.*", cluster.shoal("runs", of_head))
        assert command
        stack.enter_context(head.start(shlex.split(command[0])))
        restored = []

        def is_resumed() -> bool:
            restored[:] = [found for kind, found in cluster.read_run(of_head)["events"] if kind == "restored"]  # type: ignore[attr-defined]
            return bool(restored)

        wait_for(is_resumed, LIMIT_S, "the run, resumed")
        newest = int(str(after[of_head]["step"]))
        found = [
            after[of_head]["status"] == "lost" and bool(restored),
            after[of_worker]["status"] == "running" and after[of_worker]["incarnation"] == 1,
            int(str(after[of_worker]["step"])) > int(str(before[of_worker]["step"])),
            after[waiting]["status"] == "running" and after[waiting]["step"] == -1,
            waiting in cluster.shoal("status", "--address", DASHBOARD),
            cluster.is_ready(),
        ]
        print(answers, found, newest, restored, flush=True)
        return {
            "failed": float(sum(answers.values()) - answers["200"]),
            "asked": float(sum(answers.values())),
            "lost": max(0.0, float(newest - restored[-1]["step"])),
            "found": sum(found) / len(found),
            "back": back_s,
        }


def main() -> None:
    chosen = options(__doc__, runs=1)
    away_s = QUICK_AWAY_S if chosen.quick else AWAY_S
    results = []
    for _ in range(chosen.runs):
        with scratch() as folder:
            results.append(lose_head(folder, away_s))
    asked = f"of {results[0]['asked']:.0f} at the worker's ingress; the head was away for {away_s:g} s"
    lost = f"of the run whose driver was on the head; a checkpoint every {CHECKPOINT_STEPS}"
    all_found = (
        "the run of the head's driver, lost and resumed; the worker's, which went on; the queued one; the endpoint"
    )

    def row(name: str, unit: str, key: str, bar: float | None, note: str) -> Row:
        better = "higher" if key == "found" else "lower"
        kind = "value" if bar is not None else None
        return compare(name, unit, better, [each[key] for each in results], bar=bar, bar_kind=kind, note=note)  # type: ignore[arg-type]

    rows = [
        row("a head killed: failed requests", "", "failed", 0.0, asked),
        row("a head killed: steps lost", "steps", "lost", float(CHECKPOINT_STEPS), lost),
        row("a head killed: what is found again, of what there was", "", "found", 1.0, all_found),
        row("a head killed: from its start until its ingress answers", "s", "back", None, "Ray's start among it"),
    ]
    write("head_killed", rows, chosen.results)


if __name__ == "__main__":
    main()
