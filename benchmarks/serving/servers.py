"""The servers side by side: ours and the peers', each with the same model, started, checked and ended alike.

One server is up at a time, since even an idle Ray takes a few percent of a core. No server asks for a token, since the
peers have none; each has one worker with one torch thread.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.children import OUR_PYTHON, PEERS_PYTHON, Child
from benchmarks.serving.drive import BINARY_HEADER, BINARY_TYPE, JSON_TYPE, Target, http_request
from benchmarks.serving.workloads import WORKLOADS, Forward, body_of, examples, head_bytes
from shoal.cluster.ports import find_free_port

START_TIMEOUT_S = 120.0
TOLERANCE = 1e-4
OURS, MOSEC, BENTOML, LITSERVE, UVICORN, RAY_SERVE = "Shoal", "mosec", "BentoML", "LitServe", "uvicorn", "Ray Serve"
PEERS = (MOSEC, BENTOML, LITSERVE, UVICORN, RAY_SERVE)


@dataclass(frozen=True)
class Server:
    """A server that answers the requests of a workload. `said` is what it told when it was up."""

    name: str
    workload: str
    child: Child
    url: str
    said: dict[str, Any]

    def target(self, num: int = 32) -> Target:
        """Its URL and so many different requests."""
        load = WORKLOADS[self.workload]
        requests = []
        for x in examples(self.workload, num):
            body = body_of(self.workload, x)
            headers: dict[str, object] = {BINARY_HEADER: head_bytes(body)} if load.binary else {}
            requests.append(http_request(self.url, body, BINARY_TYPE if load.binary else JSON_TYPE, **headers))
        return Target(self.url, requests)


@contextmanager
def server_of(name: str, workload: str, folder: Path, **settings: Any) -> Iterator[Server]:
    """One of them, up and answering right. `settings`: of our endpoint's spec, or a peer's environment."""
    if name == OURS:
        words = [OUR_PYTHON, "-m", "benchmarks.serving.ours", workload, json.dumps(settings)]
        with Child(words, folder, {"SHOAL_HOME": str(folder / f"home-{os.urandom(3).hex()}")}) as child:
            said = child.answer(START_TIMEOUT_S)
            yield _checked(Server(name, workload, child, said["url"], said))
        return
    port, ray_folder = find_free_port(), folder / f"ray-{os.urandom(3).hex()}"
    words, path = [f"benchmarks.peers.{name.lower().replace(' ', '_')}_server", str(port)], "/infer"
    if name == MOSEC:
        words[1:], path = ["--address", "127.0.0.1", "--port", str(port)], "/inference"
    elif name == RAY_SERVE:
        words, path = [*words, str(ray_folder)], "/"
    env = {"BENCH_WORKLOAD": workload, "BENTOML_DO_NOT_TRACK": "1", **settings}
    goodbye_s = 15.0 if name == RAY_SERVE else 0.0  # the others read no input
    with Child([PEERS_PYTHON, "-m", *words], folder, env, ray_folder, goodbye_s) as child:
        said = child.answer(START_TIMEOUT_S) if name == RAY_SERVE else {}
        yield _checked(Server(name, workload, child, f"http://127.0.0.1:{port}{path}", said))


def _checked(server: Server) -> Server:
    """Return when the first requests are answered, and answered right. Raises TimeoutError, AssertionError."""
    target = server.target(3)
    expected = [Forward(server.workload)([x])[0] for x in examples(server.workload, 3)]
    deadline_s = time.monotonic() + START_TIMEOUT_S
    for request, y in zip(target.requests, expected, strict=False):
        answer = None
        while answer is None:
            answer = _ask(server, request)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{server.name} does not answer with 200: {server.child.last_words()}")
            if answer is None:
                time.sleep(0.1)
        got = _values(answer)
        assert np.allclose(got, y.ravel(), atol=TOLERANCE), (server.name, got, y)
    return server


def _ask(server: Server, request: bytes) -> Any:
    """The answer's JSON; None when there is none yet."""
    parts = urlsplit(server.url)
    head, _, body = request.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    connection = http.client.HTTPConnection(str(parts.netloc), timeout=10.0)
    try:
        connection.request("POST", parts.path or "/", body, headers)
        response = connection.getresponse()
        content = response.read()
        return json.loads(content) if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _values(answer: Any) -> Sequence[float]:
    """BentoML answers with a list of outputs."""
    while isinstance(answer, list):
        answer = answer[0]
    values: Sequence[float] = answer["outputs"][0]["data"]
    return values
