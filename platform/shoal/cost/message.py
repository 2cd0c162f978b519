"""How long a tensor takes from one rank to another of this host: tried out, within one process, by Gloo over loopback.

What a network between hosts would take is not known before the ranks are there; this is the least that it can be.
Called by `predict`, for a pipeline on CPU ranks. Ends the threads and sockets that it starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 20
_TIMEOUT = timedelta(seconds=10)


def transfer_s(sizes_bytes: Iterable[int]) -> dict[int, float]:
    """Seconds for one tensor of each size, from `send` to the end of `recv`, as long as nobody else keeps the cores.

    Raises RuntimeError when there is no loopback.
    """
    sizes = sorted(set(sizes_bytes))
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    answering = threading.Thread(target=_answer, args=(store, sizes), daemon=True)
    answering.start()
    group, found = _group(store, 0), {}
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.uint8)
        found[size] = min(_there_and_back_s(group, tensor) for _ in range(ROUNDS)) / 2
    answering.join()
    return found


def _there_and_back_s(group: Any, tensor: torch.Tensor) -> float:
    began_s = time.perf_counter()
    group.send([tensor], 1, 0).wait()
    group.recv([tensor], 1, 0).wait()
    return time.perf_counter() - began_s


def _answer(store: Any, sizes: list[int]) -> None:
    group = _group(store, 1)
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.uint8)
        for _ in range(ROUNDS):
            group.recv([tensor], 0, 0).wait()
            group.send([tensor], 0, 0).wait()


def _group(store: Any, rank: int) -> Any:
    """torch's stubs know little of Gloo."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], _TIMEOUT
    return gloo(store, rank, 2, options)
