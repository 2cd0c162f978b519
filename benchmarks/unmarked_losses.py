"""Losses without `shoal.Mean` in runs that split batches: whether any is silent and wrong, and what a plain mean costs.

    python -m benchmarks.unmarked_losses [--runs N] [--quick]

The first rows count the trainings, of 77 losses under 600 random orders of labels, batch sizes and splits a run (3,000
by default), that are silent and wrong, that end as not finite where the whole batch is finite, or that are refused
though their weights would have been equal. One in ten is split over two ranks, by ddp, fsdp or a pipeline. The others
have the CPU time of a step of LeNet with what finds such losses, beside the same step without it, step after step in
one process.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.ours.hidden_losses import LOSSES
from benchmarks.result import Row, compare, options, write

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WAYS: dict[str, tuple[str, ...]] = {"four micro-batches": (), "ddp, 2 ranks": TORCHRUN}
BAR = 1.01


def count_verdicts(num_draws: int, first: int, words: tuple[str, ...], env: dict[str, str]) -> Counter[tuple[str, str]]:
    """By loss and verdict."""
    command = [OUR_PYTHON, *words, "-m", "benchmarks.ours.random_splits", str(first), str(first + num_draws)]
    with scratch() as folder, Child(command, folder, env, goodbye_s=20.0) as child:
        counted = child.answer(3600.0)
    return Counter({(name, verdict): n for name, each in counted.items() for verdict, n in each.items()})


def judge_draws(num_draws: int, env: dict[str, str]) -> list[Row]:
    parts: list[tuple[int, int, tuple[str, ...]]] = [(num_draws * 9 // 10, 0, ()), (num_draws // 10, 100_000, TORCHRUN)]
    with ThreadPoolExecutor() as pool:
        verdicts = sum(
            pool.map(lambda part: count_verdicts(part[0], part[1], part[2], env), parts), Counter[tuple[str, str]]()
        )
    sums = Counter[str]()
    for (_, verdict), number in verdicts.items():
        sums[verdict] += number
    note = "; ".join(f"{verdict}: {number}" for verdict, number in sorted(sums.items()))
    named = ", ".join(sorted({name for name, verdict in verdicts if verdict in ("wrong", "not finite")}))
    title = f"of {sum(sums.values()):,} random orders, batches and splits of {len(LOSSES)} losses"
    refused = 100.0 * sums["refused though right"] / sum(sums.values())
    return [
        compare(f"silent and wrong, {title}", "", "lower", [sums["wrong"]], bar=0.0, bar_kind="value", note=note),
        compare(f"refused though right, {title}", "%", "lower", [refused], bar=2.0, bar_kind="value"),
        compare(f"not finite, said so, {title}", "", "lower", [sums["not finite"]], note=named),
    ]


def main() -> None:
    chosen = options(__doc__, runs=5)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    rows = judge_draws(100 if chosen.quick else 600 * chosen.runs, env)
    for row in rows:
        print(row.name, row.ours, row.note, flush=True)
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
