"""An hour of 1,000 actors at one gateway: its memory, and how evenly it shares its credit.

    python -m benchmarks.thousand_actors [--minutes 60] [--quick] [--results FOLDER]

The actors are simulated (`shoal bench gateway`), in one process, and compute nothing; each would take 100 steps a
second, in segments of 256 (10 KB). The learner, a thread of the gateway's process, takes about half of that, so that
credit is short, and publishes a version a second. The ledger is on disk. Memory is that of the gateway's process (RSS):
the median of the last tenth of the time over that of the second tenth. After each half minute the file of the results
has the time until then.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.gateway_durable import TOKEN, serving
from benchmarks.result import Row, compare, options, save, write
from benchmarks.talk import commands, say
from shoal.libs.bench.gateway import SimulatedActors
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.part_specs import GatewaySpec

NUM_ACTORS, STEPS_PER_S, SEGMENTS_PER_S, PUBLISH_S = 1000, 100.0, 200.0, 1.0
CAPACITY = 2000  # segments of the queue
SLICE_S, QUICK_SLICE_S, START_S = 30.0, 5.0, 120.0
MEMORY_BAR, FAIRNESS_BAR = 1.02, 0.5


def serve(folder: Path) -> None:
    spec = GatewaySpec(queue_capacity=CAPACITY)
    with serving(spec, Ledger(folder / "ledger.sqlite"), None, SEGMENTS_PER_S, PUBLISH_S) as gateway:
        say(address=gateway.address)
        for _ in commands():
            pass


def play(address: str, slice_s: float) -> None:
    """Says after each slice of the time what came of it."""
    with closing(SimulatedActors(address, TOKEN, NUM_ACTORS, STEPS_PER_S)) as simulated:
        simulated.connect()
        say(connected=True)
        for _ in commands():
            found = simulated.run(slice_s)
            say(**found, accepted=[each.acknowledged["accepted"] for each in simulated.actors])


def make_rows(slices: list[dict[str, Any]], memory: list[int], slice_s: float) -> list[Row]:
    minutes, tenth = len(slices) * slice_s / 60.0, max(1, len(memory) // 10)
    accepted = np.sort(np.sum([each["accepted"] for each in slices], axis=0))
    segments = sum((Counter(each["segments"]) for each in slices), Counter[str]())
    first, last = (statistics.median(part) / 1e6 for part in (memory[tenth : 2 * tenth] or memory, memory[-tenth:]))
    title = f"{minutes:g} minutes of {NUM_ACTORS:,} actors at a gateway"
    cpu_share = statistics.mean(each["cpu_share"] for each in slices)
    note = f"segments: {dict(segments)}; the actors' thread used {cpu_share:.0%} of a core"
    return [
        compare(f"{title}: memory, last tenth over the second", "MB", "lower", [last], [first], "second tenth",
                MEMORY_BAR, "ratio"),
        compare(f"{title}: segments of the slowest tenth of the actors over their median", "", "higher",
                [float(accepted[: NUM_ACTORS // 10].mean() / np.median(accepted))], bar=FAIRNESS_BAR, bar_kind="value",
                note=note),
        compare(f"{title}: accepted steps", "steps/s", "higher", [each["steps_per_s"] for each in slices]),
        compare(f"{title}: time without credit", "", "lower", [each["wait_share"] for each in slices]),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=1, minutes=60.0)
    slice_s = QUICK_SLICE_S if chosen.quick else SLICE_S
    num_slices = 10 if chosen.quick else round(60.0 * chosen.minutes / slice_s)
    slices: list[dict[str, Any]] = []
    memory: list[int] = []
    rows: list[Row] = []
    module = [OUR_PYTHON, "-m", "benchmarks.thousand_actors"]
    with scratch() as folder, Child([*module, "serve", str(folder)], folder) as server:
        address, process = server.answer(START_S)["address"], psutil.Process(server.process.pid)
        with Child([*module, "play", address, str(slice_s)], folder, goodbye_s=60.0) as actors:
            actors.answer(START_S)
            while len(slices) < num_slices:
                slices.append(actors.ask(slice_s + START_S, do="play"))
                memory.append(process.memory_info().rss)
                rows = make_rows(slices, memory, slice_s)
                save("thousand_actors", rows, chosen.results)
                steps_per_s, wait_share = slices[-1]["steps_per_s"], slices[-1]["wait_share"]
                print(f"{time.strftime('%H:%M:%S')}: {steps_per_s:,.0f} steps/s, {wait_share:.0%} without credit,"
                      f" {memory[-1] / 1e6:.1f} MB", flush=True)  # fmt: skip
    write("thousand_actors", rows, chosen.results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["play"]:
        play(sys.argv[2], float(sys.argv[3]))
    else:
        main()
