"""Kill -9 one of two synchronous workers: how long the other one pauses, and until the replacement takes part.

    python -m benchmarks.elastic_pause [--runs N] [--quick]

A cluster of `shoal up`; all sides are `shoal run train` on two Ray workers, steps of 10 ms. Ours, twice: elastic
all-reduce (`workers=[1,2]`), where a new worker takes its state from the survivor; and synchronous updates by a
parameter server (`sync.staleness=0`), where it pulls weights. The peer: Ray Train's TorchTrainer, the engine of
`parallel=ddp`: a lost worker ends the group, and another group begins from the newest checkpoint (one each second).
Each process notes the time of its steps. The pause is the longest gap between two steps of the survivor after the kill;
with the peer, whose survivor is ended, between the last step of the old group and the first of the new one.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import Row, compare, options, write
from shoal.cluster import jobs
from shoal.cluster.attach import find_cluster

SHOAL = [OUR_PYTHON, "-c", "from shoal.cli import main; main()"]
WAYS = {
    "elastic": ["workers=[1,2]"],
    "parameter server": ["workers=2", "sync.kind=parameter_server"],
    "Ray Train": ["workers=2", "parallel=ddp"],
}
PAUSE_BAR_S, START_S = 1.0, 1.0
TIMEOUT_S, BEFORE_S, AFTER_S = 90.0, 3.0, 4.0


class Pauses(NamedTuple):
    """Seconds from the kill: without a step of a survivor (or, without survivors, of any), and to the first step of the
    replacement."""

    pause_s: float
    replacement_s: float


def measure(way: str) -> Pauses:
    with scratch() as folder:
        words = ["run", "train", "--plain", "task=benchmarks/ours/noting_task.py:NotingTask", f"args.notes={folder}"]
        words += ["batch_size=64", "stop.wall_s=60", "checkpoint.every_s=1", *WAYS[way]]
        log = (folder / "log").open("wb")
        run = subprocess.Popen([*SHOAL, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            return _kill_one(folder, is_survived=way != "Ray Train")
        finally:
            run.terminate()
            run.wait(TIMEOUT_S)
            log.close()


def measure_actor_start() -> float:
    """Seconds until a bare Ray actor on the same cluster has loaded torch and answers."""
    cluster = find_cluster()
    assert cluster is not None
    with scratch() as folder:
        job = jobs.submit(cluster, [OUR_PYTHON, str(ROOT / "benchmarks/ours/actor_start.py"), str(folder / "seconds")])
        status = job.wait(TIMEOUT_S)
        if not (folder / "seconds").exists():
            sys.exit(f"the job of an actor ended as {status}:\n{job.read_logs()[-2000:]}")
        return float(json.loads((folder / "seconds").read_text()))


def _kill_one(folder: Path, is_survived: bool) -> Pauses:
    _wait(lambda: sum(len(times) > 20 for times in _read(folder).values()) == 2, folder)
    time.sleep(BEFORE_S)
    before = _read(folder)
    victim = next(pid for pid in before if _is_second(pid) or pid == max(before))
    killed_at = time.time()
    os.kill(victim, 9)
    _wait(lambda: any(len(times) > 20 for pid, times in _read(folder).items() if pid not in before), folder)
    time.sleep(AFTER_S)
    after = _read(folder)
    [survivor] = set(before) - {victim}
    new = min(times[0] for pid, times in after.items() if pid not in before)
    if is_survived:
        steps = [at for at in after[survivor] if at >= killed_at - 1.0]
        pause_s = max(later - earlier for earlier, later in itertools.pairwise(steps) if later >= killed_at)
    else:
        pause_s = new - max(at for at in after[survivor] if at < new)
    return Pauses(pause_s, new - killed_at)


def _is_second(pid: int) -> bool:
    """Whether it is the worker that neither saves nor reports, as Ray names its process."""
    return "worker 1" in " ".join(psutil.Process(pid).cmdline())


def _read(folder: Path) -> dict[int, list[float]]:
    """The times of the steps of each process."""
    return {
        int(file.name): [float(line) for line in file.read_text().splitlines() if line]
        for file in folder.iterdir()
        if file.name.isdigit()
    }


def _wait(is_true, folder: Path) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        if time.monotonic() > deadline:
            sys.exit(f"nothing came:\n{(folder / 'log').read_text()[-3000:]}")
        time.sleep(0.1)


def main() -> None:
    chosen = options(__doc__, runs=5)
    found: dict[str, list[Pauses]] = {way: [] for way in WAYS}
    starts: list[float] = []
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        subprocess.run([*SHOAL, "up"], check=True)
        try:
            for turn in range(chosen.runs):
                for way in list(WAYS) if turn % 2 else list(WAYS)[::-1]:
                    found[way].append(measure(way))
                    print(way, found[way][-1], flush=True)
                starts.append(measure_actor_start())
                print("an actor's start", starts[-1], flush=True)
        finally:
            subprocess.run([*SHOAL, "down"], check=False)
    rows: list[Row] = []
    for way in list(WAYS)[:-1]:
        for field, title, bar in (
            (0, "survivor's pause after kill -9 of one of two workers", PAUSE_BAR_S),
            (1, "until the replacement of the killed worker takes a step", None),
        ):
            mine, theirs = ([each[field] for each in found[side]] for side in (way, "Ray Train"))
            named = f"{way}: {title}"
            rows.append(compare(named, "s", "lower", mine, theirs, "Ray Train", bar, "value" if bar else "ratio"))
        beyond = [each.replacement_s - statistics.median(starts) for each in found[way]]
        title = f"{way}: the same, beyond the start of a bare Ray actor that loads torch"
        rows.append(compare(title, "s", "lower", beyond, starts, "the actor's start", START_S, "value"))
    write("elastic_pause", rows, chosen.results)


if __name__ == "__main__":
    main()
