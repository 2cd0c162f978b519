"""Training without waiting: four workers with stragglers, free-running and SSP beside BSP.

    python -m benchmarks.asynchronous [--runs N] [--quick]

Steps sleep 20 ms: on two cores a straggler that computes would take the others' processor, and the ratio would lie.
The ideal is what the sleeping alone allows. With one of four workers four times slower: (3 + 1/4) / (4 * 1/4) = 3.25
times the rate of BSP. With each step four times slower with probability 0.1: E[max of 4] / E = 1.56. Rates are of the
steps that the chief reports, without the first second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.asynchronous.replicas import fit_replicas
from shoal.train.spec import TrainSpec

TASK = f"{Path(__file__).parent / 'ours' / 'sleeping_task.py'}:SleepingTask"
BATCH_SIZE, WARM_UP_S = 64, 1.0
STRAGGLER = {"slowest": 4.0}
RANDOM = {"probability": 0.1}
SETTINGS: tuple[tuple[str, dict[str, float], int | None, float], ...] = (
    ("one of four workers 4 times slower, free-running", STRAGGLER, None, 2.8),
    ("each step 4 times slower with probability 0.1, SSP(4)", RANDOM, 4, 1.35),
)


class Rates:
    """An event log that keeps when each step was reported, and the newest event of each kind.

    warm_up_s: after the first report, which do not count
    """

    def __init__(self, batch_size: int, warm_up_s: float) -> None:
        self._batch_size, self._warm_up_s = batch_size, warm_up_s
        self.reports: list[tuple[float, int]] = []
        self.events: dict[str, dict[str, Any]] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.reports.append((time.perf_counter(), step))

    def record_event(self, kind: str, /, **details: Any) -> None:
        self.events[kind] = details

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Not kept."""

    def flush(self) -> None:
        """Nothing is waiting."""

    def samples_per_s(self) -> float:
        began_s = self.reports[0][0] + self._warm_up_s
        later = [(at_s, step) for at_s, step in self.reports if at_s >= began_s]
        (first_s, first), (last_s, last) = later[0], later[-1]
        return self._batch_size * (last - first) / (last_s - first_s)


def measure(
    args: dict[str, float], staleness: int | None, seconds: float, folder: Path
) -> tuple[float, dict[str, int]]:
    """Samples a second, and how often each τ was seen."""
    spec = TrainSpec.parse(
        {
            "task": TASK, "args": args, "workers": 4, "batch_size": BATCH_SIZE, "threads": 1, "log_every_steps": 1,
            "sync": {"kind": "parameter_server", "staleness": staleness}, "stop": {"wall_s": seconds},
        }
    )  # fmt: skip
    log = Rates(BATCH_SIZE, WARM_UP_S)
    fit_replicas(spec, "benchmark", folder, log, lambda: False)
    return log.samples_per_s(), log.events["staleness"]["counts"]


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 4.0 if chosen.quick else 12.0
    rows: list[Row] = []
    for name, args, staleness, bar in SETTINGS:
        ours, waiting, seen = [], [], {}
        for run in range(chosen.runs):
            for side, bound in (("ours", staleness), ("bsp", 0)) if run % 2 else (("bsp", 0), ("ours", staleness)):
                with scratch() as folder:
                    rate, counts = measure(args, bound, seconds, folder)
                if side == "ours":
                    ours.append(rate)
                    seen = counts
                else:
                    waiting.append(rate)
        print(name, ours, waiting, seen, flush=True)
        note = f"staleness of the updates: at most {max(map(int, seen))}"
        rows.append(
            compare(f"{name}: samples a second", "samples/s", "higher", ours, waiting, "BSP", bar, "ratio", note)
        )
    write("asynchronous", rows, chosen.results)


if __name__ == "__main__":
    main()
