"""Seconds until CartPole-v1 is solved: our whole loop beside the PPO of stable-baselines3, of sbx and of RLlib.

    python -m benchmarks.time_to_solve [--runs N] [--quick] [--only SIDE ...]

Solved: a mean return of at least 475 over the last 100 finished training episodes. The clock runs from the first step
(ours: from the first segment that the gateway receives) and leaves out every start-up. Ours is what a user types,
`shoal run actor_learner --actors 4`, with the defaults, on a cluster that it starts: gateway, learner and endpoint are
Ray workers, the actors four processes of their own. It is also measured without Ray. The peer of torch runs with its
default threads and with one, and the better median counts; the time of the one of JAX includes its compilation. RLlib,
which takes minutes, runs with every third seed. A run that does not solve it in time counts with the cap, and the note
says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.children import OUR_PYTHON, PEERS_PYTHON, SBX_PYTHON, Child, ChildFailed, scratch
from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import Row, compare, options, write

TARGET = 475.0
CAP_S, QUICK_CAP_S = 90.0, 30.0
RLLIB_CAP_S = 300.0  # longer: a cap is a lower bound
START_TIMEOUT_S = 120.0
NUM_ACTORS = 4
SB3_BAR, SBX_BAR, RLLIB_BAR = 0.5, 1.0, 0.05


class Solved(NamedTuple):
    """One attempt; `seconds` is the cap when it was not solved. Where known, `points` are steps and mean returns, and
    `lag` the mean age of batches, in versions of the weights."""

    seconds: float
    steps: int
    solved: bool
    points: tuple[tuple[int, float], ...] = ()
    lag: float = 0.0


def ours_on_ray(seed: int, folder: Path, cap_s: float) -> Solved:
    """`shoal run`, and what its record says."""
    home = folder / f"home-{seed}"
    words = [str(Path(OUR_PYTHON).parent / "shoal"), "run", "actor_learner", "--actors", str(NUM_ACTORS), "--plain"]
    words += ["--address", "local", f"learner.seed={seed}", f"target_return={TARGET}", f"max_wall_s={cap_s}"]
    words += ["eval_episodes=1"]
    with Child(words, folder, {"SHOAL_HOME": str(home)}, goodbye_s=0.0) as child:
        status = child.wait(2 * START_TIMEOUT_S + cap_s)
        output = "\n".join(child.output)
    os.environ["SHOAL_HOME"] = str(home)
    import shoal.runs

    runs = shoal.runs.list_runs()
    if not runs:
        raise ChildFailed(f"`shoal run` ended with status {status} and left no record: {child.last_words()}")
    events = {event["kind"]: event["details"] for event in runs[0].events().to_dict("records")}
    if "solved" not in events:
        if "the target is" not in output:
            raise ChildFailed(f"`shoal run` ended with status {status}: {child.last_words()}")
        return Solved(cap_s, int(runs[0].latest().get("steps/total", 0)), False)
    return Solved(events["solved"]["seconds"], events["solved"]["steps"], True)


def ours_without_ray(seed: int, folder: Path, cap_s: float) -> Solved:
    """The same gateway and learner in one process."""
    with (
        run_of("local", folder, words=[f"learner.seed={seed}"], target_return=TARGET) as (run, address),
        actors_of(folder, NUM_ACTORS, ["--connect", address]),
    ):
        return read_outcome(run.ask(cap_s + 30.0, do="solved", timeout_s=cap_s), cap_s)


def sb3(seed: int, folder: Path, cap_s: float, torch_threads: int | None = None, library: str = "") -> Solved:
    setting = {"algorithm": "ppo", "env": "CartPole-v1", "seed": seed, "target": TARGET, "cap_s": cap_s}
    setting |= {"torch_threads": torch_threads, "library": library or "stable_baselines3"}
    python = SBX_PYTHON if library == "sbx" else PEERS_PYTHON
    with Child([python, "-m", "benchmarks.peers.sb3", json.dumps(setting)], folder) as child:
        return read_outcome(child.answer(START_TIMEOUT_S + cap_s), cap_s)


def sb3_one_thread(seed: int, folder: Path, cap_s: float) -> Solved:
    return sb3(seed, folder, cap_s, torch_threads=1)


def sbx(seed: int, folder: Path, cap_s: float) -> Solved:
    return sb3(seed, folder, cap_s, library="sbx")


def rllib(seed: int, folder: Path, cap_s: float) -> Solved:
    ray_folder = folder / f"ray-{seed}"
    setting = {"algorithm": "ppo", "seed": seed, "target": TARGET, "cap_s": cap_s, "folder": str(ray_folder)}
    words = [PEERS_PYTHON, "-m", "benchmarks.peers.rllib", json.dumps(setting)]
    with Child(words, folder, ray_folder=ray_folder) as child:
        return read_outcome(child.answer(START_TIMEOUT_S + cap_s), cap_s)


def read_outcome(said: dict[str, Any], cap_s: float) -> Solved:
    solved = bool(said.get("solved", said["seconds"] is not None))
    points = tuple((steps, mean_return) for steps, mean_return in said.get("points", ()))
    seconds = float(said["seconds"]) if solved else cap_s
    return Solved(seconds, int(said["steps"]), solved, points, float(said.get("lag", 0.0)))


SIDES: dict[str, Callable[[int, Path, float], Solved]] = {
    "ours": ours_on_ray,
    "sb3": sb3,
    "local": ours_without_ray,
    "sb3, one thread": sb3_one_thread,
    "sbx": sbx,
    "rllib": rllib,
}


def rows_of(found: dict[str, list[Solved]]) -> list[Row]:
    """The headline with Ray, against each peer that ran, and the same without Ray: seconds, and environment steps."""
    of_torch = [side for side in ("sb3", "sb3, one thread") if found[side]]
    best = min(of_torch, key=lambda side: median(one.seconds for one in found[side]), default="sb3")
    peers = (
        (best, "stable-baselines3 PPO", SB3_BAR),
        ("sbx", "sbx PPO", SBX_BAR),
        ("rllib", "RLlib PPO", RLLIB_BAR),
    )
    rows = []
    for side, title in (("ours", "CartPole-v1 solved"), ("local", "CartPole-v1 solved (one process, no Ray)")):
        for peer, name, bar in peers:
            ours, theirs = found[side], found[peer]
            if not ours or not theirs:
                continue
            note = "; ".join(filter(None, (note_unsolved("Shoal", ours), note_unsolved(name, theirs))))
            rows += [
                compare(
                    title, "s", "lower", [one.seconds for one in ours], [one.seconds for one in theirs], name,
                    bar, "ratio", note,
                ),
                compare(
                    f"{title}, environment steps", "steps", "lower", [float(one.steps) for one in ours],
                    [float(one.steps) for one in theirs], name, note=note,
                ),
            ]  # fmt: skip
    return rows


def note_unsolved(name: str, attempts: list[Solved]) -> str:
    unsolved = [one for one in attempts if not one.solved]
    if not unsolved:
        return ""
    return (
        f"{name} did not solve it in {len(unsolved)} of {len(attempts)} runs: {unsolved[0].seconds:.0f} s"
        f" ({unsolved[0].steps:,} steps) stand for those, a lower bound"
    )


def main() -> None:
    chosen = options(__doc__, runs=5, only=tuple(SIDES))
    found: dict[str, list[Solved]] = {side: [] for side in SIDES}
    with scratch() as folder:
        for seed in range(chosen.runs):
            for side in chosen.only:
                if side == "rllib" and seed % 3:
                    continue  # it takes minutes
                cap_s = QUICK_CAP_S if chosen.quick else RLLIB_CAP_S if side == "rllib" else CAP_S
                outcome = SIDES[side](seed, folder, cap_s)
                found[side].append(outcome)
                verdict = "solved" if outcome.solved else "NOT solved"
                print(f"seed {seed}, {side}: {verdict}, {outcome.seconds:.2f} s, {outcome.steps:,} steps", flush=True)
    write("time_to_solve", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
