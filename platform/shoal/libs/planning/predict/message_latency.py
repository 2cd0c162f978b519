"""How soon a waiting rank of this host receives a message: measured within one process.

The latency of a network between hosts is unknown before the ranks exist; this is its lower bound. Called by `predict`,
for a pipeline on CPU ranks. Ends the thread and sockets that it starts.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from contextlib import closing

import torch

from shoal.parallel.comm.shm_p2p import ShmP2P

NUM_ROUNDS = 20
PAUSE_S = 0.001  # until a waiting thread has fallen asleep


def measure_latency_s() -> float:
    """Seconds from the end of `send` to the end of `wait`, for a tiny message; the median of some.

    0 if most are received before the call of `send` returns.

    Raises RuntimeError when the other end fails.
    """
    ours, theirs = socket.socketpair()
    sent_s, received_s = list[float](), list[float]()
    with closing(ShmP2P(0, {1: ours})) as messages, closing(ShmP2P(1, {0: theirs})) as others:
        waiting = threading.Thread(target=_listen, args=(others, received_s), daemon=True)
        waiting.start()
        for _ in range(NUM_ROUNDS):
            time.sleep(PAUSE_S)
            messages.send(torch.empty(8, dtype=torch.uint8), 1)
            sent_s.append(time.perf_counter())
        waiting.join()
    return max(0.0, statistics.median(heard - sent for sent, heard in zip(sent_s, received_s, strict=True)))


def _listen(messages: ShmP2P, received_s: list[float]) -> None:
    tensor = torch.empty(8, dtype=torch.uint8)
    for _ in range(NUM_ROUNDS):
        messages.receive(tensor, 0).wait()
        received_s.append(time.perf_counter())
