"""A replica that is two workers beside one that is one: throughput, memory, and what a killed worker costs.

    python -m benchmarks.serving.gang [--runs N] [--quick]

Throughput: a decoder in full batches, two stages on two workers beside one process, each worker with one thread; both
take turns, ten batches each. Memory: the peak resident memory of a worker that has loaded its part of a model of 500
MB, beside a process that has loaded all of it. A killed worker: an endpoint on Ray Serve behind HAProxy, asked fifty
times a second over one connection that stays; twice as many workers as runs are killed, one after the other. What is
answered with a code is timed, and what without is counted. Beside it the endpoint of an earlier commit (`--before`),
and Serve's own gang of two replicas, as it is shipped. `--only` measures a part. The replacement of
workers alone is timed without Ray, too, beside a gang without spare workers.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from safetensors.torch import save

from benchmarks.before import checkout
from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.talk import say
from shoal.channel.connection import ChannelAddress
from shoal.libs.gang.gang import Gang
from shoal.libs.gang.member import GangMember
from shoal.libs.gang.team import GangLost
from shoal.models.decoder import Decoder
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

NUM_WORKERS, CONTEXT, NUM_TOKENS, BATCH = 2, 32, 256, 64
COMPUTING = {"num_tokens": NUM_TOKENS, "context": CONTEXT, "width": 256, "depth": 8}
LARGE = {"num_tokens": NUM_TOKENS, "context": CONTEXT, "width": 1024, "depth": 10}  # 505 MB
SMALL = {"num_tokens": NUM_TOKENS, "context": CONTEXT, "width": 64, "depth": 2}
RATE_HZ, CALM_S, WATCHED_S = 50.0, 3.0, 25.0
BEFORE = "e3cf4d1b"  # the last one without spare workers
TIMEOUT_S, START_S, INFER = 30.0, 120.0, "/v2/models/small/infer"
SERVES_GANG = "Ray Serve's gang"
Sizes = dict[str, int]


class ProcessLauncher:
    """Workers as processes of this host."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def start(self, count: int) -> list[ChannelAddress]:
        context, pipes = multiprocessing.get_context("spawn"), []
        for _ in range(count):
            ours, theirs = context.Pipe(duplex=False)
            self.processes.append(context.Process(target=work, args=(theirs,), daemon=True))
            self.processes[-1].start()
            pipes.append(ours)
        return [pipe.recv() for pipe in pipes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes.clear()


def work(pipe: Connection) -> None:
    """The process of a worker."""
    member = GangMember("127.0.0.1", lambda: os._exit(0))
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
    share = None if gang is None else gang.open_template
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


def measure_replacement(kills: int) -> list[Row]:
    """Workers as processes of this host, without Ray: from a kill to the first batch that is computed again."""
    version, found = register("small", SMALL), {True: list[float](), False: list[float]()}
    batch = [{"tokens": np.zeros((1, CONTEXT), np.int64)}]
    for has_spares in found:
        launcher, spares = ProcessLauncher(), ProcessLauncher()
        with closing(Gang(launcher, NUM_WORKERS, "pipeline", spares if has_spares else None)) as gang:
            gang.start()
            model = make_predictor(version, gang).load(version.weight_file())
            for _ in range(kills):
                while has_spares and gang._waiting is None:
                    time.sleep(0.05)
                model.predict_batch(batch)
                os.kill(gang._launcher.processes[-1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
                killed_s = time.perf_counter()
                with suppress(GangLost):
                    while True:
                        model.predict_batch(batch)
                while True:
                    with suppress(GangLost):
                        model.predict_batch(batch)
                        break
                    time.sleep(0.005)
                found[has_spares].append(time.perf_counter() - killed_s)
    note = f"{kills} kills each, workers as processes without Ray; load of the machine {os.getloadavg()[0]:.1f}"
    print(found, note, flush=True)
    name = "a killed worker: no answer for"
    return [compare(name, "s", "lower", found[True], found[False], "without spare workers", 1.0, "value", note)]


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


def serve_and_kill(kills: int) -> None:
    """The process of the endpoint's driver: says when each worker was killed, and each answer with its time."""
    # Read when ray is imported: 127.0.0.1 stays 127.0.0.1, and a cluster has a token.
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token")
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
        netloc = urlsplit(endpoint.url).netloc
        found = ask_and_kill(netloc, INFER, body, lambda: find_worker(cluster.pids()), kills)
        spare = [psutil.Process(pid).memory_full_info().uss for pid in list_processes(cluster.pids())]
        say(outages=found.outages_s, statuses=found.statuses, longest_s=found.longest_s, uss=sorted(spare))


@dataclass
class Killed:
    """outages_s: from each kill to the last answer that was none of the model's"""

    outages_s: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0

    @property
    def num_broken(self) -> int:
        return sum(number for status, number in self.statuses.items() if not status.isdigit())


def ask_and_kill(netloc: str, path: str, body: bytes, find_victim: Callable[[], int], kills: int) -> Killed:
    """Kill when all was well for `CALM_S`, and end so."""
    result, statuses = Killed(), Counter[str]()
    with closing(http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)) as connection:
        for number in range(kills + 1):
            killed_s = bad_s = well_since_s = time.monotonic()
            while time.monotonic() - well_since_s < CALM_S:
                asked_s = time.monotonic()
                status = ask(connection, path, body)
                statuses[status] += 1
                result.longest_s = max(result.longest_s, time.monotonic() - asked_s)
                if status != "200":
                    bad_s = well_since_s = time.monotonic()
                time.sleep(max(0.0, asked_s + 1 / RATE_HZ - time.monotonic()))
            if number:
                result.outages_s.append(bad_s - killed_s)
            if number < kills:
                os.kill(find_victim(), signal.SIGKILL)
    result.statuses = dict(statuses)
    return result


def kill_rank_of_serve(folder: Path, kills: int) -> Killed:
    """The same of Ray Serve's own gang."""
    words = [OUR_PYTHON, "-m", "benchmarks.peers.ray_serve_gang"]
    with ExitStack() as closing_all:
        short = closing_all.enter_context(
            tempfile.TemporaryDirectory(prefix="sg-", dir="/tmp")
        )  # for its sockets' paths
        child = closing_all.enter_context(Child([*words, short], folder, ray_folder=Path(short)))
        netloc = str(child.answer(START_S)["netloc"])
        return ask_and_kill(netloc, "/", b"", lambda: child.processes("ray::ServeReplica")[-1].pid, kills)


def kill_worker_of(package: Path, folder: Path, kills: int) -> tuple[Killed, list[int]]:
    """Of the endpoint of this package; and the memory that each of its workers has alone, in bytes."""
    words = [OUR_PYTHON, "-m", "benchmarks.serving.gang", "--only", "driver", "--runs", str(kills // 2)]
    env = {"PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]), "SHOAL_HOME": str(folder / package.parent.name)}
    with Child(words, folder, env, goodbye_s=20.0) as child:
        said = child.answer(START_S + kills * WATCHED_S)
    return Killed(said["outages"], said["statuses"], said["longest_s"]), said["uss"]


def measure_kills(folder: Path, kills: int, before: str) -> list[Row]:
    """One worker of two is killed while the endpoint is asked, one after the other."""
    own, own_bytes = kill_worker_of(ROOT / "platform", folder, kills)
    print("ours", own, flush=True)
    with checkout(before, folder) as package:
        earlier, _ = kill_worker_of(package, folder, kills)
    print("before", earlier, flush=True)
    peer = kill_rank_of_serve(folder, kills // 2)
    note = f"{kills} kills, {kills // 2} of the peer; requests at {RATE_HZ:g}/s: ours {own.statuses}, "
    note += f"before {earlier.statuses}, {SERVES_GANG} {peer.statuses}; a spare worker has "
    note += f"{min(own_bytes) / 1e6:.0f} MB of its own; load of the machine {os.getloadavg()[0]:.1f}"
    print(own.outages_s, earlier.outages_s, peer.outages_s, note, flush=True)
    name, rows = "a killed worker", list[Row]()
    for other, word in ((earlier, f"before ({before})"), (peer, SERVES_GANG)):
        longest, broken = [own.longest_s], [own.num_broken]
        rows += [
            compare(f"{name}: codes for", "s", "lower", own.outages_s, other.outages_s, word, 1.0, "value", note),
            compare(f"{name}: longest answer", "s", "lower", longest, [other.longest_s], word),
            compare(f"{name}: broken connections", "", "lower", broken, [other.num_broken], word, 0.0, "value"),
        ]
    return rows


def list_processes(pids: set[int]) -> list[int]:
    """The workers and the spare ones."""
    return [pid for pid in pids if psutil.pid_exists(pid) and "GangWorker" in psutil.Process(pid).name()]


def find_worker(pids: set[int]) -> int:
    """A worker's process, which another one is connected with; a spare one's is not."""
    ends = {
        pid: {(each.laddr, each.raddr) for each in psutil.Process(pid).net_connections() if each.raddr}
        for pid in list_processes(pids)
    }
    return max(
        pid
        for pid, own in ends.items()
        if any((there, here) in other for here, there in own for one, other in ends.items() if one != pid)
    )


def main() -> None:
    parts = ("throughput", "memory", "replacement", "kills")
    chosen = options(__doc__, runs=5, only=(*parts, "driver"), before=BEFORE)
    if "driver" in chosen.only and len(chosen.only) == 1:
        return serve_and_kill(2 * chosen.runs)
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder)
        rows = []
        if "throughput" in chosen.only:
            rows += measure_throughput(chosen.runs, 3 if chosen.quick else 10)
        if "memory" in chosen.only:
            rows.append(measure_memory())
        if "replacement" in chosen.only:
            rows += measure_replacement(2 * chosen.runs)
        if "kills" in chosen.only:
            rows += measure_kills(folder, 2 * chosen.runs, chosen.before)
    write("gang" if set(parts) <= {*chosen.only} else f"gang_{chosen.only[0]}", rows, chosen.results)


if __name__ == "__main__":
    main()
