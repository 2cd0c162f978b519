"""A decoder of some size that notes when each rank ends its first steps, and its memory: see `benchmarks.large_models`.

Each rank writes FOLDER/RANK.json: `steps` (seconds since the epoch at the end of each); `grown_bytes`, by which its
resident memory was at most larger than before the model was built; and `own_bytes`, the same with its share of each
page of shared memory (PSS) in place of the page (RSS).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.models.decoder import Decoder
from shoal.train import Task
from shoal.train.callback import Callback, TrainingState

CONTEXT = 32


def read_resident_bytes(name: str) -> int:
    """VmRSS or VmHWM, its largest value, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def read_shared_excess_bytes() -> int:
    """By how much resident memory counts pages of shared memory more than this process's shares of them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    share = next(line for line in lines if line.startswith("Pss_Shmem:"))
    return read_resident_bytes("RssShmem") - 1024 * int(share.split()[1])


def make_decoder(width: int, depth: int) -> nn.Module:
    """512 million parameters at width 1280 and depth 25."""
    return Decoder(num_tokens=8192, context=CONTEXT, width=width, depth=depth, heads=width // 64)


def make_tokens(num_samples: int) -> Tensor:
    """int64 [num_samples, CONTEXT + 1]."""
    return torch.randint(8192, (num_samples, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


class Notes(Callback):
    """Writes a rank's file after each step."""

    def __init__(self, folder: str, before_bytes: int) -> None:
        self._folder, self._before_bytes, self._ends_s = Path(folder), before_bytes, []  # type: ignore[var-annotated]

    def on_step(self, state: TrainingState) -> None:
        float(state.loss)
        self._ends_s.append(time.time())
        grown_bytes = read_resident_bytes("VmHWM") - self._before_bytes
        own_bytes = grown_bytes - read_shared_excess_bytes()
        text = json.dumps({"steps": self._ends_s, "grown_bytes": grown_bytes, "own_bytes": own_bytes})
        (self._folder / f"{os.environ.get('RANK', '0')}.json").write_text(text)


class LargeDecoder(Task):
    """folder: of the notes"""

    def __init__(self, *, folder: str = "", width: int = 1280, depth: int = 25) -> None:
        self.folder, self.width, self.depth = folder, width, depth
        self._before_bytes = psutil.Process().memory_info().rss

    def model(self) -> nn.Module:
        return make_decoder(self.width, self.depth)

    def data(self) -> Data:
        return Data(TensorDataset(make_tokens(64)), collate=lambda rows: torch.stack([row[0] for row in rows]))

    def inputs(self, batch: Tensor) -> tuple[Any, ...]:
        return (batch[:, :-1],)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())

    def callbacks(self) -> Sequence[Callback]:
        return [Notes(self.folder, self._before_bytes)]
