"""Hogwild: two lanes that train one copy of LeNet's weights without locks, beside one.

    python -m benchmarks.hogwild [--runs N] [--quick]

A lane computes batches of 64 random images with one thread, whatever the number of lanes. Rates are of the steps that
the Trainer reports, without the first seconds.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.asynchronous import Rates
from benchmarks.children import scratch
from benchmarks.result import compare, options, write
from shoal.parallel import World
from shoal.train.loop.trainer import Trainer
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task

TASK = f"{Path(__file__).parent / 'ours' / 'image_task.py'}:ImageTask"
LANE_BATCH, WARM_UP_S, BAR = 64, 5.0, 1.5


def measure(lanes: int, seconds: float, folder: Path) -> float:
    """Samples a second."""
    spec = TrainSpec.parse(
        {
            "task": TASK, "batch_size": LANE_BATCH * lanes, "threads": 1, "log_every_steps": 10,
            "sync": {"hogwild": lanes}, "stop": {"wall_s": seconds + WARM_UP_S},
        }
    )  # fmt: skip
    log, world = Rates(LANE_BATCH * lanes, WARM_UP_S), World.single("cpu")
    Trainer(spec, make_task(spec.task, spec.args), world, folder, journal=log).run()
    return log.samples_per_s()


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 4.0 if chosen.quick else 10.0
    found: dict[int, list[float]] = {1: [], 2: []}  # by the number of lanes
    for run in range(chosen.runs):
        for lanes in (1, 2)[:: -1 if run % 2 else 1]:
            with scratch() as folder:
                found[lanes].append(measure(lanes, seconds, folder))
            print(f"{lanes} lanes: {found[lanes][-1]:.0f}", flush=True)
    note = f"batches of {LANE_BATCH} in each lane"
    row = compare("Hogwild with two lanes, LeNet", "samples/s", "higher", found[2], found[1], "one lane", BAR, "ratio",
                  note)  # fmt: skip
    write("hogwild", [row], chosen.results)


if __name__ == "__main__":
    main()
