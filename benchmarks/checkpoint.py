"""How long training stands still for a checkpoint: ours in the background, beside a synchronous torch.save.

    python -m benchmarks.checkpoint [--runs N] [--quick]

One process, with a thread per core as a run of one worker has, trains a model whose parameters and moments of Adam are
200 MB. Between two steps it saves, by turns and each in a folder of its own on the same disk: with `torch.save` (which
returns before the disk has confirmed, so a second peer calls fsync too), and with our `save`, in the Trainer's way: the
network is copied at once, the moments while the next gradients are computed. The stall is the time until `save` returns
and that which the optimizer then waits for the rest of the copy. Between the turns nothing is in flight.

Ours also hashes, confirms every file, and appears whole, while training goes on, which that slows down. The last rows
tell how long a checkpoint takes, and what training loses to it in all: the time of the steps until it is there, beyond
that of as many steps without one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from shoal.checkpoint import Checkpointer

STATE_BYTES = 200_000_000
NUM_LAYERS = 16
BATCH = 64
BAR = 0.1


class Training:
    """A model with Adam whose state has `size_bytes`, and its steps."""

    def __init__(self, size_bytes: int, device: torch.device | str = "cpu") -> None:
        width = int((size_bytes / 4 / 3 / NUM_LAYERS) ** 0.5)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS))).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(BATCH, width, device=device)

    def step(self, before_update: Callable[[], object] = lambda: None) -> None:
        """Gradients, and then the optimizer's part."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        before_update()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """As a Trainer gives it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def ms_of(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started_s = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started_s)


def saved_by_torch(state: dict[str, Any], path: Path, confirmed: bool) -> float:
    """Milliseconds of a synchronous save; `confirmed` by the disk, or left to the kernel."""
    started_s = time.perf_counter()
    torch.save(state, path)
    if confirmed:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return 1e3 * (time.perf_counter() - started_s)


def saved_by_us(training: Training, checkpointer: Checkpointer, number: int, step_ms: float) -> dict[str, float]:
    """Milliseconds that training stood still, until the checkpoint was there, and that were lost in all."""
    waits: list[float] = []
    began_s = time.perf_counter()
    waits.append(ms_of(lambda: checkpointer.save(number, training.state(), later=["optimizer"])))
    training.step(lambda: waits.append(ms_of(checkpointer.wait_until_copied)))
    num_steps = 1
    while checkpointer.is_saving:
        training.step()
        num_steps += 1
    whole_ms = 1e3 * (time.perf_counter() - began_s)
    checkpointer.wait()
    return {"stall": sum(waits), "whole": whole_ms, "lost": whole_ms - num_steps * step_ms}


def measured(folder: Path, num_runs: int, size_bytes: int) -> dict[str, list[float]]:
    """All turns; before the first, each side has saved once."""
    training = Training(size_bytes)
    training.step()
    found: dict[str, list[float]] = {}
    with Checkpointer(folder / "ours") as checkpointer:
        checkpointer.prepare(training.state())
        for number in range(num_runs + 1):
            state = training.state()
            turn = {
                "torch.save": saved_by_torch(state, folder / "peer.pt", confirmed=False),
                "torch.save and fsync": saved_by_torch(state, folder / "confirmed.pt", confirmed=True),
            }
            os.sync()  # what torch.save left to the kernel is not written during our turn
            step_ms = statistics.median(ms_of(training.step) for _ in range(5))
            turn |= saved_by_us(training, checkpointer, number, step_ms)
            if number:
                for name, value in (turn | {"step": step_ms}).items():
                    found.setdefault(name, []).append(value)
    return found


def rows_of(found: dict[str, list[float]], size_bytes: int) -> list[Row]:
    """The bar is on the first: a peer that waits for the disk would make it easier."""
    size = f"{size_bytes / 1e6:.0f} MB of state"
    stall, whole, lost = found["stall"], found["whole"], found["lost"]
    step_ms = statistics.median(found["step"])
    note = (
        "ours: after prepare(); the network is copied at once, the moments of Adam during the gradients of the next"
        f" step (a step takes {step_ms:.0f} ms); hashed and confirmed by the disk in the background"
    )
    plain, confirmed = "torch.save", "torch.save and fsync"
    return [
        compare(f"stall of a checkpoint, {size}", "ms", "lower", stall, found[plain], plain, BAR, "ratio", note),
        compare(f"stall of a checkpoint, {size}, peer confirmed", "ms", "lower", stall, found[confirmed], confirmed),
        compare(f"training time lost to a checkpoint, {size}", "ms", "lower", lost, found[plain], plain),
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
