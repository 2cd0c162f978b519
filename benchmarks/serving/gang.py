"""A replica that is two workers beside one that is one: throughput, memory, and what a killed worker costs.

    python -m benchmarks.serving.gang [--runs N] [--quick]

Throughput: a decoder in full batches, two stages on two workers beside one process, each worker with one thread; both
take turns, ten batches each. Memory: the peak resident memory of a worker that has loaded its part of a model of 500
MB, beside a process that has loaded all of it. A killed worker: an endpoint on Ray Serve behind HAProxy, asked ten
times a second over one connection that stays; counts what is answered with a code, and what without. After it Serve's
own gang of two replicas, as it is shipped.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from safetensors.torch import save

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write
from shoal.models.decoder import Decoder
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.serve.gang.gang import Gang
from shoal.serve.gang.member import GangMember
from shoal.serve.gang.messages import Address
from shoal.serve.gang.template import GangTemplate
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

NUM_WORKERS, CONTEXT, NUM_TOKENS, BATCH = 2, 32, 256, 64
COMPUTING = {"num_tokens": NUM_TOKENS, "context": CONTEXT, "width": 256, "depth": 8}
LARGE = {"num_tokens": NUM_TOKENS, "context": CONTEXT, "width": 1024, "depth": 10}  # 505 MB
SMALL = {"num_tokens": NUM_TOKENS, "context": CONTEXT, "width": 64, "depth": 2}
RATE_HZ, CALM_S, WATCHED_S = 10.0, 3.0, 25.0
TIMEOUT_S, START_S, INFER = 30.0, 120.0, "/v2/models/small/infer"
SERVES_GANG = "Ray Serve's gang"
Sizes = dict[str, int]
Answer = tuple[float, str, float]  # when it was asked for, its status, and how long it took
Killed = tuple[float, list[Answer]]  # when a worker was killed, and all answers


class ProcessLauncher:
    """Workers as processes of this host."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def start(self, count: int, secret: bytes) -> list[Address]:
        context, pipes = multiprocessing.get_context("spawn"), []
        for _ in range(count):
            ours, theirs = context.Pipe(duplex=False)
            self.processes.append(context.Process(target=work, args=(theirs, secret), daemon=True))
            self.processes[-1].start()
            pipes.append(ours)
        return [pipe.recv() for pipe in pipes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def work(pipe: Connection, secret: bytes) -> None:
    """The process of a worker."""
    member = GangMember("127.0.0.1", secret, lambda: os._exit(0))
    pipe.send(member.address)
    member.serve()


def register(name: str, sizes: Sizes) -> ModelVersion:
    """A decoder with random weights."""
    torch.manual_seed(0)
    state = Decoder(**sizes).state_dict()
    snapshot = WeightSnapshot.from_payload(1, save({key: each.contiguous() for key, each in state.items()}))
    shape = [-1, CONTEXT]
    signature = Signature(
        inputs=[TensorSignature(name="tokens", datatype="INT64", shape=shape)],
        outputs=[TensorSignature(name="logits", datatype="FP32", shape=[*shape, NUM_TOKENS])],
    )
    factory = ModelFactory(factory="shoal.models.decoder:Decoder", kwargs=sizes)
    return Registry().register(name, snapshot, model=factory, signature=signature)


@contextmanager
def started() -> Iterator[tuple[Gang, ProcessLauncher]]:
    launcher = ProcessLauncher()
    with closing(Gang(launcher, NUM_WORKERS, "pipeline")) as gang:
        gang.start()
        yield gang, launcher


def make_predictor(version: ModelVersion, gang: Gang | None) -> Predictor:
    share = None if gang is None else partial(GangTemplate, gang=gang)
    chosen = ModelOptions(max_batch_size=BATCH, warm_up=False)
    return Predictor(version.manifest.model, version.manifest.signature, chosen, share=share)


def measure_throughput(runs: int, num_batches: int) -> list[Row]:
    """Rows a second; and the processor time of the busiest stage, which other load of the machine changes less."""
    version = register("computing", COMPUTING)
    torch.set_num_threads(1)
    batch = [{"tokens": np.random.default_rng(0).integers(0, NUM_TOKENS, (BATCH, CONTEXT))}]
    found: dict[str, list[float]] = {"ours": [], "one": []}
    computed: dict[str, list[float]] = {"ours": [], "one": []}
    with started() as (gang, launcher), ExitStack() as pools:
        threads = {"ours": gang.batches_in_flight, "one": 1}  # of the batcher
        opened = {
            side: pools.enter_context(ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)))
            for side, count in threads.items()
        }
        sides = {
            "ours": make_predictor(version, gang).load(version.weight_file()),
            "one": make_predictor(version, None).load(version.snapshot()),
        }
        workers = {"ours": [psutil.Process(each.pid) for each in launcher.processes], "one": [psutil.Process()]}
        for run in range(runs + 1):
            for side, model in sides.items():
                pool = opened[side]
                before_s = [sum(each.cpu_times()[:2]) for each in workers[side]]
                began_s = time.perf_counter()
                list(pool.map(lambda _, model=model: model.predict_batch(batch), range(num_batches)))  # type: ignore[misc]
                taken_s = time.perf_counter() - began_s
                after_s = [sum(each.cpu_times()[:2]) for each in workers[side]]
                if run:  # the first warms up
                    found[side].append(BATCH * num_batches / taken_s)
                    busiest_s = max(after - before for before, after in zip(before_s, after_s, strict=True))
                    computed[side].append(1e3 * busiest_s / num_batches)
    note = f"a decoder of {sum(each.numel() for each in Decoder(**COMPUTING).parameters()):,} parameters, {BATCH} rows"
    note += f"; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    print(found, computed, note, flush=True)
    name, of = "throughput of two stages", "processor time of a batch, of the busiest worker"
    return [
        compare(name, "rows/s", "higher", found["ours"], found["one"], "one worker", 1.6, "ratio", note),
        compare(
            of,
            "ms",
            "lower",
            computed["ours"],
            computed["one"],
            "one worker",
            note="beside it, the ratio of throughputs needs two processors",
        ),
    ]


def load_full(pipe: Connection, version: ModelVersion) -> None:
    """The process of the one worker."""
    model = make_predictor(version, None).load(version.snapshot())
    pipe.send(read_peak_mb(os.getpid()))
    assert model.version


def read_peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1e3


def measure_memory() -> Row:
    """Of the larger worker, and of one that loads all; once, since memory does not vary."""
    version = register("large", LARGE)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=load_full, args=(theirs, version), daemon=True)
    process.start()
    peak_mb = ours.recv()
    process.join()
    with started() as (gang, launcher):
        model = make_predictor(version, gang).load(version.weight_file())
        model.predict_batch([{"tokens": np.zeros((4, CONTEXT), np.int64)}])
        own_mb = max(read_peak_mb(each.pid) for each in launcher.processes)
    note = f"weights of {version.manifest.size_bytes / 1e6:.0f} MB"
    print(own_mb, peak_mb, note, flush=True)
    return compare("peak memory", "MB", "lower", [own_mb], [peak_mb], "one worker", 0.6, "ratio", note)


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> str:
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return type(error).__name__
    return str(response.status)


def serve_and_kill(pipe: Connection) -> None:
    """The process of the endpoint's driver: sends when the worker was killed, and each answer with its time."""
    from shoal.cluster.embedded_cluster import start_cluster
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_source import model_from_ref

    register("small", SMALL)
    tokens = {"name": "tokens", "shape": [1, CONTEXT], "datatype": "INT64", "data": [1] * CONTEXT}
    body = json.dumps({"inputs": [tokens]}).encode()
    spec = EndpointSpec(name="gang", num_workers=NUM_WORKERS, num_cpus=0.5)
    with start_cluster(num_cpus=4) as cluster, ExitStack() as closing_all:
        os.environ.update(cluster.environment)
        import ray

        ray.init(log_to_driver=False)
        closing_all.callback(ray.shutdown)
        endpoint = closing_all.enter_context(closing(deploy(spec, [model_from_ref("small@champion")])))
        pipe.send(ask_and_kill(urlsplit(endpoint.url).netloc, INFER, body, find_worker(cluster.pids())))


def ask_and_kill(netloc: str, path: str, body: bytes, victim: int) -> Killed:
    answers, began_s, killed_s = list[Answer](), time.monotonic(), 0.0
    with closing(http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)) as connection:
        for number in range(int(RATE_HZ * WATCHED_S)):
            time.sleep(max(0.0, began_s + number / RATE_HZ - time.monotonic()))
            if not killed_s and number / RATE_HZ > CALM_S:
                os.kill(victim, signal.SIGKILL)
                killed_s = time.monotonic()
            asked_s = time.monotonic()
            status = ask(connection, path, body)
            answers.append((asked_s, status, time.monotonic() - asked_s))
    return killed_s, answers


def kill_rank_of_serve(folder: Path) -> Killed:
    """The same of Ray Serve's own gang."""
    words = [OUR_PYTHON, "-m", "benchmarks.peers.ray_serve_gang"]
    with ExitStack() as closing_all:
        short = closing_all.enter_context(
            tempfile.TemporaryDirectory(prefix="sg-", dir="/tmp")
        )  # for its sockets' paths
        child = closing_all.enter_context(Child([*words, short], folder, ray_folder=Path(short)))
        netloc = str(child.answer(START_S)["netloc"])
        with closing(http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)) as connection:
            assert ask(connection, "/", b"") == "200"
        return ask_and_kill(netloc, "/", b"", child.processes("ray::ServeReplica")[-1].pid)


def measure_kill(folder: Path) -> list[Row]:
    """One worker of two is killed while the endpoint is asked."""
    # Read when ray is imported: 127.0.0.1 stays 127.0.0.1, and a cluster has a token.
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token")
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=serve_and_kill, args=(theirs,))
    process.start()
    theirs.close()
    own = ours.recv()
    process.join()
    peer = kill_rank_of_serve(folder)
    counts = [Counter(status for _, status, _ in answers) for _, answers in (own, peer)]
    until_s = [
        max([at_s - killed_s for at_s, status, _ in answers if status != "200"], default=0.0)
        for killed_s, answers in (own, peer)
    ]
    longest_s = [max(taken_s for *_, taken_s in answers) for _, answers in (own, peer)]
    broken = [sum(number for status, number in each.items() if not status.isdigit()) for each in counts]
    note = f"requests at {RATE_HZ:g}/s for {WATCHED_S:g} s: ours {dict(counts[0])}, 503 with Retry-After until all are "
    note += f"replaced; {SERVES_GANG} {dict(counts[1])}; load of the machine {os.getloadavg()[0]:.1f}"
    print(note, flush=True)
    name = "a killed worker"
    return [
        compare(f"{name}: codes until", "s", "lower", until_s[:1], until_s[1:], SERVES_GANG, 1.0, "value", note),
        compare(f"{name}: longest answer", "s", "lower", longest_s[:1], longest_s[1:], SERVES_GANG),
        compare(f"{name}: broken connections", "", "lower", broken[:1], broken[1:], SERVES_GANG, 0.0, "value"),
    ]


def find_worker(pids: set[int]) -> int:
    """The second worker's process."""
    return max(pid for pid in pids if psutil.pid_exists(pid) and "GangWorker" in psutil.Process(pid).name())


def main() -> None:
    chosen = options(__doc__, runs=5)
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder)
        rows = [
            *measure_throughput(chosen.runs, 3 if chosen.quick else 10),
            measure_memory(),
            *measure_kill(folder),
        ]
    write("gang", rows, chosen.results)


if __name__ == "__main__":
    main()
