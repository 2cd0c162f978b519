"""A model on LitServe: one worker, its batching with a window of 5 ms.

python -m benchmarks.peers.litserve_server PORT    # BENCH_WORKLOAD names the model
"""

from __future__ import annotations

import os
import sys
from typing import Any

import litserve
import numpy as np

from benchmarks.serving.workloads import WORKLOADS, Forward, answer_of, array_of

NAME = os.environ["BENCH_WORKLOAD"]
WINDOW_S = 0.005


class Inference(litserve.LitAPI):  # type: ignore[misc]
    """Requests come parsed; a batch is a list."""

    def setup(self, device: str) -> None:
        self._infer = Forward(NAME)

    def decode_request(self, request) -> np.ndarray:  # type: ignore[no-untyped-def]  # a name is read as a query
        return array_of(request)

    def batch(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return inputs

    def predict(self, x: list[np.ndarray]) -> list[np.ndarray]:
        return self._infer(x)

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        return output

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        return answer_of(output)


if __name__ == "__main__":
    api = Inference(max_batch_size=WORKLOADS[NAME].max_batch, batch_timeout=WINDOW_S, api_path="/infer")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
