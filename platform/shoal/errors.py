"""The exceptions of Shoal: one tree, so that `except ShoalError` is enough.

    ShoalError
    ├── ConfigError            a value given by the user does not fit (field, value, remedy)
    │   ├── SpecMismatch       two things that must agree do not (a model and its weights, a run and its resume)
    │   ├── PlanError          a parallel plan that does not fit the workers, the model or the batch
    │   └── DataError          a dataset that is missing, empty, truncated, ragged or unreadable
    │       └── TreeError      a tree or graph that cannot be computed (tree, node)
    ├── WireError              a message that breaks the protocol; carries a protocol error code
    │   ├── ProtocolViolation  malformed, oversized, truncated or unknown
    │   └── Refused            the peer answered with an error (bad token, wrong version, ...)
    ├── InvalidSegment         experience that does not fit the run's spec (field, reason)
    ├── ConnectionLost         the peer did not answer within its deadline
    │   └── RequestLost        the connection broke after the request was sent: it may have been executed
    ├── RunChanged             the gateway's address now serves another run, which the client has joined
    ├── Closed                 the object was used after close()
    ├── WeightsError           weights that are missing, damaged or of the wrong shape
    ├── StoreError             a folder or bucket that cannot be reached or refuses; an OSError too
    ├── RegistryError          a model, version or alias that does not exist or cannot be written
    ├── CheckpointError        a checkpoint that is missing or damaged, or could not be written
    ├── TrainError             a training run that cannot continue
    │   ├── NotFinite          a loss, gradient or weight is NaN or infinite (step, samples, last good checkpoint)
    │   ├── OutOfMemory        the device's memory is too small for a step; names a size that fits
    │   └── RankLost           another process of the group died or stopped answering
    ├── RunError               a run that does not exist or failed
    │   ├── NotReached         it ended without the target that it was given (the program's exit status is 3)
    │   ├── RecordUnwritable   its record cannot be written for now
    │   └── LedgerUnwritable   the accounts of its experience cannot be written for now
    ├── InferenceError         a request that an endpoint rejects; carries an HTTP status
    ├── ClusterError           Ray could not be started, reached or stopped
    │   └── NoCapacity         a run has waited in vain for the places of its workers (need, found, wait_s)
    └── MissingExtra           a library of an extra of the package is not installed

Imported everywhere; imports nothing of Shoal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Self

MAX_SHOWN_LENGTH, MAX_SUMMARY_LENGTH = 160, 200
MAX_INDICES = 16  # of samples that are named


class ShoalError(Exception):
    """The root of all exceptions of Shoal. Another process makes it again of the same arguments."""

    _arguments: tuple[Any, ...]
    _options: dict[str, Any]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        error = super().__new__(cls, *arguments)
        error._arguments, error._options = arguments, options
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self._options), self._arguments, vars(self)


def summarize_error(error: BaseException, *, line: int = 0, max_chars: int | None = MAX_SUMMARY_LENGTH) -> str:
    """One line of what an error says; its type's name when it says nothing.

    line: which one: 0 has what torch and Serve say before pages of advice; -1 what is raised at the end of a traceback
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[line].strip()[:max_chars]


def error_summary(text: str) -> str:
    """The message of our last error in a traceback that Ray passed on as text, or that memory has run out; "" for
    neither."""
    ours = re.findall(r"^shoal\.errors\.\w+: (.+)$", text, re.MULTILINE)
    memory = re.search(r"were killed due to the node running low on memory.* was (\S+)GB used / (\S+)GB limit", text)
    if memory and not ours:
        return f"Ray ended the process, since {memory[1]} of its host's {memory[2]} GB of memory were in use"
    return str(ours[-1]) if ours else ""


def suggest(name: str, known: Iterable[str], otherwise: str = "", *, most: int = 1, least: float = 0.6) -> str:
    """`did you mean 'lenet'?`, with the nearest of the known names, if any is near; else `otherwise`.

    least: the likeness that counts as near, of 0 to 1
    """
    import difflib  # milliseconds, which an actor need not take

    by_case = {each.lower(): each for each in known}
    near = [by_case[each] for each in difflib.get_close_matches(name.lower(), by_case, n=most, cutoff=least)]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


class ConfigError(ShoalError, ValueError):
    """A value given by the user does not fit. The message names field, value (but for whole specs) and remedy."""

    def __init__(self, field: str, value: object, problem: str, remedy: str = "") -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        is_shown = isinstance(value, str) or len(repr(value)) <= MAX_SHOWN_LENGTH
        message = f"{field} = {value!r}: {problem}" if is_shown else f"{field}: {problem}"
        super().__init__(f"{message}. {remedy}" if remedy else message)


class SpecMismatch(ConfigError):
    """Two things that must agree do not."""


class PlanError(ConfigError):
    """A parallel plan does not fit the workers, the model or the batch."""


class DataError(ConfigError):
    """A dataset is missing, empty, truncated, ragged or unreadable."""


class TreeError(DataError):
    """A tree or graph cannot be computed. `tree` is its index in the batch, `node` its number in the tree; or None."""

    def __init__(self, tree: int | None, node: int | None, problem: str, remedy: str = "") -> None:
        super().__init__("trees", self._name(tree, node), problem, remedy)
        self.tree, self.node = tree, node

    @staticmethod
    def _name(tree: int | None, node: int | None) -> str:
        return "batch" if tree is None else f"tree {tree}" if node is None else f"tree {tree}, node {node}"


class WireError(ShoalError):
    """A message broke the protocol. `code` is one of the error codes of docs/protocol.md."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code}: {message}")


class ProtocolViolation(WireError):
    """A malformed, oversized, truncated or unknown message. `seq` is its segment's number where the header has it."""

    def __init__(self, code: str, message: str, seq: int | None = None) -> None:
        self.seq = seq
        super().__init__(code, message)


class Refused(WireError):
    """The peer answered with an error message."""


class InvalidSegment(ShoalError, ValueError):
    """A segment does not fit the run's spec. `reason` is the drop reason under which it is counted."""

    def __init__(self, reason: str, field: str, problem: str) -> None:
        self.reason = reason
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class ConnectionLost(ShoalError, ConnectionError):
    """The peer did not answer within its deadline."""


class RequestLost(ConnectionLost):
    """The connection broke after the request was sent: the peer may have executed it, or have died of it."""


class RunChanged(ShoalError):
    """The gateway's address now serves another run. The client has joined it: read its spec and weights again."""


class Closed(ShoalError):
    """The object was used after close()."""


class WeightsError(ShoalError):
    """Weights are missing, damaged or of the wrong shape."""


class StoreError(ShoalError, OSError):
    """A store (a folder or a bucket) cannot be reached, or refuses."""


class RegistryError(ShoalError):
    """A model, version or alias does not exist or cannot be written."""


class CheckpointError(ShoalError):
    """A checkpoint is missing or damaged, or could not be written."""


class TrainError(ShoalError):
    """A training run cannot continue."""


class NotFinite(TrainError):
    """A loss, gradient or weight is NaN or infinite in a step, counted from 1 as in the record and in checkpoints.

    `indices` are the samples of the step's batch, if known; `remedy` is that for what has been found in them.
    """

    def __init__(
        self, what: str, step: int, indices: list[int] | None, checkpoint: str | None, remedy: str = ""
    ) -> None:
        self.what = what
        self.step = step
        self.indices = indices
        self.checkpoint = checkpoint
        self.remedy = remedy or "lower optimizer.learning_rate, set clip_norm, or look at these samples"
        where = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        shown = "" if indices is None else f", samples {_format_indices(indices)}"
        super().__init__(f"{what} is not finite in step {step}{shown}; {where}. {self.remedy}")


class OutOfMemory(TrainError):
    """The device's memory is too small for a step; the message names a size that fits."""


class WorkerDeparted(ShoalError):
    """A worker has left a run in order, between two steps, after a notice (SIGTERM).

    is_over: it came when the run had ended, or another has its place, since its host was lost for a while
    """

    def __init__(self, problem: str, *, is_over: bool = False) -> None:
        super().__init__(problem)
        self.is_over = is_over


class RankLost(TrainError):
    """Another process of the group died or stopped answering."""


class RunError(ShoalError):
    """A run does not exist or failed."""


class NotReached(RunError):
    """A run has ended by its limits, without the target that it was given. Its best version is registered, not as
    champion. A program that ends with it has the exit status EXIT_STATUS."""

    EXIT_STATUS: ClassVar[int] = 3


class RecordUnwritable(RunError):
    """The run record cannot be written now: the disk is full, or others lock it. Its rows are written later."""


class LedgerUnwritable(RunError):
    """The accounts of experience cannot be written now: the disk is full. They keep the last acknowledged state."""


class InferenceError(ShoalError):
    """A request that an endpoint rejects; `status` is the HTTP status of the answer.

    `retry_after_s`: how long until the same request may succeed; None if unknown.
    `field`: the column of a row that is at fault; "" for none.
    `code`: what programs tell it by, of an API that has such; "" for none.
    """

    def __init__(
        self, status: int, message: str, retry_after_s: float | None = None, field: str = "", code: str = ""
    ) -> None:
        message = message.encode(errors="backslashreplace").decode()  # lone surrogates of file names are not UTF-8
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.field = field
        self.code = code
        super().__init__(message)


class ModelError(InferenceError):
    """A model's own failure on a request (500). Callers receive its text only if their endpoint has `show_errors`."""


class ClusterError(ShoalError):
    """Ray could not be started, reached or stopped. The message says what to do."""


class NoCapacity(ClusterError):
    """A run has waited `wait_s` seconds for the places of its workers: what it needs, and what there was at the end."""

    def __init__(self, need: str, found: str, wait_s: float) -> None:
        self.need = need
        self.found = found
        self.wait_s = wait_s
        remedy = "give it longer (wait=1h), end what runs (`shoal status`), or ask for less"
        super().__init__(f"{need}, and has waited {wait_s:g} s: {found}. {remedy}")


class MissingExtra(ShoalError, ImportError):
    """A library of an extra of the package is not installed."""


def format_install(extra: str) -> str:
    """The remedy where a library of an extra of the package is missing."""
    return f"pip install 'CHECKOUT[{extra}]', with the folder of Shoal's sources, or its wheel, for CHECKOUT"


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports of optional libraries: raises MissingExtra, which names the extra, if one is missing."""
    try:
        yield
    except ImportError as error:
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__  # as Ray wraps its own
        if not isinstance(missing, ModuleNotFoundError):
            raise
        raise MissingExtra(f"{missing.name} is not installed: {format_install(extra)}", name=missing.name) from None


def _format_indices(indices: list[int]) -> str:
    rest = f" and {len(indices) - MAX_INDICES} more" if len(indices) > MAX_INDICES else ""
    return ", ".join(map(str, indices[:MAX_INDICES])) + rest
