"""Hogwild: two lanes that train one copy of LeNet's weights without locks, beside one.

    python -m benchmarks.hogwild [--runs N] [--quick]

A lane computes batches of 64 random images with one thread, whatever the number of lanes. Whether the lanes are threads
or processes, a trial of a second each decides within the run; both are reported too. Rates are of the steps that the
Trainer reports, without the first seconds, in which lanes start and are tried.
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


def measure(lanes: int, mode: str, seconds: float, folder: Path) -> tuple[float, str]:
    """Samples a second, and which kind the trial chose."""
    spec = TrainSpec.parse(
        {
            "task": TASK, "batch_size": LANE_BATCH * lanes, "threads": 1, "log_every_steps": 10,
            "sync": {"hogwild": lanes, "hogwild_mode": mode}, "stop": {"wall_s": seconds + WARM_UP_S},
        }
    )  # fmt: skip
    log, world = Rates(LANE_BATCH * lanes, WARM_UP_S), World.single("cpu")
    Trainer(spec, make_task(spec.task, spec.args), world, folder, journal=log).run()
    chosen = log.events.get("hogwild", {}).get("mode", mode)
    return log.samples_per_s(), str(chosen)


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 4.0 if chosen.quick else 10.0
    sides = {"one": (1, "auto"), "auto": (2, "auto"), "threads": (2, "threads"), "processes": (2, "processes")}
    found: dict[str, list[float]] = {side: [] for side in sides}
    picked: list[str] = []
    for run in range(chosen.runs):
        for side in list(sides)[:: -1 if run % 2 else 1]:
            with scratch() as folder:
                rate, kind = measure(*sides[side], seconds, folder)
            found[side].append(rate)
            picked += [kind] if side == "auto" else []
            print(side, kind, round(rate), flush=True)
    name, note = "Hogwild with two lanes, LeNet", f"batches of {LANE_BATCH} in each lane; the trial chose {picked}"
    rows = [compare(f"{name}, as the trial chose", "samples/s", "higher", found["auto"], found["one"], "one lane", BAR,
                    "ratio", note)]  # fmt: skip
    for kind in ("threads", "processes"):
        rows.append(compare(f"{name}, {kind}", "samples/s", "higher", found[kind], found["one"], "one lane"))
    write("hogwild", rows, chosen.results)


if __name__ == "__main__":
    main()
