"""Large tensors in JSON or of BYTES, read and written beside the event loop, whose other requests would wait for them.

Called by the applications of REST and gRPC, on the event loop: such elements are taken one by one, which is a second
and more for what a body may hold. Numbers in bytes are views of the body, and cost nothing.

| capacity            | what blocks                      | who unblocks    | close()                           |
|---------------------|----------------------------------|-----------------|-----------------------------------|
| `MAX_WAITING_BYTES` | nothing: beyond, the next one is | the one thread, | none: the thread is the process's |
| to be read          | refused (429)                    | turn by turn    | and ends with it                  |

One thread, since what is read needs a multiple of its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from shoal.errors import InferenceError

T = TypeVar("T")

LARGE_BYTES = 1 << 18  # below that it takes less than to wait for a thread that computes
LARGE_ELEMENTS = 1 << 16
MAX_WAITING_BYTES = 1 << 28

_thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-large")
_waiting_bytes = 0  # written on the event loop


async def decode_in_thread(size_bytes: int, read: Callable[..., T], *arguments: object) -> T:
    """The result of `read(*arguments)`, which reads so many bytes. Raises InferenceError (429)."""
    global _waiting_bytes
    if _waiting_bytes and _waiting_bytes + size_bytes > MAX_WAITING_BYTES:
        raise InferenceError(429, "too many large requests wait to be read; try again later", retry_after_s=1.0)
    _waiting_bytes += size_bytes
    try:
        return await run_in_thread(read, *arguments)
    finally:
        _waiting_bytes -= size_bytes


async def run_in_thread(work: Callable[..., T], *arguments: object) -> T:
    """The result of `work(*arguments)`, in its turn."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *arguments)


def has_large_arrays(arrays: Mapping[str, np.ndarray], *, raw: bool) -> bool:
    """Whether to write one of these takes long, element by element. `raw`: numbers go as bytes, and cost nothing."""
    return any(array.size > LARGE_ELEMENTS and not (raw and array.dtype.kind != "O") for array in arrays.values())
