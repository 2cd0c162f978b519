"""How long a step is late for a checkpoint of state on the GPU: ours in the background, beside torch.save at once.

The stall is the time of a save and the step after it, the device's work included, beyond that of a step alone. Ours
saves in the Trainer's way: after `prepare`, the network at once and the moments of Adam during the next gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.checkpoint import Training
from benchmarks.children import scratch
from benchmarks.gpu.turns import MIN_ROUNDS, Setting, time_ms
from benchmarks.result import Row, compare
from shoal.checkpoint import Checkpointer

STATE_BYTES, TINY_BYTES = 500_000_000, 1_000_000
BAR = 0.1


def measure(setting: Setting) -> Iterator[Row]:
    size_bytes, device = setting.choose(STATE_BYTES, TINY_BYTES), setting.device
    training = Training(size_bytes, device)
    for _ in range(3):
        training.step()
    stalls: dict[str, list[float]] = {"ours": [], "peer": [], "until": [], "slower": []}
    with scratch() as folder, Checkpointer(folder / "ours") as checkpointer:
        checkpointer.prepare(training.state())

        def save_in_background() -> None:
            checkpointer.save(number, training.state(), later=["optimizer"])
            training.step(checkpointer.wait_until_copied)

        def save_at_once() -> None:
            torch.save(training.state(), folder / "peer.pt")
            training.step()

        for number in range(setting.rounds + 1):
            if number > MIN_ROUNDS - 1 and time.monotonic() > setting.ends_s:
                break
            step_ms = statistics.median(time_ms(training.step, device) for _ in range(7))
            late_ms = time_ms(save_at_once, device) - step_ms
            began_s = time.perf_counter()
            stall_ms = time_ms(save_in_background, device) - step_ms
            during = [time_ms(training.step, device)]
            while checkpointer.is_saving:
                during.append(time_ms(training.step, device))
            until_ms = 1e3 * (time.perf_counter() - began_s)
            checkpointer.wait()
            if number:
                found = (stall_ms, late_ms, until_ms, statistics.median(during) / step_ms)
                for values, value in zip(stalls.values(), found, strict=True):
                    values.append(value)
    size = f"{size_bytes / 1e6:.0f} MB of state on a GPU"
    until, slower = statistics.median(stalls["until"]), statistics.median(stalls["slower"])
    note = f"a step takes {step_ms:.1f} ms; {slower:.2f} times as long until the checkpoint is there, {until:.0f} ms"
    name = f"stall of a checkpoint, {size}"
    yield compare(name, "ms", "lower", stalls["ours"], stalls["peer"], "torch.save", BAR, "ratio", note)
