"""Bytes that a worker exchanges in a step of local SGD and DiLoCo: measured beside predicted.

    python -m benchmarks.sync_bytes [--runs N] [--quick]

Two workers train LeNet on random images, by one server. The run's event `communication` has both numbers. Measured are
the bytes of gradients and weights that went to the servers and came from them; those that the chief pulls to evaluate
and to begin are not in the prediction. A row has the largest relative difference, of pushes and pulls and of the runs.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.asynchronous import Rates
from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.asynchronous.replicas import fit_replicas
from shoal.train.spec import TrainSpec

TASK = f"{Path(__file__).parent / 'ours' / 'image_task.py'}:ImageTask"
BAR = 0.05
WAYS: dict[str, dict[str, object]] = {
    "local SGD, every 10 steps": {"kind": "local_sgd", "every": 10},
    "DiLoCo, every 10 steps": {"kind": "diloco", "every": 10},
    "DiLoCo, every 12 steps, 4 fragments": {"kind": "diloco", "every": 12, "fragments": 4},
    "parameter server, every step": {"kind": "parameter_server"},
}


def measure(sync: dict[str, object], num_steps: int) -> dict[str, float]:
    """The event `communication`."""
    spec = TrainSpec.parse(
        {
            "task": TASK, "workers": 2, "batch_size": 128, "threads": 1, "sync": sync,
            "evaluate": {"every_steps": 10**9}, "stop": {"steps": num_steps},
        }
    )  # fmt: skip
    log = Rates(128, 0.0)
    with scratch() as folder:
        fit_replicas(spec, "benchmark", folder, log, lambda: False)
    return log.events["communication"]


def main() -> None:
    chosen = options(__doc__, runs=3)
    num_steps = 240 if chosen.quick else 1200
    rows: list[Row] = []
    for way, sync in WAYS.items():
        differences, note = [], ""
        for _ in range(chosen.runs):
            seen = measure(sync, num_steps)
            both = [
                (seen[f"{which}_bytes_per_step"], seen[f"predicted_{which}_bytes_per_step"])
                for which in ("pushed", "pulled")
            ]
            differences.append(max(abs(measured / predicted - 1) for measured, predicted in both))
            note = "; ".join(
                f"{which} {measured:,.0f} of {predicted:,.0f}"
                for which, (measured, predicted) in zip(("pushed", "pulled"), both, strict=True)
            )
        title = f"bytes a step beside the predicted ones, {way}: difference"
        rows.append(compare(title, "", "lower", differences, bar=BAR, bar_kind="value", note=f"bytes {note}"))
    write("sync_bytes", rows, chosen.results)


if __name__ == "__main__":
    main()
