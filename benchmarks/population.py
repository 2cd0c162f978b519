"""Many networks in one process, beside a pool of processes, JAX's vmap, and a loop of modules.

    python -m benchmarks.population [--runs N] [--quick]

30 LeNets, and 30 networks of another shape, on two cores with batches of 64: ours beside the user's pool of two
processes of 15, each with modules of its own, channels last and fused optimizers; and beside jax.jit(vmap). The loop
without a compiler is the engine `looped`. 64 small perceptrons on one core: beside a loop of modules with fused
optimizers. Sides take turns, a few steps of every member at a time; a rate is of member-steps. Memory is what `top`
shows, the resident memory of all processes, of 30 LeNets beside a pool of seven processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, SBX, SBX_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write

MEMBERS, BATCH = 30, 64
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
START_TIMEOUT_S, TIMEOUT_S = 300.0, 300.0


@dataclass(frozen=True)
class Side:
    """Processes that train members together: the words of each, and which Python runs them."""

    processes: tuple[tuple[str, ...], ...]
    python: str = OUR_PYTHON
    environment: Mapping[str, str] | None = None


def ours(
    network: str, optimizer: str, order: str, engine: str = "auto", members: int = MEMBERS, batch: int = BATCH,
    threads: int = 2,
) -> Side:  # fmt: skip
    words = ("benchmarks.ours.population", network, members, batch, optimizer, order, engine, threads)
    return Side((tuple(map(str, words)),), environment=ONE_THREAD)


def pool(network: str, optimizer: str, members: Sequence[int] = (15, 15), batch: int = BATCH) -> Side:
    words = [("benchmarks.peers.solo_members", network, count, batch, optimizer) for count in members]
    return Side(tuple(tuple(map(str, each)) for each in words), environment=ONE_THREAD)


class Team:
    """The running processes of a side."""

    def __init__(self, side: Side, children: Sequence[Child]) -> None:
        self.side, self.children = side, children
        answers = [child.answer(START_TIMEOUT_S) for child in children]
        self.engine = answers[0].get("engine", "")

    def rate(self, members: int, steps: int) -> float:
        """Member-steps a second."""
        for child in self.children:
            child.tell(steps=steps)
        return members * steps / max(child.answer(TIMEOUT_S)["seconds"] for child in self.children)

    def memory_bytes(self) -> int:
        return sum(child.memory_bytes() for child in self.children)


@contextlib.contextmanager
def running(sides: Mapping[str, Side]) -> Iterator[dict[str, Team]]:
    """Every side's processes, idle until a request for steps."""
    with scratch() as folder, contextlib.ExitStack() as stack:
        teams = {}
        for name, side in sides.items():
            words = [[side.python, "-m", *each] for each in side.processes]
            children = [stack.enter_context(Child(each, folder, side.environment)) for each in words]
            teams[name] = Team(side, children)  # one after another: trials choose engines on a quiet machine
        yield teams


def measure(sides: Mapping[str, Side], members: int, steps: int, runs: int) -> tuple[dict[str, list[float]], Any]:
    """Rates of each side, taking turns, after one turn that warms up; and each one's engine."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with running(sides) as teams:
        for run in range(runs + 1):
            for name in list(teams)[:: -1 if run % 2 else 1]:
                rate = teams[name].rate(members, max(1, steps // 4) if run == 0 else steps)
                if run:
                    rates[name].append(rate)
        engines = {name: team.engine for name, team in teams.items()}
    print({name: [round(each) for each in values] for name, values in rates.items()}, engines, flush=True)
    return rates, engines


def measure_lenets(optimizer: str, steps: int, runs: int) -> list[Row]:
    sides = {
        "pool": pool("lenet", optimizer),
        "shared": ours("lenet", optimizer, "shared"),
        "own": ours("lenet", optimizer, "own"),
        "looped": ours("lenet", optimizer, "shared", "looped"),
    }
    with_jax = optimizer == "sgd" and SBX.is_dir()
    if with_jax:
        sides["jax"] = Side((("benchmarks.peers.jax_members", str(MEMBERS), str(BATCH), "shared"),), SBX_PYTHON)
    rates, engines = measure(sides, MEMBERS, steps, runs)
    name, rows = f"30 LeNets, two cores, {optimizer}", []
    settings = (("shared batches", "shared", 2.0), ("own batches", "own", 2.0), ("without a compiler", "looped", 0.95))
    for what, side, bar in settings:
        note = f"engine: {engines[side]}"
        rows.append(row(f"{name}, {what}", rates[side], rates["pool"], "pool of 2 processes", bar, note))
    if with_jax:
        note = f"engine: {engines['shared']}"
        rows.append(
            row(f"{name}, shared batches, beside JAX", rates["shared"], rates["jax"], "jax.jit(vmap)", 4.0, note)
        )
    return rows


def row(name: str, mine: Sequence[float], peer: Sequence[float], peer_name: str, bar: float, note: str) -> Row:
    return compare(name, "member-steps/s", "higher", mine, peer, peer_name, bar, "ratio", note)


def measure_convolutions(steps: int, runs: int) -> list[Row]:
    sides = {"pool": pool("convolution", "sgd"), "ours": ours("convolution", "sgd", "shared")}
    rates, engines = measure(sides, MEMBERS, steps, runs)
    name, note = "30 small CNNs of another shape, two cores, shared batches", f"engine: {engines['ours']}"
    return [row(name, rates["ours"], rates["pool"], "pool of 2 processes", 1.6, note)]


def measure_perceptrons(steps: int, runs: int) -> list[Row]:
    rows = []
    for batch, bar in ((8, 2.0), (32, 2.0), (256, 1.1)):
        sides = {
            "loop": pool("perceptron", "adam", (64,), batch),
            "ours": ours("perceptron", "adam", "shared", members=64, batch=batch, threads=1),
        }
        rates, engines = measure(sides, 64, steps, runs)
        name, note = f"64 perceptrons, one core, batch {batch}", f"engine: {engines['ours']}"
        rows.append(row(name, rates["ours"], rates["loop"], "loop of modules", bar, note))
    return rows


def measure_memory(runs: int) -> list[Row]:
    mine, peer = [], []
    for _ in range(runs):
        for side, found in ((ours("lenet", "sgd", "shared"), mine), (pool("lenet", "sgd", (4,) * 5 + (5,) * 2), peer)):
            with running({"side": side}) as teams:
                teams["side"].rate(MEMBERS, 3)
                found.append(teams["side"].memory_bytes() / 1e6)
    name, note = "resident memory of 30 LeNets", "what `top` shows: pages of libraries count for each process"
    return [compare(name, "MB", "lower", mine, peer, "pool of 7 processes", 1 / 8, "ratio", note)]


def main() -> None:
    chosen = options(__doc__, runs=7)
    steps = 4 if chosen.quick else 20
    rows = [
        *measure_lenets("sgd", steps, chosen.runs),
        *measure_lenets("adam", steps, chosen.runs),
        *measure_convolutions(steps, chosen.runs),
        *measure_perceptrons(5 * steps, chosen.runs),
        *measure_memory(1 if chosen.quick else 3),
    ]
    write("population", rows, Path(chosen.results))


if __name__ == "__main__":
    main()
