"""A decoder of 500 million parameters under fsdp: the time to its first step, and the memory of a rank.

    python -m benchmarks.large_models [--before REVISION] [--runs N] [--quick]

`torchrun -m shoal.train` beside PyTorch's own script (benchmarks/peers/fully_shard.py), which builds on the meta device
too and draws each rank's shards alone, and beside ours at an earlier commit, where each rank built the whole model. The
memory of a rank, over four of them, is by how much it has grown at most, from before the model is built to the end of
the second step, and by how much more than with a small model; beside it the size of what it must hold: its part of
weights, gradients and both averages of Adam, and one block. The bar is for the pages of the host, over the number of
ranks: a page that several ranks map counts once (PSS), since that decides whether the ranks fit. Another row counts it
in each of them (RSS), for the largest rank. MALLOC_MMAP_THRESHOLD_ is 1 MiB there, and no side saves a copy of its
state (checkpoint.asynchronous=false).

A rank that crashes prints its Python threads, and leaves a core dump in build/cores (CONTRIBUTING.md).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.before import checkout
from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.ours.large_decoder import make_decoder
from benchmarks.result import Row, compare, options, write

BEFORE = "abb3b2c4"  # the last one whose ranks built the whole model
WIDTH, SMALL_WIDTH, DEPTH, QUICK_DEPTH = 1280, 64, 25, 2
LESS_DEPTH = 12  # with more, two ranks that build the whole model do not fit 24 GB of memory
NUM_STEPS, BATCH = 2, 8
TIMEOUT_S = 1200.0
CORES = ROOT / "build" / "cores"


def start(
    words: list[str], size: int, folder: Path, package: Path, *, trims: bool = False
) -> tuple[float, list[dict[str, Any]]]:
    """Run `words` on `size` ranks of torchrun; returns when it began, and the notes of each rank.

    trims: let freed memory go back to the system at once: glibc keeps what is freed in blocks of up to 32 MB
    """
    for file in folder.glob("*.json"):
        file.unlink()
    path = os.pathsep.join([str(package), str(ROOT)])
    home = folder / f"home-{package.parent.name}"  # their registries may have different formats
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SHOAL_HOME": str(home)}
    env |= {"PYTHONFAULTHANDLER": "1"} | ({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if trims else {})
    torchrun = [OUR_PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    began_s = time.time()
    done = subprocess.run(
        [*torchrun, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        for core in folder.glob("core*"):
            CORES.mkdir(parents=True, exist_ok=True)
            shutil.move(core, CORES / f"{core.name}-{time.time():.0f}")
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return began_s, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def ours(size: int, width: int, depth: int, folder: Path) -> list[str]:
    words = ["-m", "shoal.train", "task=benchmarks.ours.large_decoder:LargeDecoder", "parallel=fsdp"]
    words += [f"args.folder={folder}", f"args.width={width}", f"args.depth={depth}", f"batch_size={BATCH}"]
    words += [f"stop.steps={NUM_STEPS}", f"workers={size}", "device=cpu", "check_loss=false"]
    return [*words, "checkpoint.asynchronous=false"]


def peer(size: int, width: int, depth: int, folder: Path) -> list[str]:
    script = str(ROOT / "benchmarks/peers/fully_shard.py")
    return [script, str(folder), str(width), str(depth), str(NUM_STEPS), str(BATCH)]


def measure_growth(make: Callable[[int, int, int, Path], list[str]], depth: int, folder: Path) -> tuple[float, float]:
    """The growth of a rank of four, beyond that of the same program with a small model: what it loads late.

    The mean of all, with shared pages divided between ranks, and that of the largest, with each shared page as its own.
    """
    grown = []
    for width, layers in ((SMALL_WIDTH, 1), (WIDTH, depth)):
        _, notes = start(make(4, width, layers, folder), 4, folder, ROOT / "platform", trims=True)
        grown.append((sum(each["own_bytes"] for each in notes) / 4, max(each["grown_bytes"] for each in notes)))
    (small_own, small), (own, largest) = grown
    return own - small_own, float(largest - small)


def count_needed_bytes(depth: int, size: int) -> float:
    """A rank's part of weights, gradients and Adam's averages, and one block, in fp32."""
    with torch.device("meta"):
        model = make_decoder(WIDTH, depth)
    whole, block = (sum(each.numel() for each in part.parameters()) for part in (model, model[1]))  # type: ignore[index]
    return 4.0 * (4 * whole / size + block)


def main() -> None:
    chosen = options(__doc__, runs=5, before=BEFORE)
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    depth, rows = QUICK_DEPTH if chosen.quick else DEPTH, list[Row]()
    less = min(depth, LESS_DEPTH)
    seconds: dict[str, list[float]] = {"ours": [], "peer": [], "ours_less": [], "before": []}
    grown: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    with scratch() as folder, checkout(chosen.before, folder) as before:
        now = ROOT / "platform"
        for _ in range(chosen.runs):
            for name, package in {"ours_less": now, "before": before}.items():
                began_s, notes = start(ours(2, WIDTH, less, folder), 2, folder, package)
                seconds[name].append(notes[0]["steps"][0] - began_s)
            mine, theirs = ours(2, WIDTH, depth, folder), peer(2, WIDTH, depth, folder)
            for name, words in {"ours": mine, "peer": theirs}.items():
                began_s, notes = start(words, 2, folder, now)
                seconds[name].append(notes[0]["steps"][0] - began_s)
            for name, make in {"ours": ours, "peer": peer}.items():
                grown[name].append(measure_growth(make, depth, folder))
        what = "from the command to the end of the first step, 250 M parameters, 2 ranks"
        note = "torchrun, without Ray"
        rows.append(compare(what, "s", "lower", seconds["ours_less"], seconds["before"], "before", 0.5, "ratio", note))
        what = what.replace("250", "500")
        rows.append(compare(what, "s", "lower", seconds["ours"], seconds["peer"], "fully_shard", 1.0, "ratio", note))
        needed = [count_needed_bytes(depth, 4) / 1e6] * len(grown["ours"])
        what = "peak memory of a rank, fsdp over 4, 500 M parameters"
        for index, counted in enumerate(("", ", shared pages in each")):
            ours_mb, peer_mb = ([each[index] / 1e6 for each in grown[name]] for name in ("ours", "peer"))
            bar = None if index else 1.12
            name = what + counted
            rows.append(compare(name, "MB", "lower", ours_mb, needed, "its states and one block", bar, bar and "ratio"))
            rows.append(compare(name, "MB", "lower", ours_mb, peer_mb, "fully_shard"))
    write("large_models", rows, chosen.results)


if __name__ == "__main__":
    main()
