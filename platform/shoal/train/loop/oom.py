"""Out of memory: what it was, and what would have fitted. And a peer that is gone.

Called by the Trainer: for a step that raised, and around all that it does together with other ranks. Every other error
is passed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shoal.batch_tree import count_samples, slice_samples
from shoal.errors import OutOfMemory, RankLost, summarize_error

if TYPE_CHECKING:
    from shoal.parallel import World
    from shoal.train.loop.components import TrainComponents

# What torch says of host memory, for which it raises a plain RuntimeError.
_CPU = re.compile(r"DefaultCPUAllocator: .*(can't allocate memory|not enough memory)|unable to mmap", re.DOTALL)
# What gloo and NCCL say when the other end of a connection is gone.
_PEER = re.compile(r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited|Timed out")


def explain_error(error: BaseException, parts: TrainComponents, batch: Any, step: int) -> BaseException:
    """OutOfMemory saying what would have fitted, or the error itself. `step`: how many were done before."""
    if is_out_of_memory(error):
        accumulate = parts.spec.parallel.accumulate
        size = count_samples(batch) // accumulate
        fitting = None
        if parts.degrees.workers == 1:  # with peers, a trial would wait for theirs

            def attempt(num: int) -> object:
                first = slice_samples(batch, slice(num * accumulate))
                return parts.model.train_step(first, step)  # which divides it again

            fitting = find_largest_fitting(attempt, size)
        return make_out_of_memory_error(error, step + 1, size, fitting)
    return error


@contextmanager
def translate_lost_ranks(world: World) -> Iterator[None]:
    """Within, what a collective says of a peer that is gone is raised as RankLost: not in a step alone."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not _PEER.search(str(error)):
            raise
        problem = f"another process of the group died or stopped answering ({summarize_error(error)})"
        raise RankLost(problem) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU.search(str(error)) is not None


def find_largest_fitting(attempt: Callable[[int], object], size: int) -> int | None:
    """The largest number of samples below `size`, by halving, for which `attempt` goes through; 0: not even one.

    None when a smaller batch raises something else, as batch normalisation does of a single sample.
    """
    size //= 2
    while size:
        try:
            attempt(size)
        except (MemoryError, RuntimeError, ValueError) as error:
            if not is_out_of_memory(error):
                return None
        else:
            return size
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size //= 2
    return 0


def make_out_of_memory_error(error: BaseException, step: int, size: int, fitting: int | None) -> OutOfMemory:
    """The error that a user sees.

    step:    as the record counts them, from 1
    size:    samples that one micro-step had on this rank
    fitting: how many would have fitted; None when that could not be tried
    """
    problem = f"step {step}: the memory is too small for {size} samples at a time ({summarize_error(error)})"
    if fitting is None:
        return OutOfMemory(f"{problem}. Raise parallel.accumulate, or lower batch_size")
    if fitting == 0:
        return OutOfMemory(f"{problem}; not even one would have fitted. Split the model: parallel=fsdp workers=2")
    factor = next(each for each in range(-(-size // fitting), size + 1) if size % each == 0)
    return OutOfMemory(f"{problem}; {fitting} would have fitted: multiply parallel.accumulate by {factor}")
