"""Seconds that a rank waits for others within a step, for collectives that torch's own code calls: FSDP2 and DTensor.

Both end a collective in one of two ways: `Work.wait`, or `wait_tensor` of functional collectives. During a step both
are timed on its thread; outside it, and on other threads, they are unchanged. The functions are replaced, not the
operator under `wait_tensor`: its kernel, called from Python, holds the interpreter's lock while it waits. No other
thread would run: neither the user's, nor gloo's own when it releases a tensor. Called by plans whose collectives torch
calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


class CollectiveTimer:
    """waited_s: seconds so far in which collectives ran and nothing was computed

    NaN on CUDA, where a stream waits instead of a thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_known = device.type == "cpu"
        self.waited_s = 0.0 if self._is_known else float("nan")

    def time_collectives(self) -> AbstractContextManager[None]:
        """Measure within the context. Takes 20 us."""
        return self._time_collectives() if self._is_known else nullcontext()

    @contextmanager
    def _time_collectives(self) -> Iterator[None]:
        thread = threading.get_ident()

        def timed(function: Callable[..., Any], *args: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args)
            began_s = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.waited_s += time.perf_counter() - began_s

        wait, wait_tensor = dist.Work.wait, functional.wait_tensor
        dist.Work.wait = lambda *args: timed(wait, *args)  # type: ignore[method-assign]
        functional.wait_tensor = lambda tensor: timed(wait_tensor, tensor)
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]
            functional.wait_tensor = wait_tensor
