"""What keys and traces cost a request: the application over HTTP alone; no socket, no queue, no forward.

    python -m benchmarks.serving.seen [--runs N] [--quick]

Processor time of the whole process, the exporter of spans included, for a request of one row to a model that gives it
back at once. The variants take turns, so that what the machine does besides falls on all of them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.tracing.tracer import Tracer
from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.http.app import RestApp
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.messages.inference import Outputs, Prediction
from shoal.serve.protocol.access import AccessControl
from shoal.serve.spec.api_key import ApiKey
from shoal.serve.spec.model_options import ModelOptions

ROW = b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}'
KEY = "0123456789abcdef" * 2
TRACEPARENT = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
PLAIN = "neither keys nor traces"
KEYS, UNTRACED, TRACED = "100 keys with rates", "traces of other requests", "every request traced, to a file"
VARIANTS = (PLAIN, KEYS, UNTRACED, TRACED)


class Echo:
    """A model and its host: gives back what it gets, and stamps a trace as a served model does."""

    name, version, versions, options, ready = "m", 1, (1,), ModelOptions(), True
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, 3])],
        outputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, 3])],
    )

    def get_model(self, name: str) -> Echo:
        return self

    async def infer(self, call: InferCall) -> Prediction[Outputs]:
        if call.trace is not None:
            call.trace.submitted_ns = time.time_ns()
        return Prediction(dict(call.inputs), 1)


def measure(variant: str, folder: Path, num_requests: int) -> float:
    """Processor time of a request, in microseconds."""
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(ROW))]
    keys, tracer = [], None
    if variant == KEYS:
        keys = [ApiKey.parse({"name": f"k{n}", "key": f"{KEY}{n}", "requests_per_s": 1e9}) for n in range(100)]
        headers.append((b"authorization", f"Bearer {KEY}7".encode()))
    if variant in (UNTRACED, TRACED):
        tracer = Tracer(f"file:{folder}?ratio=0", "endpoint", "replica")
        headers += [TRACEPARENT] if variant == TRACED else []
    host: Any = Echo()
    app = RestApp(host, AccessControl(None, keys), tracer=tracer)
    statuses: set[int] = set()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": ROW}

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.add(message["status"])

    async def ask() -> None:
        for _ in range(num_requests):
            scope = {"type": "http", "method": "POST", "path": "/v2/models/m/infer", "headers": headers}
            await app(scope, receive, send)

    asyncio.run(ask())
    began_s = time.process_time()
    asyncio.run(ask())
    if tracer is not None:
        tracer.close()
    assert statuses == {200}, statuses
    return (time.process_time() - began_s) / num_requests * 1e6


def rows_of(found: dict[str, list[float]]) -> list[Row]:
    """Each variant beside the plain one."""
    return [
        compare(f"a request with {variant}", "µs", "lower", found[variant], found[PLAIN], PLAIN)
        for variant in VARIANTS[1:]
    ]


def main() -> None:
    chosen = options(__doc__, runs=9)
    num_requests = 500 if chosen.quick else 5000
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with scratch() as folder:
        measure(PLAIN, folder, num_requests)
        assert "opentelemetry" not in sys.modules, "imported although nothing is traced"
        for _ in range(chosen.runs):
            for variant in VARIANTS:
                found[variant].append(measure(variant, folder, num_requests))
    write("serving_seen", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
