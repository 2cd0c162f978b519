"""Members in one process, as a Population: told how many steps to take, says how long they took.

python -m benchmarks.ours.population NETWORK MEMBERS BATCH OPTIMIZER ORDER ENGINE THREADS
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.ours.population_networks import make_batch, make_network
from benchmarks.talk import commands, say
from shoal.libs.population import Population


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return cross_entropy(outputs, batch[1])


def main(network: str, members: int, batch_size: int, optimizer: Any, order: Any, engine: str, threads: int) -> None:
    torch.set_num_threads(1)
    rates = torch.linspace(0.005, 0.01, members)
    values = {"optimizer.learning_rate": rates} | ({"optimizer.momentum": 0.9} if optimizer == "sgd" else {})
    with Population(
        lambda: make_network(network), loss, members=members, optimizer=optimizer, hyper_parameters=values,
        order=order, engine=engine, threads=threads,
    ) as population:  # fmt: skip
        batch = make_batch(network, batch_size, members if order == "own" else None)
        population.step(batch)  # chooses the engine
        choice = population.choice
        assert choice is not None
        say(engine=choice.engine, chunk=choice.chunk, reasons=dict(choice.reasons),
            trials=[[each.engine, each.chunk, round(each.ms, 3)] for each in choice.trials])  # fmt: skip
        for command in commands():
            began_s = time.perf_counter()
            for _ in population.train([batch] * command["steps"]):
                pass
            say(seconds=time.perf_counter() - began_s)


if __name__ == "__main__":
    network, members, batch_size, optimizer, order, engine, threads = sys.argv[1:]
    main(network, int(members), int(batch_size), optimizer, order, engine, int(threads))
