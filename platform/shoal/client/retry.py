"""One call and its retries, without a socket: what to send, for how long, and what to make of what came back.

A conversation is a generator: it yields what is to be done (send, or wait), is told what became of it, and returns the
answer. `Client` and `AsyncClient` do what it says, each in its own way, so that the rules stand here once:

    what happened                                             then
    no connection: nothing was sent                           again, soon, while the caller's time lasts
    429, 503 with Retry-After                                 again after that time, if the caller's lasts so long
    the connection broke after the request was sent           ConnectionLost; again if `retry_lost`
    the caller's time is over                                 InferenceError (504)
    any other status but 2xx                                  InferenceError with the endpoint's words

What changes an endpoint is tried again only in the first case: who answers 503, or nothing, may have made the change.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from shoal.errors import ConnectionLost, InferenceError

FIRST_WAIT_S, LAST_WAIT_S = 0.05, 1.0
JITTER = 0.25  # so that those who were refused together do not come back together
DEADLINE_HEADER = "shoal-deadline-ms"
_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """What goes out. `path` begins with a slash."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, whole. The names of the headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a caller waits, and what may be tried again meanwhile.

    timeout_s:   for the whole call, with everything that is tried again
    num_retries: how often at most
    retry_lost:  also when the connection broke after the request was sent. Inference changes nothing, so that asking
                 again costs no more than the time; but the model then computes the same twice
    is_change:   what was sent is never tried again, whatever came back
    tells:       whether the endpoint is told how long the answer is of use, and refuses what cannot be in time
    end_s:       when that time is over, by the clock of the conversation; None when it begins with this call
    """

    timeout_s: float
    num_retries: int = 3
    retry_lost: bool = False
    is_change: bool = False
    tells: bool = False
    end_s: float | None = None

    def get_remaining_s(self) -> float | None:
        """What is left until `end_s`, by time.monotonic(); None when it has not begun."""
        return None if self.end_s is None else self.end_s - time.monotonic()


@dataclass(frozen=True, slots=True)
class Send:
    """Send this and report a `Reply`, `NotSent`, `ConnectionBroken` or `TimedOut`."""

    request: EndpointRequest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait for so long; there is nothing to report."""

    seconds: float


@dataclass(frozen=True, slots=True)
class NotSent:
    """There was no connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionBroken:
    """The connection broke after the request, or a part of it, was sent."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """No answer within the time."""


SendOutcome: TypeAlias = Reply | NotSent | ConnectionBroken | TimedOut | None
RetrySteps: TypeAlias = Generator[Send | Sleep, SendOutcome, Reply]


def request_with_retries(
    request: EndpointRequest,
    patience: RetryPolicy,
    clock: Callable[[], float] = time.monotonic,
    jitter: Callable[[], float] = random.random,
) -> RetrySteps:
    """The conversation about one request; returns a reply of status 2xx. Raises InferenceError, ConnectionLost."""
    end_s = clock() + patience.timeout_s if patience.end_s is None else patience.end_s
    failure: Exception = timeout_error(patience)
    for attempt in range(patience.num_retries + 1):
        is_last = attempt == patience.num_retries
        remaining_s = end_s - clock()
        if remaining_s <= 0:
            raise failure  # a wait may take longer than it was to: what was found before it says more than the time
        outcome = yield Send(_add_deadline_header(request, remaining_s) if patience.tells else request, remaining_s)
        wait_s = min(LAST_WAIT_S, FIRST_WAIT_S * 2**attempt)
        match outcome:
            case Reply(status=status) if 200 <= status < 300:
                return outcome
            case Reply():
                error = decode_error(outcome)
                if error.retry_after_s is None or patience.is_change or is_last:
                    raise error
                wait_s = error.retry_after_s
                failure = error
            case NotSent(reason):
                failure = ConnectionLost(f"the endpoint cannot be reached: {reason}")
            case ConnectionBroken(reason):
                failure = ConnectionLost(f"the connection broke before the answer was whole: {reason}")
                if patience.is_change or not patience.retry_lost:
                    raise failure
            case _:
                raise timeout_error(patience)
        wait_s *= 1.0 + JITTER * jitter()
        if is_last or clock() + wait_s >= end_s:
            raise failure
        yield Sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def decode_error(reply: Reply) -> InferenceError:
    """What the endpoint said, as an exception. `retry_after_s` is set for a 429 or 503 that invites to try again."""
    try:
        found = msgspec.json.decode(reply.body)
        message = str(found["error"])
    except (msgspec.DecodeError, TypeError, KeyError):
        message = reply.body[:_MESSAGE_CHARS].decode(errors="replace").strip() or f"HTTP status {reply.status}"
    return InferenceError(reply.status, message, _parse_retry_after_s(reply))


def _parse_retry_after_s(reply: Reply) -> float | None:
    if reply.status not in (429, 503):
        return None
    try:
        return max(0.0, float(reply.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date, which an endpoint of ours never sends
        return None


def _add_deadline_header(request: EndpointRequest, remaining_s: float) -> EndpointRequest:
    headers = {**request.headers, DEADLINE_HEADER: f"{remaining_s * 1000:.3f}"}
    return EndpointRequest(request.method, request.path, headers, request.body)


def timeout_error(patience: RetryPolicy) -> InferenceError:
    """What a caller hears whose time is over."""
    return InferenceError(504, f"no answer within {patience.timeout_s:g} s")
