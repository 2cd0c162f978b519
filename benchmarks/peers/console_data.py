"""The runs of `benchmarks.console`, written for TensorBoard and for MLflow; by the Python of their environment.

    python benchmarks/peers/console_data.py FOLDER NUM_RUNS NUM_STEPS

FOLDER/runs and FOLDER/long are log folders of TensorBoard, FOLDER/mlflow.db is MLflow's store.
"""

from __future__ import annotations

import json
import math
import random
import sqlite3
import sys
import time
from pathlib import Path

_LAST = ("loss", "accuracy", "return", "throughput", "grad_norm", "learning_rate", "entropy", "queue")
NAMES = tuple(f"train/{each}" for each in _LAST)  # one group: TensorBoard opens the first two
FEW_STEPS, FEW_NAMES = 20, NAMES[:3]
LONG = "long-run"


def make_value(name: str, step: int, noise: float) -> float:
    """Of one metric: a wave that fades, with noise in [0, 1)."""
    wave = math.sin(step / (3000 + 2000 * NAMES.index(name)))
    return 2.0 + wave * math.exp(-step / 50_000) + 0.1 * noise


def write_tensorboard(folder: Path, num_steps: int, names: tuple[str, ...]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer, draw = EventFileWriter(str(folder)), random.Random(0)
    for step in range(num_steps):
        values = [Summary.Value(tag=name, simple_value=make_value(name, step, draw.random())) for name in names]
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
    writer.close()


def write_mlflow(store: Path, num_runs: int, num_steps: int) -> str:
    """Returns the id of the long run. Its metrics go into the database: through the client they take minutes."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client, draw = MlflowClient(f"sqlite:///{store}"), random.Random(0)
    for number in range(num_runs):
        run = client.create_run("0", run_name=f"run-{number:04d}").info.run_id
        metrics = [
            Metric(name, make_value(name, step, draw.random()), 0, step)
            for name in FEW_NAMES
            for step in range(FEW_STEPS)
        ]
        client.log_batch(run, metrics)
        client.set_terminated(run)
    run = str(client.create_run("0", run_name=LONG).info.run_id)
    client.log_batch(run, [Metric(name, 2.0, 0, num_steps) for name in NAMES])
    client.set_terminated(run)
    with sqlite3.connect(store) as connection:
        connection.executemany(
            "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, 0)",
            (
                (name, make_value(name, step, draw.random()), step, run, step)
                for step in range(num_steps)
                for name in NAMES
            ),
        )
    return run


def main() -> None:
    folder, num_runs, num_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(num_runs):
        write_tensorboard(folder / "runs" / f"run-{number:04d}", FEW_STEPS, FEW_NAMES)
    write_tensorboard(folder / "long" / LONG, num_steps, NAMES)
    run = write_mlflow(folder / "mlflow.db", num_runs, num_steps)
    (folder / "peers.json").write_text(json.dumps({"mlflow_run": run}))


if __name__ == "__main__":
    main()
