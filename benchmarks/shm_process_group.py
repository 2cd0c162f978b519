"""Whether CPU ranks of one host should sum by a process group of torch.distributed in shared memory: what a step costs.

    python -m benchmarks.shm_process_group [--runs N] [--quick]

A perceptron (784-256-256-10) and LeNet, two ranks of one thread, a global batch of 64, Adam. Seven loops take turns of
20 steps within the same two processes, in an order drawn anew for each turn. Nothing has a bar: this is the evidence of
docs/decisions/015, and `benchmarks.ours.shm_process_group` is the experiment.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.ours.shm_process_group import PEERS
from benchmarks.result import Row, compare, options, write

MODELS = {"mlp": "perceptron", "lenet": "LeNet"}
NAMES = {
    "ddp group": ("torch's DDP through a process group in shared memory", "through gloo"),
    "plan group": ("the plan `ddp` by torch's DDP through that group", "the plan as it is"),
    "plan flat": ("the plan `ddp` with its own sum through that group", "the plan as it is"),
    "fsdp group": ("FSDP2 through that group", "through gloo"),
}
Found = dict[str, dict[str, list[float]]]  # clock -> loop -> seconds of a step, in each turn


def measure(model: str, num_turns: int, folder: Path) -> Found:
    """What one group of processes found."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [OUR_PYTHON, *torchrun, "-m", "benchmarks.ours.shm_process_group", model, str(num_turns)]
    with Child(words, folder, {"OMP_NUM_THREADS": "1"}, goodbye_s=20.0) as child:
        return child.answer(600.0)


def row_of(model: str, loop: str, found: list[Found]) -> Row:
    """Medians over the turns of each run; the note has what a busy machine cannot change."""

    def medians_ms(clock: str, of: str) -> list[float]:
        return [1e3 * statistics.median(run[clock][of]) for run in found]

    name, peer = NAMES[loop]
    pairs = [pair for run in found for pair in zip(run["wall"][loop], run["wall"][PEERS[loop]], strict=True)]
    turns = [mine / other for mine, other in pairs]
    ours_cpu_ms, peer_cpu_ms = (statistics.median(medians_ms("cpu", each)) for each in (loop, PEERS[loop]))
    note = (
        f"median of the ratios of {len(turns)} pairs of turns {statistics.median(turns):.2f}; processor time of rank 0 "
        f"{ours_cpu_ms:.2f} ms, {peer} {peer_cpu_ms:.2f}, ratio {ours_cpu_ms / peer_cpu_ms:.2f}"
    )
    ours, theirs = medians_ms("wall", loop), medians_ms("wall", PEERS[loop])
    return compare(f"step of {MODELS[model]}, {name}", "ms", "lower", ours, theirs, peer, note=note)


def main() -> None:
    chosen = options(__doc__, runs=5)
    found: dict[str, list[Found]] = {model: [] for model in MODELS}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for model, runs in found.items():
                runs.append(measure(model, 3 if chosen.quick else 16, folder))
    write(
        "shm_process_group", [row_of(model, loop, found[model]) for model in MODELS for loop in PEERS], chosen.results
    )


if __name__ == "__main__":
    main()
