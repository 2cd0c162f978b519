"""Flaws that are built in (see `flaws`): whether a campaign finds them, and the fewest faults that still show them.

    python -m benchmarks.chaos.flawed [--runs SEEDS] [--only forget lose mix]

A seed is counted when it touches the flaw: forget needs a gateway that is killed once a segment was learnt, lose a rank
that is killed once there were two checkpoints; mix nothing, since each version of the loop is a swap.
"""

from __future__ import annotations

from benchmarks.chaos.campaigns import LOOP, SAVING, TRAINING, House
from benchmarks.children import ROOT, scratch
from benchmarks.result import Row, compare, options, write

NUM_FAULTS, SHORTER, MOST_FAULTS = 5, 6, 3
FLAWS = {
    "forget": (*LOOP, "--kind", "kill", "--target", "gateway", "--target", "actor", "--target", "learner"),
    "lose": ("run", "train", *TRAINING, *SAVING, "parallel=ddp", "--kind", "kill", "--target", "rank"),
    "mix": (*LOOP, "--kind", "kill", "--kind", "pause", "--target", "actor", "--target", "replica"),
}


def main() -> None:
    chosen = options(__doc__, runs=2, only=tuple(FLAWS))
    rows: list[Row] = []
    for flaw in chosen.only:
        left: list[float] = []
        missed = 0
        for seed in range(chosen.runs):
            with scratch() as folder:
                house = House(folder, {"SHOAL_FLAW": flaw, "PYTHONPATH": str(ROOT / "benchmarks" / "chaos" / "flaws")})
                words = ("--seed", str(seed), "--faults", str(NUM_FAULTS), "--shorten", str(SHORTER))
                found = house.chaos(*FLAWS[flaw], *words)
            broken = [each["name"] for each in found["promises"] if not each["is_satisfied"]]
            num_left = len(found["faults"])
            print(f"{flaw}, seed {seed}: {broken}, {num_left} of {len(found['strikes'])} faults", flush=True)
            missed += not broken
            left += [num_left] if broken else []
        title = f"chaos, the flaw {flaw!r}"
        rows.append(compare(f"{title}: seeds that have not found it", "", "lower", [missed], bar=0, bar_kind="value"))
        rows.append(
            compare(f"{title}: faults that still show it", "", "lower", left, bar=MOST_FAULTS, bar_kind="value")
        )
    write("chaos_flawed", rows, chosen.results)


if __name__ == "__main__":
    main()
