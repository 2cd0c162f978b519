"""Self-organising maps beside fastersom and MiniSom: the same rows, grid, first weights, widths and epochs.

    python -m benchmarks.som [--runs N] [--quick]

30x30 nodes, 10 epochs, float32: 60,000 images of Fashion-MNIST (784 pixels; $FASHION_MNIST, or where Debian's package
has them), and a table of 49,000 rows of 9 columns (the Shuttle data of river's wheel, standardised). Sides take turns,
each in a process of its own: one thread beside one thread, then our two workers beside fastersom's two threads. Seconds
are those of the fit, with each row's final unit, as fastersom's has them. MiniSom learns from one row at a time: its
seconds are those of some thousand iterations, times the number that 10 epochs have. 30 maps as one population beside 30
fits, on a tenth of the images. And what a warm search could save: how often Hamerly's bound proves the old unit.
"""

from __future__ import annotations

import csv
import gzip
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import OUR_PYTHON, SOM, SOM_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write

SIDE, EPOCHS, TIMEOUT_S = 30, 10, 3600.0
FASHION = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"), "train-images-idx3-ubyte.gz")
SHUTTLE = "river/datasets/shuttle.csv.gz"
ITERATIONS = {"Fashion-MNIST": 1000, "Shuttle": 5000}  # of MiniSom
ERROR_BAR, TIME_BAR, MINISOM_BAR, WORKERS_BAR = 1.001, 1.0, 1 / 20, 1.7
Found = dict[str, list[dict[str, Any]]]


def read_fashion() -> np.ndarray:
    pixels = np.frombuffer(gzip.decompress(FASHION.read_bytes()), np.uint8, offset=16)
    return pixels.reshape(-1, 784).astype(np.float32) / 255


def read_shuttle() -> np.ndarray:
    """Columns with mean 0 and standard deviation 1."""
    (path,) = SOM.glob(f"lib/python*/site-packages/{SHUTTLE}")
    with gzip.open(path, "rt") as file:
        table = np.array([row[:9] for row in list(csv.reader(file))[1:]], float)[:49_000]
    return ((table - table.mean(0)) / table.std(0)).astype(np.float32)


def save(rows: np.ndarray, folder: Path) -> Path:
    """The rows in a random order, and rows as first weights."""
    folder.mkdir()
    random = np.random.default_rng(0)
    rows = rows[random.permutation(len(rows))]
    np.save(folder / "rows.npy", rows)
    np.save(folder / "weights.npy", rows[random.choice(len(rows), SIDE * SIDE, replace=False)])
    return folder


def start(side: str, folder: Path, threads: int, logs: Path) -> Child:
    words = [str(folder), str(threads)]
    if side == "ours":
        command = [OUR_PYTHON, "-m", "benchmarks.ours.som", *words]
    else:
        command = [SOM_PYTHON, "-m", "benchmarks.peers.som_peer", *words, side]
    return Child(command, logs, {"OMP_NUM_THREADS": str(threads)})


def run_workers(folder: Path, runs: int, logs: Path) -> list[dict[str, Any]]:
    """Two processes of one thread each."""
    group = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*group, "-m", "benchmarks.ours.som", str(folder), "1", str(EPOCHS), str(runs)]
    with Child([OUR_PYTHON, *words], logs, {"OMP_NUM_THREADS": "1"}, goodbye_s=30.0) as child:
        return [child.answer(TIMEOUT_S) for _ in range(runs)]


def compare_fits(name: str, folder: Path, runs: int, logs: Path) -> list[Row]:
    """On one core with one thread each, on two with our two workers and fastersom's two threads; then MiniSom."""
    one: Found = {"ours": [], "fastersom": []}
    two: Found = {"ours": [], "fastersom": []}
    with ExitStack() as closing:
        children = {
            (side, threads): closing.enter_context(start(side, folder, threads, logs))
            for side, threads in (("ours", 1), ("fastersom", 1), ("fastersom", 2))
        }
        for child in children.values():
            child.answer(TIMEOUT_S)
        for run in range(runs):
            for side in sorted(one, reverse=bool(run % 2)):
                one[side].append(children[side, 1].ask(TIMEOUT_S, epochs=EPOCHS))
                print(name, "1 core", side, one[side][-1], flush=True)
            for side in sorted(two, reverse=bool(run % 2)):
                if side == "ours":
                    two[side] += run_workers(folder, 1, logs)
                else:
                    two[side].append(children[side, 2].ask(TIMEOUT_S, epochs=EPOCHS))
                print(name, "2 cores", side, two[side][-1], flush=True)
    rows = [*make_rows(f"{name}, 1 core", one), *make_rows(f"{name}, 2 cores", two)]
    alone = [each["seconds"] for each in one["ours"]]
    speed = [[60 / each["seconds"] for each in side["ours"]] for side in (two, one)]
    title = f"SOM, {name}: two workers of one thread"
    rows.append(compare(title, "maps/min", "higher", *speed, "one thread", WORKERS_BAR, "ratio"))
    iterations = ITERATIONS[name]
    with start("minisom", folder, 1, logs) as child:
        child.answer(TIMEOUT_S)
        took = [child.ask(TIMEOUT_S, iterations=iterations)["seconds"] for _ in range(runs)]
    factor = EPOCHS * len(np.load(folder / "rows.npy", mmap_mode="r")) / iterations
    note = f"MiniSom's from {iterations:,} iterations, times {factor:,.0f}"
    theirs = [each * factor for each in took]
    rows.append(
        compare(f"SOM, {name}: fit, 1 thread", "s", "lower", alone, theirs, "MiniSom", MINISOM_BAR, "ratio", note)
    )
    return rows


def make_rows(name: str, found: Found) -> list[Row]:
    rows = []
    cpu = {side: statistics.median(each["cpu_s"] for each in found[side]) for side in found}
    note = f"CPU seconds {cpu['ours']:.1f} beside {cpu['fastersom']:.1f}"
    for what, unit, bar in (("seconds", "s", TIME_BAR), ("quantisation_error", "", ERROR_BAR)):
        mine, theirs = ([each[what] for each in found[side]] for side in ("ours", "fastersom"))
        title = f"SOM, {name}: {'fit' if what == 'seconds' else 'quantisation error'}"
        rows.append(compare(title, unit, "lower", mine, theirs, "fastersom", bar, "ratio", note))
    mine, theirs = ([each["topographic_error"] for each in found[side]] for side in ("ours", "fastersom"))
    rows.append(compare(f"SOM, {name}: topographic error", "", "lower", mine, theirs, "fastersom"))
    return rows


def compare_population(folder: Path, runs: int, maps: int, logs: Path) -> list[Row]:
    """Maps of one pass beside fits one after the other; and the screened search beside the full product."""
    found: dict[str, list[float]] = {"stacked": [], "alone": [], "full": [], "screened": []}
    with start("ours", folder, 1, logs) as child:
        child.answer(TIMEOUT_S)
        for _ in range(runs):
            for side in ("stacked", "alone"):
                took = child.ask(TIMEOUT_S, epochs=EPOCHS, maps=maps, stacked=side == "stacked")
                found[side].append(took["seconds"])
            for side in ("full", "screened"):
                found[side].append(child.ask(TIMEOUT_S, epochs=EPOCHS, full=side == "full")["seconds"])
    name = f"SOM, {len(np.load(folder / 'rows.npy', mmap_mode='r')):,} images"
    return [
        compare(f"{name}: {maps} maps as a population", "s", "lower", found["stacked"], found["alone"],
                f"{maps} fits of ours"),
        compare(f"{name}: search with a screen", "s", "lower", found["screened"], found["full"], "ours without it"),
    ]  # fmt: skip


def measure_bound(name: str, folder: Path, logs: Path) -> Row:
    """What the bound of a warm search would have proved."""
    with Child([OUR_PYTHON, "-m", "benchmarks.ours.som", str(folder), "1", "bound"], logs) as child:
        shares = child.answer(TIMEOUT_S)["shares"]
    note = "by epoch: " + ", ".join(f"{share:.0%}" for share in shares)
    return compare(f"SOM, {name}: rows that a warm search's bound proves", "of all", "higher", shares, note=note)


def main() -> None:
    chosen = options(__doc__, runs=3)
    if not FASHION.exists():
        sys.exit("needs Fashion-MNIST: apt-get install dataset-fashion-mnist, or say FASHION_MNIST=FOLDER")
    sets = {"Shuttle": read_shuttle(), "Fashion-MNIST": read_fashion()}
    rows: list[Row] = []
    with scratch() as logs:
        for name, data in sets.items():
            folder = save(data[:5000] if chosen.quick else data, logs / name.lower())
            rows += compare_fits(name, folder, chosen.runs, logs)
            rows.append(measure_bound(name, folder, logs))
        part = save(sets["Fashion-MNIST"][: 2000 if chosen.quick else 6000], logs / "part")
        rows += compare_population(part, 1, 3 if chosen.quick else 30, logs)
    write("som", rows, chosen.results)


if __name__ == "__main__":
    main()
