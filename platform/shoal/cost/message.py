"""How long a tensor takes from one rank to another of this host: tried out, within one process, through memory.

What a network between hosts would take is not known before the ranks are there; this is the least that it can be.
Called by `predict`, for a pipeline on CPU ranks. Ends the thread and sockets that it starts.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import closing

import torch

from shoal.parallel.host_messages import HostMessages

ROUNDS = 20


def transfer_s(sizes_bytes: Iterable[int]) -> dict[int, float]:
    """Seconds for one tensor of each size, from `send` to the end of `receive`, as long as nobody else keeps the cores.

    Raises RuntimeError when the other end fails.
    """
    sizes = sorted(set(sizes_bytes))
    ours, theirs = socket.socketpair()
    with closing(HostMessages(0, {1: ours})) as messages, closing(HostMessages(1, {0: theirs})) as others:
        answering = threading.Thread(target=_answer, args=(others, sizes), daemon=True)
        answering.start()
        found = {}
        for size in sizes:
            tensor = torch.empty(size, dtype=torch.uint8)
            found[size] = min(_there_and_back_s(messages, tensor) for _ in range(ROUNDS)) / 2
        answering.join()
    return found


def _there_and_back_s(messages: HostMessages, tensor: torch.Tensor) -> float:
    began_s = time.perf_counter()
    messages.send(tensor, 1)
    messages.receive(tensor, 1).wait()
    return time.perf_counter() - began_s


def _answer(messages: HostMessages, sizes: list[int]) -> None:
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.uint8)
        for _ in range(ROUNDS):
            messages.receive(tensor, 0).wait()
            messages.send(tensor, 0)
