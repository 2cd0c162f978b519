"""One process of a user's pool: members as modules of their own, one after another, with fused optimizers.

    python -m benchmarks.peers.solo_members NETWORK MEMBERS BATCH OPTIMIZER

Convolutions are channels last, which is their best on a CPU. Torch alone, as the user writes it.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.ours.population_networks import make_batch, make_network
from benchmarks.talk import commands, say


def make_member(network: str, optimizer: str, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_network(network)
    if network != "perceptron":
        model = model.to(memory_format=torch.channels_last)
    if optimizer == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
    return model, torch.optim.Adam(model.parameters(), lr=rate, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, classes: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(inputs), classes).backward()
    optimizer.step()


def main(network: str, num_members: int, batch_size: int, optimizer: str) -> None:
    torch.set_num_threads(1)
    members = [make_member(network, optimizer, 0.01) for _ in range(num_members)]
    batch = make_batch(network, batch_size)
    for member in members:
        step(*member, *batch)
    say(ready=True)
    for command in commands():
        began_s = time.perf_counter()
        for member in members:
            for _ in range(command["steps"]):
                step(*member, *batch)
        say(seconds=time.perf_counter() - began_s)


if __name__ == "__main__":
    network, members, batch_size, optimizer = sys.argv[1:]
    main(network, int(members), int(batch_size), optimizer)
