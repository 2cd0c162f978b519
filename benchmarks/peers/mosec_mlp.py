"""The same model on mosec: one worker, batches of up to 64, and the window of 5 ms that its documents use.

python -m benchmarks.peers.mosec_mlp --address 127.0.0.1 --port PORT    # mosec reads the words itself
"""

from __future__ import annotations

from typing import Any

import torch
from mosec import Server, Worker

from benchmarks.model import answer_of, mlp

MAX_BATCH = 64
WINDOW_MS = 5


class Inference(Worker):
    """Parses and answers JSON with mosec's own defaults."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = mlp()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, object]]:
        with torch.inference_mode():
            rows = self.model(torch.tensor([one["inputs"][0]["data"] for one in data])).tolist()
        return [answer_of(row) for row in rows]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Inference, num=1, max_batch_size=MAX_BATCH, max_wait_time=WINDOW_MS)
    server.run()
