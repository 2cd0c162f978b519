"""Requests of kept connections while an endpoint changes in each way that it can: none lost, wrong, or changed twice.

    python -m benchmarks.serving.changes [--runs N] [--quick]

Replicas go 1 -> 3 -> 1 -> 3 -> 1; a canary, a promotion, a rollback and an option; one of two replicas is killed, then
the only one; the model is removed and served again. Each version answers its number, so a wrong one is seen.

*lost*: no answer, or one that is neither 200 nor 503 with Retry-After; while the model is removed 404 is right, too.
*wrong*: another number than that of the version named. *twice*: its log has more changes than were asked for.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.children import scratch
from benchmarks.result import compare, options, write
from benchmarks.serving.scaled import NAME, scale

NUM_CLIENTS = 16
NUM_REQUESTS = 16_000
PAUSE_S = 1.5  # between the changes
TIMEOUT_S = 75.0
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0.0]}]})
CHANGES = ("canary", "promote", "rollback", "set")


@contextmanager
def open_endpoint(home: Path, names: Sequence[str] = (NAME,), num_versions: int = 2) -> Iterator[Any]:
    """An endpoint of version 1 of each model, on a cluster of its own. Answers are the version, of the second model
    1,000 more."""
    from shoal.cluster.embedded_cluster import start_cluster

    os.environ["SHOAL_HOME"] = str(home)
    with ExitStack() as stack:
        os.environ.update(stack.enter_context(start_cluster(num_cpus=8)).environment)  # before anything imports Ray
        import functools

        import numpy as np
        import ray
        from ray import serve

        from shoal.cluster.job_main import connect
        from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
        from shoal.serve.on_ray.deployment import deploy
        from shoal.serve.spec.endpoint import EndpointSpec
        from shoal.serve.spec.model_source import model_from_ref
        from shoal.weights import WeightSnapshot

        connect()
        stack.callback(ray.shutdown)
        x, y = (TensorSignature(name=name, datatype="FP32", shape=[-1, 1]) for name in "xy")
        factory = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 1, "out_features": 1})
        for number, name in enumerate(names):
            for version in range(1, num_versions + 1):
                bias = np.full(1, version + 1000 * number, np.float32)
                snapshot = WeightSnapshot.of(version, {"weight": np.zeros((1, 1), np.float32), "bias": bias})
                Registry().register(name, snapshot, model=factory, signature=Signature(inputs=[x], outputs=[y]))
        serve.RunTarget = functools.partial(serve.RunTarget, external_scaler_enabled=True)  # type: ignore[misc,assignment]
        spec = EndpointSpec.parse({"name": NAME, "num_cpus": 0.1, "show_errors": True})
        endpoint = deploy(spec, [model_from_ref(f"{name}@1") for name in names])
        stack.callback(endpoint.close)
        yield endpoint


def ask(connection: http.client.HTTPConnection, path: str, is_removed: Callable[[], bool]) -> str:
    """What becomes of a request."""
    may_be_missing = is_removed()
    try:
        connection.request("POST", path, BODY)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        connection.close()
        return f"lost: {type(error).__name__}"
    if response.status == 200:
        is_right = answer["outputs"][0]["data"] == [float(answer["model_version"])]
        return f"version {answer['model_version']}" if is_right else "wrong"
    if response.status == 503 and response.headers["retry-after"]:
        return "503, come again"
    if response.status == 404 and (may_be_missing or is_removed()):
        return "404, removed"
    return f"lost: {response.status} {answer}"


def kill(num_replicas: int) -> None:
    """One of this process's replicas, of which there are at least so many."""
    import psutil

    replicas = [each for each in psutil.Process().children(recursive=True) if "ServeReplica" in each.name()]
    assert len(replicas) >= num_replicas, replicas
    os.kill(replicas[-1].pid, signal.SIGKILL)


def change(endpoint: Any, removed: threading.Event) -> None:
    """Each change, one after the other."""
    from shoal.client import Client

    for num_replicas in (3, 1, 3, 1):
        scale("replica", num_replicas)
        time.sleep(PAUSE_S)
    with Client(endpoint.url, timeout_s=TIMEOUT_S) as client:
        details: tuple[dict[str, Any], ...] = (
            {"version": 2, "percent": 30.0},
            {},
            {},
            {"options": {"max_batch_size": 16}},
        )
        for action, given in zip(CHANGES, details, strict=True):
            client.rollout(action, NAME, **given)
            time.sleep(PAUSE_S)
        for num_replicas in (2, 1):
            scale("replica", num_replicas)
            kill(num_replicas)
            time.sleep(4 * PAUSE_S)
            scale("replica", num_replicas)
        removed.set()
        client.rollout("delete", NAME)
        time.sleep(PAUSE_S)
        client.rollout("deploy", NAME, version=1)
        removed.clear()
        time.sleep(PAUSE_S)


def measure(home: Path, num_requests: int) -> tuple[Counter[str], Counter[str]]:
    """What became of the requests, and the changes in the endpoint's log."""
    became: Counter[str] = Counter()
    removed, is_over = threading.Event(), threading.Event()

    with open_endpoint(home) as endpoint, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        url = urlsplit(endpoint.url)

        def request() -> Counter[str]:
            counts: Counter[str] = Counter()
            with closing(http.client.HTTPConnection(str(url.netloc), timeout=TIMEOUT_S)) as connection:
                while not is_over.is_set() or counts.total() < num_requests / NUM_CLIENTS:
                    counts[ask(connection, f"{url.path}/v2/models/{NAME}/infer", removed.is_set)] += 1
            return counts

        clients = [pool.submit(request) for _ in range(NUM_CLIENTS)]
        try:
            change(endpoint, removed)
        finally:
            is_over.set()
        for each in clients:
            became += each.result()
        changes = Counter(event.kind for event in endpoint.take_events())
    return became, changes


def main() -> None:
    chosen = options(__doc__, runs=1)
    became: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    with scratch() as folder:
        for run in range(chosen.runs):
            answers, logged = measure(folder / str(run), 1_000 if chosen.quick else NUM_REQUESTS)
            became += answers
            changes += logged
            print(answers, logged, flush=True)
    lost = sum(count for kind, count in became.items() if kind.startswith("lost"))
    twice = sum(max(0, changes[action] - chosen.runs) for action in CHANGES)
    note = f"of {became.total():,}: {dict(became)}; changes logged: {dict(changes)}"
    name = "requests while an endpoint is scaled, changed, killed, removed and served again: {}"
    rows = [
        compare(name.format(kind), unit, "lower", [float(value)], bar=0.0, bar_kind="value", note=note)
        for kind, unit, value in (
            ("lost", "requests", lost),
            ("wrong", "requests", became["wrong"]),
            ("made twice", "changes", twice),
        )
    ]
    write("serving_changes", rows, chosen.results)


if __name__ == "__main__":
    main()
