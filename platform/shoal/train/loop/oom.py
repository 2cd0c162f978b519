"""Explain out-of-memory errors with a batch size that fits, and detect lost ranks.

Called by the Trainer: for a step that raised, and around its collectives. Every other error is passed on unchanged.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shoal.batch_tree import count_samples, slice_samples
from shoal.errors import OutOfMemory, RankLost, ShoalError, summarize_error
from shoal.train.shape_errors import explain_mismatch

if TYPE_CHECKING:
    from shoal.parallel import World
    from shoal.train.loop.components import TrainComponents

# Torch's message for host memory, where it raises a plain RuntimeError.
_CPU = re.compile(r"DefaultCPUAllocator: .*(can't allocate memory|not enough memory)|unable to mmap", re.DOTALL)
# Messages of gloo and NCCL about a closed connection.
_PEER = re.compile(r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited|Timed out")


def explain_error(error: BaseException, parts: TrainComponents, batch: Any, step: int) -> BaseException:
    """OutOfMemory with a size that fits; a ConfigError with the layer that its input does not fit; or the error itself.

    step: the number of finished steps
    """
    if is_out_of_memory(error):
        accumulate = parts.spec.parallel.accumulate
        size = count_samples(batch) // accumulate
        fitting = None
        if parts.degrees.workers == 1:  # otherwise a trial would wait for the other ranks
            # The frames of the error have the step's tensors in them, beside which no trial would have its memory.
            traceback.clear_frames(error.__traceback__)

            def attempt(num: int) -> object:
                first = slice_samples(batch, slice(num * accumulate))
                return parts.model.train_step(first, step)  # which divides it again

            fitting = find_largest_fitting(attempt, size)
        return make_out_of_memory_error(error, step + 1, size, fitting)
    if (
        parts.degrees.workers == 1 and not isinstance(error, ShoalError) and isinstance(error, RuntimeError)
    ):  # others would wait in a collective
        return explain_mismatch(parts.task, parts.model.modules[0], batch, error) or error
    return error


@contextmanager
def translate_lost_ranks(world: World) -> Iterator[None]:
    """Within the context, a collective's error about a lost peer is raised as RankLost."""
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
    """The largest number of samples below `size`, by halving, with which `attempt` succeeds; 0: not even one.

    None when a smaller batch raises another error, as batch normalisation does for a single sample.
    """
    size //= 2
    while size:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            attempt(size)
        except (MemoryError, RuntimeError, ValueError) as error:
            if not is_out_of_memory(error):
                return None
        else:
            return size
        size //= 2
    return 0


def make_out_of_memory_error(error: BaseException, step: int, size: int, fitting: int | None) -> OutOfMemory:
    """The error for the user.

    step:    as the record counts them, from 1
    size:    samples of one micro-step on this rank
    fitting: the number that fits; None if untested
    """
    problem = f"step {step}: the memory is too small for {size} samples at a time ({summarize_error(error)})"
    if fitting is None:
        return OutOfMemory(f"{problem}. Raise parallel.accumulate, or lower batch_size")
    if fitting == 0:
        return OutOfMemory(f"{problem}; not even one would have fitted. Split the model: parallel=fsdp workers=2")
    factor = next(each for each in range(-(-size // fitting), size + 1) if size % each == 0)
    return OutOfMemory(f"{problem}; {fitting} would have fitted: multiply parallel.accumulate by {factor}")
