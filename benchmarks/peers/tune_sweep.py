"""Ray Tune's own loop around our Trainer: a function that trains LeNet and reports each evaluation, for each rate.

    python -m benchmarks.peers.tune_sweep FOLDER '{"words": [...], "rates": [...]}'

Prints the time at which `Tuner.fit` returned, in seconds since the epoch, and the best accuracy.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import time

import ray
from ray import tune


class ReportLog:
    """Reports evaluations to Ray Tune."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "validation/accuracy" in values:
            tune.report({"step": step, "accuracy": values["validation/accuracy"], "loss": values["validation/loss"]})

    def record_event(self, kind: str, /, **details: object) -> None:
        """Not kept."""

    def log_histogram(self, step: int, name: str, counts: Any, edges: Any) -> None:
        """Not kept."""

    def flush(self) -> None:
        """Nothing is waiting."""


def train(config: dict[str, Any]) -> None:
    import torch

    from shoal.parallel import World
    from shoal.train.launch.overrides import spec_from_overrides
    from shoal.train.loop.trainer import Trainer
    from shoal.train.task import make_task

    torch.set_num_threads(1)
    spec = spec_from_overrides([*config["words"], f"optimizer.learning_rate={config['rate']}"])
    folder = Path(tune.get_context().get_trial_dir())
    Trainer(spec, make_task(spec.task, spec.args), World.single(), folder, journal=ReportLog()).run()


def main(folder: str, setting: dict[str, Any]) -> None:
    ray.init(log_to_driver=False)
    tuner = tune.Tuner(
        train,
        param_space={"rate": tune.grid_search(setting["rates"]), "words": setting["words"]},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max"),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    results = tuner.fit()
    ended_s = time.time()
    best = results.get_best_result().metrics["accuracy"]
    print(json.dumps({"ended_s": ended_s, "trials": len(results), "errors": results.num_errors, "best": best}))


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    main(sys.argv[1], json.loads(sys.argv[2]))
