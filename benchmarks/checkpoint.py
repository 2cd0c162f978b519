"""How long training stands still for a checkpoint: ours in the background, beside a synchronous torch.save.

    python -m benchmarks.checkpoint [--runs N] [--quick]

One process, with a thread per core as a run of one worker has, holds 200 MB of state: a model's parameters and Adam's
two moments. By turns, each in a folder of its own on the same disk: `torch.save` (which returns before the disk has
confirmed, so a second peer calls fsync too), and our `save`, of which the stall is the time until it returns. Between
the turns nothing is in flight. Ours also hashes, confirms every file, and appears whole; how long that takes in the
background is the last row.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from shoal.checkpoint import Checkpointer

STATE_BYTES = 200_000_000
NUM_LAYERS = 16
BAR = 0.1


def state_of(size_bytes: int) -> dict[str, Any]:
    """Parameters, both moments of Adam, and its groups, as a Trainer gives them."""
    width = int((size_bytes / 4 / 3 / NUM_LAYERS) ** 0.5)
    names = [f"layers.{index}.weight" for index in range(NUM_LAYERS)]
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": torch.randn(width, width), "exp_avg_sq": torch.rand(width, width)}
        for name in names
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": names}]
    model = {name: torch.randn(width, width) for name in names}
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def saved_by_torch(state: dict[str, Any], path: Path, confirmed: bool) -> float:
    """Milliseconds of a synchronous save; `confirmed` by the disk, or left to the kernel."""
    started_s = time.perf_counter()
    torch.save(state, path)
    if confirmed:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return 1e3 * (time.perf_counter() - started_s)


def saved_by_us(state: dict[str, Any], checkpointer: Checkpointer, step: int) -> tuple[float, float]:
    """Milliseconds until `save` returned, and until the checkpoint was there."""
    started_s = time.perf_counter()
    checkpointer.save(step, state)
    stall_s = time.perf_counter() - started_s
    checkpointer.wait()
    return 1e3 * stall_s, 1e3 * (time.perf_counter() - started_s)


def measured(folder: Path, num_runs: int, size_bytes: int) -> dict[str, list[float]]:
    """All turns; before the first, each side has saved once."""
    state = state_of(size_bytes)
    found: dict[str, list[float]] = {"stall": [], "whole": [], "torch.save": [], "torch.save and fsync": []}
    with Checkpointer(folder / "ours") as checkpointer:
        checkpointer.prepare(state)
        for step in range(num_runs + 1):
            turn = {
                "torch.save": saved_by_torch(state, folder / "peer.pt", confirmed=False),
                "torch.save and fsync": saved_by_torch(state, folder / "confirmed.pt", confirmed=True),
            }
            os.sync()  # what torch.save left to the kernel is not written during our turn
            turn["stall"], turn["whole"] = saved_by_us(state, checkpointer, step)
            if step:
                for name, value in turn.items():
                    found[name].append(value)
    return found


def rows_of(found: dict[str, list[float]], size_bytes: int) -> list[Row]:
    """The bar is on the first: a peer that waits for the disk would make it easier."""
    size = f"{size_bytes / 1e6:.0f} MB of state"
    stall, whole = found["stall"], found["whole"]
    note = "ours: asynchronous, hashed and confirmed by the disk in the background, after prepare()"
    plain, confirmed = "torch.save", "torch.save and fsync"
    return [
        compare(f"stall of a checkpoint, {size}", "ms", "lower", stall, found[plain], plain, BAR, "ratio", note),
        compare(f"stall of a checkpoint, {size}, peer confirmed", "ms", "lower", stall, found[confirmed], confirmed),
        compare(f"a checkpoint until it is there, {size}", "ms", "lower", whole, found[confirmed], confirmed),
    ]


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    chosen = options(__doc__, runs=31)
    size_bytes = STATE_BYTES // 10 if chosen.quick else STATE_BYTES
    with scratch() as folder:
        found = measured(folder, chosen.runs, size_bytes)
    write("checkpoint", rows_of(found, size_bytes), chosen.results)


if __name__ == "__main__":
    main()
