"""Mean return after a number of learnt steps by `gateway.max_version_lag`, with a learner slower than its actors.

    python -m benchmarks.version_lag [--runs N] [--quick] [--only ALGORITHM ...]

CartPole-v1 without Ray. The learner pauses after each batch, as one with a larger network would, and the queue holds 80
batches. Four actors fill it, so experience is as old as `max_version_lag` lets it be; what is older is dropped. The
mean return is that of the last 100 episodes, which actors play with new weights, when 60,000 steps have been learnt
from. Draws docs/pictures/version_lag.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT, scratch
from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import RESULTS, Row, compare, options, write

PICTURE = ROOT / "docs" / "pictures" / "version_lag.png"
LAGS = (0, 1, 4, 16, 64)
NUM_ACTORS, NUM_STEPS, QUICK_STEPS = 4, 60_000, 4_000
PAUSE_S, CAP_S = 0.05, 120.0
BATCH, SEGMENT, BATCHES_IN_QUEUE = 512, 64, 80
WORDS = (
    f"segment_length={SEGMENT}",
    f"learner.batch_steps={BATCH}",
    f"learner.max_batch_steps={BATCH}",
    "learner.publish_interval_s=0",
    f"gateway.queue_capacity={BATCHES_IN_QUEUE * BATCH // SEGMENT}",
)
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "impala": (),
    "ppo": ("algorithm=ppo", "algorithm.discount=0.98"),
}

Found = dict[str, Any]


def learn(algorithm: str, lag: int, seed: int, folder: Path, num_steps: int) -> Found:
    words = [*ALGORITHMS[algorithm], *WORDS, f"gateway.max_version_lag={lag}", f"learner.seed={seed}"]
    with (
        run_of("local", folder, words=words, pause_s=PAUSE_S) as (run, address),
        actors_of(folder, NUM_ACTORS, ["--connect", address]),
    ):
        return run.ask(CAP_S + 30.0, do="learnt", steps=num_steps, timeout_s=CAP_S)


def row_of(algorithm: str, lag: int, found: list[Found]) -> Row:
    """Mean returns of the seeds; the note has the age of experience and the share that was dropped."""
    dropped = [sum(one["segments"]["dropped"].values()) / max(1, one["segments"]["received"]) for one in found]
    note = f"{statistics.median(one['lag'] for one in found):.1f} versions old in the mean"
    note += f", {statistics.median(dropped):.0%} of the segments dropped"
    early = sum(one["steps"] < NUM_STEPS for one in found)
    note += f"; {early} runs ended before, after {CAP_S:g} s" if early else ""
    title = f"{algorithm.upper()}, max_version_lag {lag}"
    return compare(title, "return", "higher", [one["mean_return"] for one in found], note=note)


def draw(rows: Mapping[tuple[str, int], Row], path: Path) -> None:
    """Median return against the largest lag, a line for each algorithm, with the range of the seeds."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.0, 3.2), layout="constrained")
    for algorithm in dict.fromkeys(name for name, _ in rows):
        spreads = [rows[algorithm, lag].runs["ours"] for lag in LAGS]
        (line,) = axis.plot(range(len(LAGS)), [each["median"] for each in spreads], "o-", label=algorithm.upper())
        lows, highs = [each["min"] for each in spreads], [each["max"] for each in spreads]
        axis.fill_between(range(len(LAGS)), lows, highs, color=line.get_color(), alpha=0.15)
    axis.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
    axis.set_xlabel("gateway.max_version_lag, with a slow learner")
    axis.set_ylabel(f"mean return after {NUM_STEPS // 1000},000 steps")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    chosen = options(__doc__, runs=5, only=tuple(ALGORITHMS))
    found: dict[tuple[str, int], list[Found]] = {}
    with scratch() as folder:
        for seed in range(chosen.runs):
            for algorithm in chosen.only:
                for lag in LAGS:
                    one = learn(algorithm, lag, seed, folder, QUICK_STEPS if chosen.quick else NUM_STEPS)
                    found.setdefault((algorithm, lag), []).append(one)
                    print(f"seed {seed}, {algorithm}, lag {lag}: {one}", flush=True)
    rows = {key: row_of(*key, each) for key, each in found.items()}
    write("version_lag", list(rows.values()), chosen.results)
    draw(rows, PICTURE if chosen.results == RESULTS else chosen.results / "version_lag.png")


if __name__ == "__main__":
    main()
