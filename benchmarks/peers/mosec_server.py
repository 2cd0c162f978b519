"""A model on mosec: one worker, its own batching with a window.

    python -m benchmarks.peers.mosec_server --address 127.0.0.1 --port PORT    # mosec reads the words itself

BENCH_WORKLOAD names the model, BENCH_WINDOW_MS the longest wait for a batch (its documents use 5).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from mosec import Server, Worker

from benchmarks.serving.workloads import WORKLOADS, Forward, answer_of, array_of, decode

NAME = os.environ["BENCH_WORKLOAD"]
WINDOW_MS = int(os.environ.get("BENCH_WINDOW_MS", "5"))


class Inference(Worker):
    """Parses and answers JSON with mosec's own defaults; binary requests as numpy reads them."""

    def __init__(self) -> None:
        super().__init__()
        self._infer = Forward(NAME)

    def deserialize(self, data: bytes) -> Any:
        return decode(NAME, data) if WORKLOADS[NAME].binary else array_of(super().deserialize(data))

    def forward(self, data: list[np.ndarray]) -> list[dict[str, Any]]:
        return [answer_of(y) for y in self._infer(data)]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Inference, num=1, max_batch_size=WORKLOADS[NAME].max_batch, max_wait_time=WINDOW_MS)
    server.run()
