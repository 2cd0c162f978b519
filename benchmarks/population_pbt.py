"""Population based training of 30 LeNets on Fashion-MNIST: in one process, beside Ray Tune's, at equal member-steps.

    python -m benchmarks.population_pbt [--runs N] [--rounds N] [--quick] [--only SIDE ...]

Both sides have the space, the rounds, the quantiles and the probabilities of `evolution=pbt`; the same batches' size,
augmentations and score: the accuracy on the first 4,000 test images, by which members are selected too. The peer's
clock starts after ray.init, ours before the spec is checked; ours ends with the registered network and the report. An
exploit of the peer's: trials that compute nothing, from the first result to the last, under PBT less under FIFO, by the
number of exploits. Rows beside Tune are in population_pbt.json, those beside random search in population_search.json.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write

PEER = "Ray Tune PBT"
TIMEOUT_S = 3600.0
EVOLUTIONS = ("pbt", "random_search")
TUNE = "tune"


def ask(words: list[str], folder: Path) -> dict[str, Any]:
    """What a child of its own says, in a home of its own."""
    env = {"SHOAL_HOME": str(folder / "home"), "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_TMPDIR": str(folder)}
    with Child([OUR_PYTHON, "-m", *words], folder, env) as child:
        return child.answer(TIMEOUT_S)


def measure_exploits(setting: dict[str, Any], runs: int) -> Row:
    ours, peer, bare = [], [], []
    for _ in range(runs):
        with scratch() as folder:
            found = ask(["benchmarks.ours.population_pbt", "exploit", json.dumps(setting)], folder)
        ours.append(found["seconds"])
        bare.append(found["bare_s"])
        with scratch() as folder:
            given = {**setting, "storage": str(folder / "storage")}
            found = ask(["benchmarks.peers.tune_pbt", "exploit", json.dumps(given)], folder)
        peer.append((found["evolved_s"] - found["plain_s"]) / found["exploits"])
        print(f"exploit: ours {ours[-1]:.2e} s, {PEER} {peer[-1]:.3f} s ({found})", flush=True)
    note = f"a bare copy of the member's weights and momentum: {statistics.median(bare):.1e} s"
    return compare("one exploit step, LeNet-5", "s", "lower", ours, peer, PEER, 1e-4, "ratio", note)


def main() -> None:
    chosen = options(__doc__, runs=3, rounds=20, only=(*EVOLUTIONS, TUNE))
    setting = {"members": 30, "rounds": chosen.rounds, "steps": 100, "batch_size": 64, "score_samples": 4000}
    if chosen.quick:
        setting |= {"members": 6, "rounds": 3, "steps": 10, "score_samples": 500}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen.only}
    for seed in range(chosen.runs):
        for side in chosen.only if seed % 2 == 0 else reversed(chosen.only):
            with scratch() as folder:
                given = json.dumps({**setting, "seed": seed, "storage": str(folder / "storage")})
                words = ["benchmarks.ours.population_pbt", "population", side, given]
                words = ["benchmarks.peers.tune_pbt", "population", given] if side == TUNE else words
                found[side].append(ask(words, folder))
                print(f"seed {seed}, {side}: {found[side][-1]}", flush=True)

    def take(side: str, name: str) -> list[float]:
        return [each[name] for each in found[side]]

    shape = f"{setting['members']} LeNets, {setting['rounds']} rounds of {setting['steps']} steps"
    if {"pbt", TUNE} <= found.keys():
        note = f"of the images that select; equal budgets, {chosen.runs} seeds"
        rows = [
            compare(f"PBT of {shape}: wall time", "s", "lower", take("pbt", "seconds"), take(TUNE, "seconds"), PEER,
                    0.25, "ratio"),
            compare(f"PBT of {shape}: the best member's accuracy", "share", "higher", take("pbt", "accuracy"),
                    take(TUNE, "accuracy"), PEER, 1.0, "ratio", note),
            measure_exploits({**setting, "seed": 0}, chosen.runs),
        ]  # fmt: skip
        write("population_pbt", rows, chosen.results)
    if found.keys() >= {"pbt", "random_search"}:
        note = f"equal budgets, {chosen.runs} seeds; no sign is promised"
        rows = [
            compare(f"pbt of {shape}: the best member's accuracy", "share", "higher", take("pbt", "accuracy"),
                    take("random_search", "accuracy"), "random search", note=note)
        ]  # fmt: skip
        write("population_search", rows, chosen.results)


if __name__ == "__main__":
    main()
