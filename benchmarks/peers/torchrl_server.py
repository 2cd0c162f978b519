"""TorchRL's InferenceServer over its shared memory, asked by client processes. Runs in TorchRL's own environment.

    .venv-torchrl/bin/python benchmarks/peers/torchrl_server.py NUM_CLIENTS SECONDS TRANSPORT

Prints one JSON object: actions a second, and percentiles of the latency in milliseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules.inference_server import InferenceServer, ProcessSlotTransport, SharedMemoryTransport

WARM_UP_S = 2.0
TRANSPORTS = {"shared_memory": SharedMemoryTransport, "process_slot": ProcessSlotTransport}


class Policy(nn.Module):
    """CartPole's actor: 64x64 with tanh, a sampled action and its log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_all = self.layers(observation).log_softmax(-1)
        gumbel = -torch.empty_like(log_all).exponential_().log()
        action = (log_all + gumbel).argmax(-1, keepdim=True)
        return action, log_all.gather(-1, action)


def play(client, number: int, begin_at: float, seconds: float, results) -> None:  # type: ignore[no-untyped-def]
    """Ask one action after another; puts the latencies of those within the window."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(number)
    latencies, ends_at = [], begin_at + seconds
    while (asked_at := time.monotonic()) < ends_at:
        client(TensorDict({"observation": torch.rand(4, generator=generator)}))
        if asked_at >= begin_at:
            latencies.append(time.monotonic() - asked_at)
    results.put(latencies)


def main(num_clients: int, seconds: float, transport: str) -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    policy = TensorDictModule(Policy(), in_keys=["observation"], out_keys=["action", "log_probability"])
    request = TensorDict({"observation": torch.zeros(4)})
    response = TensorDict(
        {
            "action": torch.zeros(1, dtype=torch.long),
            "log_probability": torch.zeros(1),
            "policy_version": torch.zeros((), dtype=torch.long),
        }
    )
    shared_memory = TRANSPORTS[transport](request, response, num_slots=num_clients, ctx=context)
    clients = [shared_memory.client() for _ in range(num_clients)]
    results = context.Queue()
    begin_at = time.monotonic() + WARM_UP_S
    players = [
        context.Process(target=play, args=(client, number, begin_at, seconds, results), daemon=True)
        for number, client in enumerate(clients)
    ]
    for each in players:
        each.start()
    with InferenceServer(policy, shared_memory, max_batch_size=num_clients):
        latencies = sorted(latency for _ in players for latency in results.get(timeout=seconds + 60))
        for each in players:
            each.join()
    p50_s, p99_s = (latencies[int(share * len(latencies))] for share in (0.5, 0.99))
    print(json.dumps({"rate": len(latencies) / seconds, "p50_ms": 1e3 * p50_s, "p99_ms": 1e3 * p99_s}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
