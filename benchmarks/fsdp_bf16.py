"""A step of a sharded decoder in bf16, on two ranks, beside a bare loop with `fully_shard`.

    python -m benchmarks.fsdp_bf16 [--runs N] [--quick]

29.5 million parameters (8 blocks, 512 wide), 8 sequences of 64 tokens a step, AdamW, one core each rank. The bare loop
has torch's `MixedPrecisionPolicy` (bf16 weights, sums in fp32). All sides take turns, a step each, within the same
processes (`benchmarks.ours.fsdp_steps`). A run counts with the fastest quarter of its steps, since others use
the machine. Processor seconds are those of both ranks.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write

BAR = 1.03


def measure(num_steps: int, folder: Path) -> dict[str, Any]:
    """What rank 0 of one pair of processes says."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [OUR_PYTHON, *torchrun, "-m", "benchmarks.ours.fsdp_steps", str(num_steps)]
    with Child(words, folder, {"OMP_NUM_THREADS": "1"}, goodbye_s=20.0) as child:
        return child.answer(900.0)


def _average_fastest_ms(spent_s: list[float]) -> float:
    return 1e3 * statistics.mean(sorted(spent_s)[: max(1, len(spent_s) // 4)])


def _compare_processor_time(found: list[dict[str, Any]]) -> Row:
    times = {name: [_average_fastest_ms(each["cpu_s"][name]) for each in found] for name in ("bf16_params", "bare")}
    name = "processor seconds of a step of fsdp over 2, precision=bf16_params"
    return compare(name, "ms", "lower", times["bf16_params"], times["bare"], "a bare loop with bf16 weights")


def main() -> None:
    chosen = options(__doc__, runs=3)
    with scratch() as folder:
        found = [measure(2 if chosen.quick else 12, folder) for _ in range(chosen.runs)]
    times = {name: [_average_fastest_ms(each["spent_s"][name]) for each in found] for name in found[0]["spent_s"]}
    ratios = [mine / other for mine, other in zip(times["bf16_params"], times["bare"], strict=True)]
    losses = found[-1]["losses"]
    rows: list[Row] = []
    for name, bar in (("bf16_params", BAR), ("bf16", None), ("fp32", None)):
        note = ""
        if bar is not None:
            note = f"the loss at the end {losses[name]:.4f}, of the bare loop {losses['bare']:.4f}"
            note += f"; ratios of the runs from {min(ratios):.3f} to {max(ratios):.3f}"
        rows.append(
            compare(
                f"a step of fsdp over 2, precision={name}", "ms", "lower", times[name], times["bare"],
                "a bare loop with bf16 weights", bar, "ratio" if bar is not None else None, note,
            )
        )  # fmt: skip
    rows.append(_compare_processor_time(found))
    write("fsdp_bf16", rows, chosen.results)


if __name__ == "__main__":
    main()
