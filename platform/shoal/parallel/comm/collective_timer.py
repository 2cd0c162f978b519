"""Seconds that a rank waits for others within a step: of this process on a CPU, of its stream on a CUDA device.

`CollectiveTimer` times collectives that torch's own code calls: FSDP2 and DTensor.

Both end a collective in one of two ways: `Work.wait`, or `wait_tensor` of functional collectives. During a step both
are timed on its thread, or stream; outside it, and on others, they are unchanged. The functions are replaced, not the
operator under `wait_tensor`: its kernel, called from Python, holds the interpreter's lock while it waits. No other
thread would run: neither the user's, nor gloo's own when it releases a tensor. Called by plans whose collectives torch
calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


class StreamWaits:
    """Seconds in which a CUDA stream waits, by events before and after. The host waits for none of them."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._total_s = 0.0

    def begin(self) -> Any:
        """Mark the current stream's place before a wait."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, began: Any) -> None:
        """Mark its place after the wait."""
        self._pending.append((began, self.begin()))
        _ = self.total_s  # releases the events of earlier steps

    @property
    def total_s(self) -> float:
        """Seconds of the waits that are over."""
        while self._pending and self._pending[0][1].query():
            began, ended = self._pending.popleft()
            self._total_s += began.elapsed_time(ended) / 1e3
        return self._total_s


class HostWaits:
    """Seconds in which a thread waits."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def begin(self) -> Any:
        return time.perf_counter()

    def end(self, began: Any) -> None:
        self.total_s += time.perf_counter() - began


def make_waits(device: torch.device) -> StreamWaits | HostWaits:
    """What waits for other ranks when tensors are on `device`."""
    return StreamWaits() if device.type == "cuda" else HostWaits()


class CollectiveTimer:
    """Times the collectives of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._waits = device, make_waits(device)

    @property
    def waited_s(self) -> float:
        """Seconds so far in which collectives ran and nothing was computed."""
        return self._waits.total_s

    @contextmanager
    def time_collectives(self) -> Iterator[None]:
        """Measure within the context. Takes 20 us.

        On a CUDA device, FSDP2 lets its own streams wait for collectives, and then that of the computation for these:
        waits of the latter count, on whatever thread: backward passes have one of their own there.
        """
        thread, is_cuda = threading.get_ident(), self._device.type == "cuda"
        computing = torch.cuda.current_stream(self._device) if is_cuda else None

        def is_of_step() -> bool:
            if is_cuda:
                return torch.cuda.current_stream(self._device) == computing
            return threading.get_ident() == thread

        def timed(function: Callable[..., Any], *args: Any) -> Any:
            if not is_of_step():
                return function(*args)
            began = self._waits.begin()
            try:
                return function(*args)
            finally:
                self._waits.end(began)

        wait = dist.Work.wait
        wait_tensor = functional.wait_tensor
        wait_event = torch.cuda.Stream.wait_event
        dist.Work.wait = lambda *args: timed(wait, *args)  # type: ignore[method-assign]
        functional.wait_tensor = lambda tensor: timed(wait_tensor, tensor)
        if is_cuda:
            torch.cuda.Stream.wait_event = lambda stream, event: (  # type: ignore[method-assign, assignment]
                timed(wait_event, stream, event) if stream == computing else wait_event(stream, event)
            )
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]
            functional.wait_tensor = wait_tensor
            torch.cuda.Stream.wait_event = wait_event  # type: ignore[method-assign]
