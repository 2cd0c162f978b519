"""Rehearse on this machine how nodes come and go: an endpoint and a training run on a cluster that grows.

    python tests/rehearse.py

Prints a timeline. The nodes are processes of this machine (see growing_cluster.py); Ray's autoscaler, Serve and Ray
Train are the real ones.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

# Ray reads these when it is imported.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "SHOAL_LOG_MONITOR": "0"}
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

import shoal.runs
from growing_cluster import growing_cluster
from shoal.client import Client
from shoal.errors import ConfigError, PlanError
from shoal.home import load_access_token
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.runs.event_messages import describe_wait
from shoal.weights import WeightSnapshot
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.serve.on_ray.deployment import DeployedEndpoint
    from shoal.train.spec import TrainSpec

T = TypeVar("T")
LIMIT_S = 600.0
NODE_CPUS, MAX_NODES = 1, 3
TASK = Path(__file__).parent / "train_task.py"
BEGAN_S = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s  {text}", flush=True)


def count_nodes() -> int:
    """Without the head."""
    import ray

    return sum(node["Alive"] for node in ray.nodes()) - 1


@contextmanager
def watch(look: Callable[[], T], before: T, tell: Callable[[T, T], None]) -> Iterator[None]:
    """Tell what `look` finds, and what it found before, whenever that changes."""
    over = threading.Event()

    def run() -> None:
        seen, is_over = before, False
        while not is_over:
            is_over = over.wait(0.25)
            if (now := look()) != seen:
                tell(seen, now)
                seen = now

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def watch_nodes() -> AbstractContextManager[None]:
    return watch(count_nodes, 0, lambda before, now: say(f"nodes: {before} -> {now}"))


def watch_waits() -> AbstractContextManager[None]:
    """What the newest run waits for, as `shoal status` says it."""

    def look() -> str:
        return next((describe_wait(run.last_events()) for run in shoal.runs.list_runs(1)), "")

    def tell(_: str, now: str) -> None:
        say(f"`shoal status`: {now or 'it waits no longer'}")

    return watch(look, "", tell)


def register_model() -> None:
    x, y = ([TensorSignature(name=name, datatype="FP32", shape=[-1, size])] for name, size in (("x", 4), ("y", 2)))
    linear = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 4, "out_features": 2})
    tensors = {"weight": np.zeros((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    Registry().register("linear", WeightSnapshot.of(1, tensors), model=linear, signature=Signature(inputs=x, outputs=y))


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
        train_on_cluster(make_training(MAX_NODES + 1), "rehearsal")
    except PlanError as error:
        say(f"refused at once: {error}")
    else:
        raise AssertionError("it was accepted")


def make_training(workers: int) -> TrainSpec:
    from shoal.train.spec import TrainSpec

    base = {"task": f"{TASK}:Toy", "batch_size": 28, "stop": {"steps": 4}, "parallel": "ddp", "device": "cpu"}
    return TrainSpec.parse({**base, "workers": workers, "wait": "10m"})


def serve_replicas(words: Sequence[str], use: Callable[[DeployedEndpoint], None]) -> None:
    from shoal.flows.serving import record_endpoint
    from shoal.flows.serving_spec import ServingSpec

    options = [f"endpoint.num_cpus={NODE_CPUS}", "endpoint.wait=10m", "endpoint.model.max_batch_size=1"]
    with watch_waits(), record_endpoint(ServingSpec(models=["linear@1"]).override([*options, *words])) as endpoint:
        status = endpoint.status()
        say(f"the endpoint answers with {len(status['replicas'])} of {status['num_replicas']} replicas")
        use(endpoint)
    say("the endpoint is closed")


def wait_for_replicas(endpoint: DeployedEndpoint, number: int) -> None:
    wait_for(lambda: len(endpoint.status()["replicas"]) == number, LIMIT_S, f"{number} replicas")
    say(f"{number} replicas answer; the status says: {endpoint.status()['wanted'] or 'nothing is wanted'}")


def load_and_rest(endpoint: DeployedEndpoint) -> None:
    """Ask from many threads until three replicas answer; then rest until there is one again."""
    over = threading.Event()

    def ask() -> None:
        with Client(endpoint.url, token=load_access_token()) as client:
            while not over.is_set():
                client.infer("linear", {"x": np.ones((1, 4), np.float32)})

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    say("16 clients ask")
    try:
        wait_for_replicas(endpoint, MAX_NODES)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    say("the clients rest")
    wait_for_replicas(endpoint, 1)


def train_on_new_nodes() -> None:
    from shoal.flows.training import train_on_cluster

    with watch_waits():
        result = train_on_cluster(make_training(2), "rehearsal", registers=False)
    say(f"trained by 2 workers: {result.detail}")


def rehearse() -> None:
    with ExitStack() as stack:
        os.environ["SHOAL_HOME"] = stack.enter_context(tempfile.TemporaryDirectory())
        types = {"small": ({"CPU": NODE_CPUS}, MAX_NODES)}
        cluster = stack.enter_context(growing_cluster(types, idle_s=15.0))
        os.environ.update(cluster.environment)
        import ray

        ray.init(log_to_driver=False, namespace="shoal", logging_level="WARNING")
        stack.callback(ray.shutdown)
        say(f"a head without CPUs; its autoscaler may add {MAX_NODES} nodes of {NODE_CPUS} CPU")
        register_model()
        stack.enter_context(watch_nodes())
        refuse_what_never_fits()
        serve_replicas(["endpoint.scale.max=3"], load_and_rest)
        wait_until_no_node()
        train_on_new_nodes()
        wait_until_no_node()


def wait_until_no_node() -> None:
    wait_for(lambda: count_nodes() == 0, LIMIT_S, "cluster without nodes")
    say("no node is left")


if __name__ == "__main__":
    rehearse()
    say("all is gone")
