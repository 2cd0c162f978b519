"""The job that a replacement's start is measured beside: a Ray actor that has loaded torch.

    python benchmarks/ours/actor_start.py FILE

Writes the seconds from the actor's creation to its first answer into FILE.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import ray


@ray.remote
class TorchActor:
    def answer(self) -> str:
        import torch

        return str(torch.__version__)


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    began_s = time.time()
    ray.get(TorchActor.remote().answer.remote())
    Path(sys.argv[1]).write_text(json.dumps(time.time() - began_s))
