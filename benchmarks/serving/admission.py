"""More than a server can do: answers within 100 ms at 1.2 times the capacity, with and without admission by deadline.

    python -m benchmarks.serving.admission [--runs N] [--quick]

The model takes 20 ms + 0.5 ms a row, at most 32: 889 requests a second with full batches. With a deadline of 100 ms the
endpoint refuses at once what cannot make it; without, every request waits for those before it, and none is in time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import Outcome, poisson
from benchmarks.serving.oracle import CAPACITY
from benchmarks.serving.servers import MOSEC, OURS, RAY_SERVE, server_of

OBJECTIVE_S = 0.100
LOAD = 1.2
BAR = 0.9
WITH, WITHOUT = "with admission", "without admission"
# On the same machine the answer has a way to go after the forward: the deadline is that much before the objective.
WAY_S = 0.005
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    WITH: (OURS, {"model": {"deadline_s": OBJECTIVE_S - WAY_S}}),
    WITHOUT: (OURS, {}),
    MOSEC: (MOSEC, {}),
    RAY_SERVE: (RAY_SERVE, {}),
}


def measure(mode: str, folder: Path, seconds: float, seed: int) -> Outcome:
    """One open loop above the capacity."""
    name, settings = MODES[mode]
    with server_of(name, "sleeper", folder, **settings) as server:
        outcome = poisson(folder, server.target(), LOAD * CAPACITY, seconds, 2.0, seed)
    print(f"{mode}: {outcome.goodput(OBJECTIVE_S):,.0f}/s within the objective; {outcome.line()}", flush=True)
    return outcome


def rows_of(found: dict[str, list[Outcome]]) -> list[Row]:
    """Goodput as a share of the capacity; the bar is for admission."""
    shares = {mode: [one.goodput(OBJECTIVE_S) / CAPACITY for one in runs] for mode, runs in found.items()}
    title = f"goodput within {1e3 * OBJECTIVE_S:.0f} ms at {LOAD:g} times the capacity, over the capacity"
    others = [mode for mode in MODES if mode != WITH]
    bars = [BAR, *[None] * (len(others) - 1)]
    return [
        compare(title, "", "higher", shares[WITH], shares[mode], mode, bar, "value" if bar else None)
        for mode, bar in zip(others, bars, strict=True)
    ]


def main() -> None:
    chosen = options(__doc__, runs=3)
    found: dict[str, list[Outcome]] = {}
    with scratch() as folder:
        for seed in range(chosen.runs):
            for mode in MODES:
                found.setdefault(mode, []).append(measure(mode, folder, 3.0 if chosen.quick else 10.0, seed))
    write("serving_admission", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
