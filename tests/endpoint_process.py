"""An endpoint on a local Ray of its own, in a process of its own, for tests; and a client that counts every answer.

Serve reads its environment when it is imported, and one process can hold one Ray: so the driver runs as a child, which
obeys one JSON command per line. It serves two models: `linear` follows published weights, `steps` the alias champion
of a registry that has three versions. Both are `torch.nn.Linear` with zero weights and the version as bias: every
number of every answer must equal the version that the answer names.
"""

import functools
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import shoal_program

if TYPE_CHECKING:
    from shoal.weights import WeightSnapshot

NUM_FEATURES = 4
NUM_OUTPUTS = 2
REQUEST_TIMEOUT_S = 100.0  # more than HAProxy waits for a replica
IDLE_S = 2.0
END_S = 300.0
WORDS = 3000
FOLDER_LINE = "the cluster is in "
BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, NUM_FEATURES], "datatype": "FP32", "data": [0.5] * NUM_FEATURES}]}
)
NUM_REGISTERED = 3
STORE_BYTES = 200 * 1024 * 1024
INFER = "/v2/models/linear/infer"


class EndpointProcess:
    """A child that serves, until the end of a block. Commands raise RuntimeError with its last words when it fails.

    answer_s: after which HAProxy gives up a replica that does not answer
    """

    def __init__(self, answer_s: float = 60.0, **spec: Any) -> None:
        self.temp_dir = Path(tempfile.mkdtemp(prefix="se-", dir="/tmp"))
        self._log = (self.temp_dir / "driver.log").open("w+")
        self._mark = uuid.uuid4().hex
        self._child = subprocess.Popen(
            [sys.executable, __file__, json.dumps(spec), f"{answer_s:g}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Not what attaches this process to another cluster.
            env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            | {"SHOAL_HOME": str(self.temp_dir / "home"), shoal_program.MARK: self._mark},
        )
        shoal_program.logs[f"the endpoint {self.pid}"] = self.temp_dir / "driver.log"
        try:
            answer = self._answer()
            self.url, self.grpc = str(answer["url"]), str(answer["grpc"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "EndpointProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the child, whose descendants are the whole cluster."""
        return self._child.pid

    @property
    def registry(self) -> Path:
        """The registry's folder."""
        return self.temp_dir / "home" / "registry"

    def command(self, name: str, **arguments: Any) -> Any:
        self._child.stdin.write(json.dumps([name, arguments]) + "\n")
        self._child.stdin.flush()
        return self._answer()["result"]

    def publish(self, version: int) -> float:
        """Publish a version; the time at which it was handed over (seconds since the epoch)."""
        return float(self.command("publish", version=version))

    def stats(self) -> list[dict[str, Any]]:
        return list(self.command("stats"))

    def reaches(self, num_replicas: int) -> bool:
        """Send a request; whether HAProxy, which hears of a replica after Serve does, has passed some to so many."""
        client = Client(self.url)
        assert client.infer()[0] == 200
        client.close()
        answered = [each["models"]["linear"]["batcher"]["answered"] for each in self.stats()]
        return len(answered) == num_replicas and all(answered)

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):  # a command that the child did not live to read
            self._child.stdin.close()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the endpoint has not ended within {END_S:g} s: {self.read_logs()}") from None
        finally:
            shoal_program.end_marked(self._mark)
            self._child.wait()
            self._child.stdout.close()
            self._log.close()
            shoal_program.logs.pop(f"the endpoint {self.pid}", None)
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    def _answer(self) -> dict[str, Any]:
        for line in self._child.stdout:
            if line.startswith('{"shoal": '):
                answer: dict[str, Any] = json.loads(line)["shoal"]
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer
        raise RuntimeError(f"the endpoint's process ended: {self.read_logs()}")

    def read_logs(self) -> str:
        """The end of the driver's log, and of those of its Ray, its replicas and other workers."""
        self._log.seek(0)
        said = self._log.read()
        words = [said[-WORDS:]]
        if found := re.search(rf"^{FOLDER_LINE}(\S+)$", said, re.MULTILINE):  # what is left of it, if its head has died
            folder = Path(found[1])
            logs = folder / "ray/session_latest/logs"
            files = [folder / "head.log", *logs.glob("gcs_server.*"), *logs.glob("raylet.*")]
            files += [*logs.glob("serve/replica_*"), *logs.glob("worker-*.err")]
            words += [
                f"{each.name}: {each.read_text(errors='replace')[-WORDS:]}" for each in files if is_nonempty(each)
            ]
        return "\n".join(words)


def is_nonempty(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


@dataclass
class Load:
    """Closed-loop clients with keep-alive. `counts` has what became of every request that was sent."""

    url: str
    num_clients: int
    model: str = "linear"
    counts: Counter[str] = field(default_factory=Counter)
    versions: set[int] = field(default_factory=set)
    surprises: list[str] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * REQUEST_TIMEOUT_S)

    @property
    def hung(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        client = Client(self.url)
        while not self._stop.is_set():
            try:
                status, headers, body = client.infer(self.model)
            except http.client.IncompleteRead as error:
                self._count("cut short", str(error))
                client.close()
                continue
            except (OSError, http.client.HTTPException) as error:
                self._count("no answer", f"{type(error).__name__}: {error}")
                client.close()
                continue
            if status == 200:
                version = int(headers["shoal-model-version"])
                right = body["model_version"] == str(version) and body["outputs"][0]["data"] == [version] * NUM_OUTPUTS
                self._count("answered" if right else "mixed", "" if right else str(body), version)
            else:
                self._count(f"refused {status}", str(body))
        client.close()

    def _count(self, kind: str, surprise: str = "", version: int = 0) -> None:
        with self._lock:
            self.counts[kind] += 1
            if version:
                self.versions.add(version)
            if surprise:
                self.surprises.append(f"{kind}: {surprise}")


class Client:
    """One keep-alive connection; a new one after a pause, in which the endpoint may have given it up."""

    def __init__(self, url: str, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=timeout_s)
        self._answered_s = time.monotonic()

    def request(self, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, Any, Any]:
        if time.monotonic() - self._answered_s > IDLE_S:
            self._connection.close()
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        content = json.loads(response.read())
        self._answered_s = time.monotonic()
        return response.status, response.headers, content

    def infer(self, model: str = "linear") -> tuple[int, Any, Any]:
        return self.request("POST", f"/v2/models/{model}/infer", BODY)

    def change(self, **change: Any) -> Any:
        """What an administrator asks. Fails unless it was done."""
        status, _, body = self.request("POST", "/shoal/v1/rollout", json.dumps(change))
        assert status == 200, body
        return body

    def close(self) -> None:
        self._connection.close()


def _drive(spec: dict[str, Any], answer_s: str) -> None:
    """Serve, and obey the commands of standard input until it ends."""
    from shoal.cluster import embedded_cluster

    environment = {"RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": answer_s}
    with embedded_cluster.start_cluster(
        num_cpus=4, object_store_memory_bytes=STORE_BYTES, environment=environment
    ) as cluster:
        print(f"{FOLDER_LINE}{cluster.temp_dir}", file=sys.stderr, flush=True)  # noqa: T201
        os.environ.update(cluster.environment)  # before anything imports Ray
        import ray

        from shoal.cluster.job_main import connect, disconnect
        from shoal.errors import ShoalError

        connect()
        served = _Served(spec)
        answer({"url": served.endpoint.url, "grpc": served.endpoint.grpc})
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer({"result": getattr(served, name)(**arguments)})
            except (ShoalError, ray.exceptions.RayError) as error:
                answer({"error": str(error)})
        served.close()
        disconnect()


class _Served:
    """The endpoint and what it follows. Public methods are the commands."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from ray import serve

        from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
        from shoal.serve.on_ray.deployment import deploy
        from shoal.serve.spec.endpoint import EndpointSpec
        from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
        from shoal.weights.ray_weight_store import RayWeightPublisher, RayWeightSource, start_weight_store

        self._store = start_weight_store("test")
        self._source, self._publisher = RayWeightSource(self._store), RayWeightPublisher(self._store)
        x = TensorSignature(name="x", datatype="FP32", shape=[-1, NUM_FEATURES])
        y = TensorSignature(name="y", datatype="FP32", shape=[-1, NUM_OUTPUTS])
        kwargs = {"in_features": NUM_FEATURES, "out_features": NUM_OUTPUTS}
        factory, signature = ModelFactory(factory="torch.nn:Linear", kwargs=kwargs), Signature(inputs=[x], outputs=[y])
        self._registry = Registry()
        for version in range(1, NUM_REGISTERED + 1):
            aliases = ("champion",) if version == 1 else ()
            self._registry.register("steps", _constant(version), model=factory, signature=signature, aliases=aliases)
        models = [
            EndpointModel("linear", LiveModel(factory, signature, self._source)),
            model_from_ref("steps@champion"),
        ]
        if "max_replicas" not in spec:
            serve.RunTarget = functools.partial(serve.RunTarget, external_scaler_enabled=True)  # for `scale`
        self.endpoint = deploy(EndpointSpec.parse({"name": "linear", "num_cpus": 0.1, **spec}), models)

    def publish(self, version: int) -> float:
        snapshot = _constant(version)
        self._publisher.publish(snapshot)
        return snapshot.published_at

    def stats(self) -> object:
        return self.endpoint.stats()

    def scale(self, num_replicas: int) -> None:
        """Ask Serve for so many replicas; returns at once."""
        import ray
        from ray.serve._private.common import DeploymentID
        from ray.serve.context import _get_global_client

        controller = _get_global_client()._controller
        deployment = DeploymentID(name="replica", app_name=self.endpoint.name)
        ray.get(controller.update_deployment_replicas.remote(deployment, num_replicas))

    def status(self) -> object:
        return self.endpoint.status()

    def events(self) -> list[str]:
        return [f"{event.kind} {event.model}" for event in self.endpoint.take_events()]

    def store_pid(self) -> int:
        import ray

        return int(ray.get(self._store.__ray_call__.remote(lambda worker: os.getpid())))

    def controller_pid(self) -> int:
        return int(self.endpoint._controller.call_blocking("pid"))

    def stored_version(self) -> int:
        latest = self._source.latest()
        return latest.version if latest else 0

    def champion(self) -> int:
        return self._registry.get("steps@champion").version

    def close_endpoint(self) -> None:
        self.endpoint.close()
        self.endpoint.close()

    def close(self) -> None:
        self._publisher.close(1.0)
        self.endpoint.close()


def _constant(version: int) -> "WeightSnapshot":
    """Weights that answer with their version."""
    import numpy as np

    from shoal.weights import WeightSnapshot

    weight = np.zeros((NUM_OUTPUTS, NUM_FEATURES), np.float32)
    return WeightSnapshot.of(version, {"weight": weight, "bias": np.full(NUM_OUTPUTS, version, np.float32)})


def answer(content: object) -> None:
    print(json.dumps({"shoal": content}), file=_answers, flush=True)


if __name__ == "__main__":
    # Only answers go to the pipe: a thread of Ray prints errors of the cluster, also in the middle of another line.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test decides when it ends
    _drive(json.loads(sys.argv[1]), sys.argv[2])
