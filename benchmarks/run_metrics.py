"""What the export of a run's metrics costs: the step of a perceptron with gauges in Ray's exporter, and without.

    python -m benchmarks.run_metrics [--runs N] [--quick]

The perceptron is trained in the process that records the run and is connected to a cluster: nothing else stands between
the export and its steps. Runs with and without it take turns. Apart from that, the processor time that one export of
the loop's metrics takes, of which there are two a second.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.children import scratch
from benchmarks.result import compare, options, write
from benchmarks.tracking import measure
from shoal.cluster.embedded_cluster import start_cluster
from shoal.cluster.job_main import disconnect, join_cluster
from shoal.runs import RunKind, RunRecorder

STEPS = 20_000
BAR = 1.01
NUM_METRICS, NUM_EXPORTS = 40, 200  # as the loop with 16 actors has
NOTE = "mean of {} steps of a perceptron, with one thread of torch on two cores; the exporter is in the same process"


def measure_export() -> float:
    """Milliseconds of processor time of an export."""
    from shoal.runs.ray_gauges import RunGauges

    gauges = RunGauges("benchmark", RunKind.LOOP)
    values = {f"metric/{number}": float(number) for number in range(NUM_METRICS)}
    gauges.publish([(0, 0.0, values)])
    before_s = time.thread_time()
    for step in range(NUM_EXPORTS):
        gauges.publish([(step, 0.0, values)])
    return 1e3 * (time.thread_time() - before_s) / NUM_EXPORTS


def main() -> None:
    chosen = options(__doc__, runs=9)
    steps = STEPS // 10 if chosen.quick else STEPS
    publish = RunRecorder._publish
    ways = {"on": publish, "off": lambda self, entries: None}
    found: dict[str, list[float]] = {name: [] for name in ways}
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(Path(folder) / "home")
        cluster = start_cluster(num_cpus=1)
        try:
            join_cluster(cluster)
            measure(None, steps // 10)
            for run in range(chosen.runs):
                for name in list(ways) if run % 2 else reversed(ways):
                    RunRecorder._publish = ways[name]  # type: ignore[method-assign]
                    found[name].append(measure(None, steps)[0])
            exports = [measure_export() for _ in range(chosen.runs)]
            disconnect()
        finally:
            cluster.stop()
    note = NOTE.format(f"{steps:,}")
    rows = [
        compare(
            "step time, metrics exported", "µs", "lower", found["on"], found["off"], "not exported", BAR, "ratio", note
        ),
        compare(f"processor time of an export of {NUM_METRICS} metrics", "ms", "lower", exports),
    ]
    write("run_metrics", rows, chosen.results)


if __name__ == "__main__":
    main()
