"""Losses without `shoal.Mean` in runs that split batches: whether any is silent and wrong, and what a plain mean costs.

    python -m benchmarks.unmarked_losses [--runs N] [--quick]

The first row counts the trainings that are silent and wrong, or not finite where the whole batch is finite, of six
losses that do not divide by the number of samples, each under 200 random orders of labels, batch sizes and numbers of
micro-batches. The others have the CPU time of a step of LeNet with what finds such losses, beside the same step without
it, step after step in one process.
"""

from __future__ import annotations

from collections import Counter

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.ours.random_splits import LOSSES, judge_micro_batches
from benchmarks.result import Row, compare, options, write

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WAYS: dict[str, tuple[str, ...]] = {"four micro-batches": (), "ddp, 2 ranks": TORCHRUN}
BAR = 1.01


def count_wrong(num_draws: int) -> Row:
    verdicts = {name: Counter(judge_micro_batches(name, seed) for seed in range(num_draws)) for name in LOSSES}
    wrong = float(sum(each["wrong"] + each["not finite"] for each in verdicts.values()))
    note = "; ".join(f"{name}: {dict(each)}" for name, each in verdicts.items())
    title = f"silent and wrong, {num_draws} random orders, batches and splits of {len(LOSSES)} losses"
    return compare(title, "", "lower", [wrong], bar=0.0, bar_kind="value", note=note)


def main() -> None:
    chosen = options(__doc__, runs=5)
    rows = [count_wrong(20 if chosen.quick else 200)]
    print(rows[0].name, rows[0].ours, rows[0].note, flush=True)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for loss in ("mse_loss", "cross_entropy"):
        for way, words in WAYS.items():
            values: dict[str, list[float]] = {"ours": [], "before": []}
            for _ in range(chosen.runs):
                command = [
                    OUR_PYTHON,
                    *words,
                    "-m",
                    "benchmarks.ours.plain_loss_steps",
                    loss,
                    "40" if chosen.quick else "200",
                ]
                with scratch() as folder, Child(command, folder, env, goodbye_s=20.0) as child:
                    for side, seconds in child.answer(300.0).items():
                        values[side].append(seconds * 1e3)
            title = f"CPU time of a step, LeNet, {loss}, {way}"
            rows.append(compare(title, "ms", "lower", values["ours"], values["before"], "without", BAR, "ratio"))
            print(title, values, flush=True)
    write("unmarked_losses", rows, chosen.results)


if __name__ == "__main__":
    main()
