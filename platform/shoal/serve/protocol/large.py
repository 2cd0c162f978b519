"""Large tensors in JSON or of BYTES, read and written beside the event loop, whose other requests would wait for them.

Called by the applications of REST and gRPC: such elements are taken one by one, which is a second and more for what a
body may hold. All of a process take turns in one thread, since what is read needs a multiple of its bytes. Numbers in
bytes are views of the body, and cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

T = TypeVar("T")

LARGE_BYTES = 1 << 18  # below that it takes less than to wait for a thread that computes
LARGE_ELEMENTS = 1 << 16

_thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-large")


async def beside(work: Callable[..., T], *arguments: object) -> T:
    """The result of `work(*arguments)`, in its turn."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *arguments)


def has_many(arrays: Mapping[str, np.ndarray], *, raw: bool) -> bool:
    """Whether to write one of these takes long, element by element. `raw`: numbers go as bytes, and cost nothing."""
    return any(array.size > LARGE_ELEMENTS and not (raw and array.dtype.kind != "O") for array in arrays.values())
