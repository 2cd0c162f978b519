"""A model on BentoML: one worker, adaptive batching, as `bentoml serve` runs it.

    python -m benchmarks.peers.bentoml_server PORT    # BENCH_WORKLOAD names the model

A request's list of inputs is what BentoML batches: lists of several requests become one, and the answers are dealt out.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import bentoml

from benchmarks.serving.workloads import WORKLOADS, Forward, answer_of, array_of

NAME = os.environ["BENCH_WORKLOAD"]
MAX_LATENCY_MS = 10_000  # beyond it BentoML refuses requests


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 4096})  # type: ignore[misc]
class Inference:
    """One batch is a list of inputs."""

    def __init__(self) -> None:
        self._infer = Forward(NAME)

    @bentoml.api(  # type: ignore[misc]
        batchable=True, batch_dim=0, max_batch_size=WORKLOADS[NAME].max_batch, max_latency_ms=MAX_LATENCY_MS
    )
    def infer(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [answer_of(y) for y in self._infer([array_of({"inputs": [one]}) for one in inputs])]


if __name__ == "__main__":
    words = ["serve", "benchmarks.peers.bentoml_server:Inference", "--port", sys.argv[1], "--host", "127.0.0.1"]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *words])
