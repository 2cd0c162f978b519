"""Rehearse on this machine how nodes come and go: an endpoint and a training run on a cluster that grows.

    python tests/rehearse.py [short]

Prints a timeline. The nodes are processes of this machine (see growing_cluster.py); Ray's autoscaler, Serve and Ray
Train are the real ones. `short` leaves out the load and the idle nodes, as the suite does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# Ray reads these when it is imported.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "SHOAL_LOG_MONITOR": "0"}
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from growing_cluster import growing_cluster
from waiting import wait_for

import shoal.runs
from shoal.client import Client
from shoal.errors import ConfigError, PlanError
from shoal.home import load_access_token
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.runs.report.event_messages import describe_wait
from shoal.weights import WeightSnapshot

LIMIT_S = 400.0
NODE_CPUS = 2
TASK = Path(__file__).parent / "train_task.py"
BEGAN_S = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s  {text}", flush=True)


def count_nodes() -> int:
    """Without the head."""
    import ray

    return sum(node["Alive"] for node in ray.nodes()) - 1


@contextmanager
def told_of_nodes() -> Iterator[None]:
    """Tell whenever their number changes."""
    over, seen = threading.Event(), 0

    def watch() -> None:
        nonlocal seen
        while not over.wait(0.5):
            if (now := count_nodes()) != seen:
                say(f"nodes: {seen} -> {now}")
                seen = now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def register_model() -> None:
    x, y = ([TensorSignature(name=name, datatype="FP32", shape=[-1, size])] for name, size in (("x", 4), ("y", 2)))
    linear = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 4, "out_features": 2})
    tensors = {"weight": np.zeros((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    Registry().register("linear", WeightSnapshot.of(1, tensors), model=linear, signature=Signature(inputs=x, outputs=y))


def follow_wait() -> Callable[[], None]:
    """Tells what the newest run waits for, when that changes."""
    seen = ""

    def tell() -> None:
        nonlocal seen
        for run in shoal.runs.list_runs(1):
            if (now := describe_wait(run.last_events())) != seen:
                seen = now
                say(f"`shoal status`: {now or 'waits no longer'}")

    return tell


@contextmanager
def told_of_waits() -> Iterator[None]:
    over, tell = threading.Event(), follow_wait()

    def watch() -> None:
        while not over.wait(0.25):
            tell()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell()


def refuse_what_never_fits() -> None:
    from shoal.flows.serving import record_endpoint
    from shoal.flows.serving_spec import ServingSpec
    from shoal.flows.training import train_on_cluster

    large = ServingSpec(models=["linear@1"]).override([f"endpoint.num_cpus={NODE_CPUS + 1}"])
    try:
        with record_endpoint(large):
            raise AssertionError("it was accepted")
    except ConfigError as error:
        say(f"refused at once: {error}")
    try:
        train_on_cluster(make_training(workers=7), "rehearsal")
    except PlanError as error:
        say(f"refused at once: {error}")
    else:
        raise AssertionError("it was accepted")


def make_training(workers: int):  # type: ignore[no-untyped-def]
    from shoal.train.spec import TrainSpec

    base = {"task": f"{TASK}:Toy", "batch_size": 28, "stop": {"steps": 4}, "parallel": "ddp", "device": "cpu"}
    return TrainSpec.parse({**base, "workers": workers, "wait": "10m"})


def serve_replicas(is_short: bool) -> None:
    from shoal.flows.serving import record_endpoint
    from shoal.flows.serving_spec import ServingSpec

    number = "endpoint.num_replicas=2" if is_short else "endpoint.max_replicas=3"
    words = [f"endpoint.num_cpus={NODE_CPUS}", number, "endpoint.wait=10m", "endpoint.model.max_batch_size=1"]
    with told_of_waits(), record_endpoint(ServingSpec(models=["linear@1"]).override(words)) as endpoint:
        status = endpoint.status()
        say(f"the endpoint answers with {len(status['replicas'])} of {status['num_replicas']} replicas")
        with Client(endpoint.url, token=load_access_token()) as client:
            client.infer("linear", {"x": np.ones((1, 4), np.float32)})
            if is_short:
                wait_for(lambda: len(endpoint.status()["replicas"]) == 2, LIMIT_S, "the second replica")
            else:
                load_until(endpoint, 3)
                say("the load is over")
                wait_for(lambda: len(endpoint.status()["replicas"]) == 1, LIMIT_S, "one replica again")
        say(f"replicas: {len(endpoint.status()['replicas'])}")
    say("the endpoint is closed")


def load_until(endpoint, num_replicas: int) -> None:  # type: ignore[no-untyped-def]
    """Ask from many threads until so many replicas answer."""
    over = threading.Event()

    def ask() -> None:
        with Client(endpoint.url, token=load_access_token()) as client:
            while not over.is_set():
                client.infer("linear", {"x": np.ones((1, 4), np.float32)})

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(endpoint.status()["replicas"]) >= num_replicas, LIMIT_S, f"{num_replicas} replicas")
        say(f"{num_replicas} replicas answer")
    finally:
        over.set()
        for thread in threads:
            thread.join()


def train_on_new_nodes() -> None:
    from shoal.flows.training import train_on_cluster

    with told_of_waits():
        result = train_on_cluster(make_training(2 * NODE_CPUS), "rehearsal", registers=False)
    say(f"trained on {count_nodes()} nodes: {result.detail}")


def rehearse(is_short: bool) -> None:
    with ExitStack() as stack:
        os.environ["SHOAL_HOME"] = stack.enter_context(tempfile.TemporaryDirectory())
        types = {"small": ({"CPU": NODE_CPUS}, 3)}
        cluster = stack.enter_context(growing_cluster(types, idle_s=15.0))
        os.environ.update(cluster.environment)
        import ray

        ray.init(log_to_driver=False, namespace="shoal", logging_level="WARNING")
        stack.callback(ray.shutdown)
        say("a head without CPUs; its autoscaler may add 3 nodes of 2 CPUs")
        register_model()
        stack.enter_context(told_of_nodes())
        refuse_what_never_fits()
        serve_replicas(is_short)
        train_on_new_nodes()
        if not is_short:
            wait_for(lambda: count_nodes() == 0, LIMIT_S, "no node")


if __name__ == "__main__":
    rehearse(is_short=sys.argv[1:] == ["short"])
    say("all is gone")
