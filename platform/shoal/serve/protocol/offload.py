"""Decodes and encodes large tensors in JSON or of BYTES in a thread, so that the event loop's other requests do not
wait.

Called by the applications of REST and gRPC, on the event loop. Such elements are read one by one, which takes a second
and more for the largest body. Numbers in bytes are views of the body and cost nothing.

| capacity            | what blocks                      | who unblocks    | close()                           |
|---------------------|----------------------------------|-----------------|-----------------------------------|
| `MAX_WAITING_BYTES` | nothing: beyond, the next one is | the one thread, | none: the thread is the process's |
| to be read          | refused (429)                    | turn by turn    | and ends with it                  |

One thread, since decoding needs a multiple of a body's bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from shoal.errors import InferenceError

T = TypeVar("T")

LARGE_BYTES = 1 << 18  # below it, decoding takes less time than waiting for a busy thread
LARGE_ELEMENTS = 1 << 16
MAX_WAITING_BYTES = 1 << 28

_thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-large")
_waiting_bytes = 0  # written on the event loop


async def decode_in_thread(size_bytes: int, read: Callable[..., T], *arguments: object) -> T:
    """Run `read(*arguments)`, which reads so many bytes. Raises InferenceError (429)."""
    global _waiting_bytes
    if _waiting_bytes and _waiting_bytes + size_bytes > MAX_WAITING_BYTES:
        raise InferenceError(429, "too many large requests wait to be read; try again later", retry_after_s=1.0)
    _waiting_bytes += size_bytes
    try:
        return await run_in_thread(read, *arguments)
    finally:
        _waiting_bytes -= size_bytes


async def run_in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run `work(*arguments)` in its turn."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *arguments)


def has_large_arrays(arrays: Mapping[str, np.ndarray], *, raw: bool) -> bool:
    """Whether one of these takes long to encode, element by element. `raw`: numbers are sent as bytes, at no cost."""
    return any(array.size > LARGE_ELEMENTS and not (raw and array.dtype.kind != "O") for array in arrays.values())
