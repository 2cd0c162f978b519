"""One population of LeNets on Fashion-MNIST, or the seconds of its exploit steps.

    python -m benchmarks.ours.population_pbt population EVOLUTION SETTING
    python -m benchmarks.ours.population_pbt exploit SETTING

SETTING is JSON: members, rounds, steps, batch_size, score_samples, seed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from benchmarks.talk import say
from shoal.libs.population import Population
from shoal.libs.population.flow.run import run_population
from shoal.libs.population.spec import PopulationSpec
from shoal.models.lenet import LeNet

SPACE = {
    "optimizer.learning_rate": "log(1e-3, 2e-1)",
    "optimizer.momentum": "uniform(0.5, 0.97)",
    "augmentation.shift": "uniform(0, 3)",
    "augmentation.flip": "uniform(0, 0.5)",
    "augmentation.erase": "uniform(0, 0.5)",
}
NUM_EXPLOITS = 300


def evolve(evolution: str, setting: dict[str, Any]) -> None:
    """From the spec to the registered network and the report."""
    spec = PopulationSpec.parse(
        {
            "task": "jobs/lenet.py", "space": SPACE, "evolution": evolution, "ensemble": 0,
            "steps_per_round": setting["steps"],
            **{name: setting[name] for name in ("members", "rounds", "batch_size", "score_samples", "seed")},
        }
    )  # fmt: skip
    began_s = time.perf_counter()
    result = run_population(spec)
    seconds = time.perf_counter() - began_s
    # Of the members after the last round, as the peer's: the best of any round is registered.
    say(seconds=seconds, accuracy=max(result.scores), registered=result.metrics["accuracy"])


def exploit(setting: dict[str, Any]) -> None:
    """Rows and hyper-parameters of a winner over a loser's, with the optimiser's state; and a bare copy of the rows."""
    columns = {"optimizer.learning_rate": 0.1, "optimizer.momentum": 0.9}
    with Population(LeNet, lambda outputs, batch: outputs.mean(), members=setting["members"],
                    hyper_parameters=columns) as population:  # fmt: skip
        times, bare = [], []
        rows = [each.numpy() for each in population.group.rows.state().values() if each.numel()]
        for number in range(NUM_EXPLOITS):
            loser, winner = number % setting["members"], (number + 7) % setting["members"]
            began_s = time.perf_counter()
            population.exploit([(loser, winner)])
            population.set_hyper_parameters(loser, {"optimizer.learning_rate": 0.12, "optimizer.momentum": 0.8})
            times.append(time.perf_counter() - began_s)
        for number in range(NUM_EXPLOITS):
            loser, winner = number % setting["members"], (number + 7) % setting["members"]
            began_s = time.perf_counter()
            for each in rows:
                each[loser] = each[winner]
            bare.append(time.perf_counter() - began_s)
    say(seconds=statistics.median(times), bare_s=statistics.median(bare))


if __name__ == "__main__":
    if sys.argv[1] == "exploit":
        exploit(json.loads(sys.argv[2]))
    else:
        evolve(sys.argv[2], json.loads(sys.argv[3]))
