"""Games of 16 and 256 agents that act in one message, with a real learner, and every step in the ledger.

    python -m benchmarks.agents_in_one_message [--runs N] [--quick]

The game is Catch, by the client of C++ (`clients/cpp`, built here by g++) over WebSocket. With a clock, a game asks for
250 rounds a second, which are 64,000 steps of 256 agents; without, it asks for the next round at once, and its rate is
that of the slowest of game, gateway and learner. Gateway, learner and game have a process each.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write

GAMES = {"256 agents, 250 rounds/s": (256, 250), "256 agents": (256, 0), "16 agents": (16, 0)}
EPISODE_STEPS = 25


def build(folder: Path) -> Path:
    """The game, compiled."""
    program = folder / "catch_agents"
    source = ["-I", "clients/cpp", "benchmarks/ours/catch_agents.cpp"]
    subprocess.run(["g++", "-O2", "-std=c++17", "-o", str(program), *source], cwd=ROOT, check=True, timeout=300)
    return program


def measure(program: Path, num_agents: int, rounds: int, seconds: float) -> dict[str, float]:
    """One run. Raises where a step that the game has taken is not in the ledger."""
    command = [OUR_PYTHON, "-m", "benchmarks.ours.agents_server", str(seconds), "--", str(program)]
    done = subprocess.run(
        [*command, str(num_agents), str(seconds), str(rounds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds + 120,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert found["counted_steps"] == EPISODE_STEPS * found["episodes"], found
    return found


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 4.0 if chosen.quick else 10.0
    found = defaultdict[str, list[dict[str, float]]](list)
    with scratch() as folder:
        program = build(folder)
        for number in range(chosen.runs):
            for name, game in GAMES.items():
                found[name].append(measure(program, *game, seconds))
                print(f"run {number + 1}, {name}: {found[name][-1]}", flush=True)
    rows = []
    for name, runs in found.items():
        bars = (60_000.0, 10.0) if "rounds" in name else (None, None)
        kind = "value" if "rounds" in name else None
        rates, tails = [each["steps_s"] for each in runs], [each["p99_ms"] for each in runs]
        costs = [each["process_us"] for each in runs]
        share = min(each["learnt_share"] for each in runs)
        note = f"learnt before the end, at least: {share:.1%} of the segments; the others were queued"
        rows += [
            compare(f"{name} in one message", "steps/s", "higher", rates, bar=bars[0], bar_kind=kind, note=note),
            compare(f"{name}: p99 of a round", "ms", "lower", tails, bar=bars[1], bar_kind=kind),
            compare(f"{name}: gateway's processor time a step", "us", "lower", costs),
        ]
    write("agents_in_one_message", rows, chosen.results)


if __name__ == "__main__":
    main()
