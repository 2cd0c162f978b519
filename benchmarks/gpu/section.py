"""One section in a process of its own: says each row as soon as it is measured, and at the end that it is done.

    python -m benchmarks.gpu.section NAME DEVICE ROUNDS BEGUN_S LIMIT_S

Started by `benchmarks.gpu` at BEGUN_S of time.monotonic(), which ends it after LIMIT_S. What a section has said counts,
however it ends; one that hangs leaves its stack in the log.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import time
from dataclasses import asdict, replace

import torch

from benchmarks.gpu.turns import Setting
from benchmarks.talk import say

SHARE = 0.8  # of the time, after which no further round begins
LAST_S = 1.5  # before the end, when the stack is written


def main(name: str, device: str, rounds: int, begun_s: float, limit_s: float) -> None:
    faulthandler.dump_traceback_later(max(1.0, begun_s + limit_s - LAST_S - time.monotonic()))
    chosen = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    setting = Setting(chosen, rounds, begun_s + SHARE * limit_s)
    for row in importlib.import_module(f"benchmarks.gpu.{name}").measure(setting):
        say(row=asdict(replace(row, bar=None, bar_kind=None) if setting.is_tiny else row))
    say(done=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
