"""Two pipeline stages on one core each, beside one process on one core: samples per second.

    python -m benchmarks.pipeline [--runs N] [--quick]

A decoder-only transformer (8 blocks, 192 wide, 64 tokens; cut where measuring says), 128 sequences a step in 16
micro-batches; the peer is a loop by hand that takes the whole batch at once. Both take turns within the same processes
(`benchmarks.ours.stages`). What two cores can reach at most is 2, less the bubble: 1.88 for 1F1B.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.ours.stages import BATCH
from benchmarks.result import Row, compare, options, write

SCHEDULES = ("1f1b", "interleaved_zero_bubble")
BAR = 1.6


def measure(schedule: str, num_blocks: int, folder: Path) -> dict[str, Any]:
    """What rank 0 of one pair of processes says."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [OUR_PYTHON, *torchrun, "-m", "benchmarks.ours.stages", schedule, str(num_blocks)]
    with Child(words, folder, {"OMP_NUM_THREADS": "1"}, goodbye_s=20.0) as child:
        return child.answer(600.0)


def rows_of(schedule: str, found: list[dict[str, Any]]) -> list[Row]:
    ours = [BATCH / statistics.median(one["ours"]) for one in found]
    peer = [BATCH / statistics.median(one["peer"]) for one in found]
    idle = [100 * one["idle_share"] for one in found]
    predicted = [100 * one["predicted_idle_share"] for one in found]
    cuts = "; ".join(sorted({", ".join(one["cuts"]) for one in found}))
    bar = BAR if schedule == SCHEDULES[0] else None
    return [
        compare(
            f"transformer in two pipeline stages, {schedule}", "samples/s", "higher", ours, peer,
            "one process on one core", bar, "ratio" if bar else None, f"stages begin at {cuts}",
        ),
        compare(
            f"the share of the time in which its ranks wait, {schedule}", "%", "lower", idle, predicted,
            "predicted from the measured times of the stages",
        ),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=5)
    found: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in SCHEDULES}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for schedule in SCHEDULES:
                found[schedule].append(measure(schedule, 1 if chosen.quick else 5, folder))
    write("pipeline", [row for schedule in SCHEDULES for row in rows_of(schedule, found[schedule])], chosen.results)


if __name__ == "__main__":
    main()
